"""Hand the host's secret files (mode 600) to the services: each gets its own, readable by its user alone.

Runs as the one-shot service `secrets` of docker-compose.yml, before the others at every `up`. It knows the services'
user and nothing about what a secret is for. Paths are arguments, so that tests can run it.
"""

import os
import sys
from pathlib import Path

USER = 10001
"""User and group of the images."""
WANTED = {
    "control/token": ("control_token", 0o400),
    "control/read_token": ("control_read_token", 0o400),
    "api/token": ("api_token", 0o400),
    # Prometheus reads with it: another user, but of our group.
    "api/read_token": ("api_read_token", 0o440),
}


def hand_out(source: Path, target: Path, user: int = USER) -> None:
    """Copy every wanted secret, each by one rename: a reader sees the old or the new one, whole.

    Raises:
        OSError: a secret is missing, or something may not be written.
        ValueError: a secret is empty.
    """
    for place, (name, mode) in WANTED.items():
        token = (source / name).read_bytes()
        if not token.strip():
            raise ValueError(f"{name} is empty")
        path = target / place
        draft = path.with_suffix(".new")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(token)
        draft.chmod(mode)
        os.chown(draft, user, user)
        draft.replace(path)


if __name__ == "__main__":
    try:
        hand_out(Path("/run/secrets"), Path("/run"))
    except (OSError, ValueError) as error:
        sys.exit(f"secrets: {error}; `make up` draws what is missing")
