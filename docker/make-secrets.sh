#!/bin/sh
# Draw the tokens that docker-compose.yml mounts: one random word per file, mode 600, in a directory of mode 700.
# A file that is there is never touched: delete it to have a new one drawn.
#
#   docker/make-secrets.sh [DIRECTORY]        default: secrets
set -eu
directory=${1:-secrets}
umask 077
mkdir -p "$directory"
chmod 700 "$directory"
draft=$directory/.draft.$$
trap 'rm -f "$draft"' EXIT
for name in control_token control_read_token api_token api_read_token; do
    token=$(head -c 32 /dev/urandom | base64 | tr -d '=\n' | tr '+/' '-_')
    [ ${#token} -eq 43 ] || { echo "make-secrets: could not draw a token" >&2; exit 1; }
    printf '%s\n' "$token" > "$draft"
    # A link fails where the name is taken, so two runs at once cannot overwrite each other's token.
    if ln "$draft" "$directory/$name" 2>/dev/null; then
        echo "drew $directory/$name"
    elif [ ! -f "$directory/$name" ]; then
        echo "make-secrets: cannot write $directory/$name" >&2
        exit 1
    fi
    rm -f "$draft"
done
