"""Who may use the listeners: secrets from files or the environment, and the check of every request's bearer token.

The inference port may have an API key; the control port has a token for changing (which may read too) and one for
reading only. Knows nothing about routes or what an answer looks like: each listener brings its own refusal.
"""

import hmac
import ipaddress
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from pydantic import SecretStr
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from worker.config import ServerConfig

READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class AccessError(ValueError):
    """A listener must not be opened as configured; the message begins with the field's name."""


class ControlTokens(NamedTuple):
    """The bearer tokens of the control port; without `change` it is open."""

    change: str | None
    read: str | None


def read_api_key(server: ServerConfig) -> str | None:
    """Return the inference port's key, None for an open port (AccessError: it cannot be read)."""
    return _secret("api_key", server.api_key, server.api_key_file)


def read_control_tokens(server: ServerConfig) -> ControlTokens:
    """Return the control port's tokens, after checking that it may be opened with them.

    Raises:
        AccessError: a token cannot be read or makes no sense, or the host is not loopback and there is no token.
    """
    change = _secret("control_token", server.control_token, server.control_token_file)
    read = _secret("control_read_token", server.control_read_token, server.control_read_token_file)
    if read is not None and change is None:
        raise AccessError("server.control_read_token_file: goes together with server.control_token_file")
    if read is not None and read == change:
        raise AccessError("server.control_read_token_file: must differ from server.control_token_file")
    if change is None and not server.allow_open_control and not is_loopback(server.control_host):
        raise AccessError(
            f"server.control_host: {server.control_host} is not loopback; set server.control_token_file, "
            "or server.allow_open_control = true if everybody who reaches it may change the depth"
        )
    return ControlTokens(change, read)


def is_loopback(host: str) -> bool:
    """Whether nobody on another machine can reach this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allowed_control_hosts(server: ServerConfig, tokens: ControlTokens) -> list[str]:
    """Return the names under which the control port answers (`*`: any).

    Without a token it answers to loopback's names only: a web page whose name is made to point to this machine (DNS
    rebinding) asks with its own name in `Host`.
    """
    if tokens.change is not None or server.allow_open_control:
        return ["*"]
    host = server.control_host
    return [*LOOPBACK_NAMES, f"[{host}]" if ":" in host else host]


def _secret(field: str, value: SecretStr | None, path: Path | None) -> str | None:
    if value is not None and path is not None:
        raise AccessError(f"server.{field}: set either it or server.{field}_file")
    if value is not None:
        return _checked(f"server.{field}: it", value.get_secret_value().strip())
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"server.{field}_file: cannot read {path}: {error}") from None
    return _checked(f"server.{field}_file: {path}", text)


def _checked(what: str, token: str) -> str:
    """Refuse what no client could send in a header."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise AccessError(f"{what} is empty, or holds spaces or other than printable ASCII characters")
    return token


Refuse = Callable[[int, str], Response]
"""From 401 or 403 and a sentence to the listener's answer."""


class BearerAccess:
    """ASGI middleware: 401 without a token, and for one that does not do, before anything else is looked at."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Collection[str],
        refuse: Refuse,
        read_tokens: Collection[str] = (),
        open_paths: Collection[str] = (),
        unknown_status: int = 403,
    ) -> None:
        """Guard an app.

        Args:
            app: what is behind it.
            tokens: these may do everything.
            refuse: makes the answer.
            read_tokens: these may use reading methods only; 403 otherwise.
            open_paths: exact paths for which no token is asked.
            unknown_status: for a token that is none of these (OpenAI's clients expect 401).
        """
        self.app = app
        self._tokens = [token.encode() for token in tokens]
        self._read_tokens = [token.encode() for token in read_tokens]
        self._refuse = refuse
        self._open_paths = frozenset(open_paths)
        self._unknown_status = unknown_status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it carries a token that is good enough."""
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self.app(scope, receive, send)
            return
        refusal = self._judge(scope)
        await (refusal or self.app)(scope, receive, send)

    def _judge(self, scope: Scope) -> Response | None:
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, rest = header.partition(b" ")
        presented = rest.strip()
        if scheme.lower() != b"bearer" or not presented:
            return self._refusal(401, "a bearer token is needed")
        # Every token is compared, whatever the ones before said: how long it takes tells nothing.
        all_matches = [hmac.compare_digest(presented, token) for token in self._tokens]
        read_matches = [hmac.compare_digest(presented, token) for token in self._read_tokens]
        if any(all_matches) or (any(read_matches) and scope["method"] in READING_METHODS):
            return None
        if any(read_matches):
            return self._refusal(403, "this bearer token may only read")
        return self._refusal(self._unknown_status, "the bearer token is wrong")

    def _refusal(self, status: int, message: str) -> Response:
        refusal = self._refuse(status, message)
        if status == 401:
            refusal.headers["WWW-Authenticate"] = "Bearer"
        return refusal
