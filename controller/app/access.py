"""Access: who may read and who may change. Bearer tokens, compared in constant time, before anything else is done.

Reading is GET, HEAD and OPTIONS; everything else changes something. `/healthz`, `/readyz` and the page's own files are
open always: they tell nothing about the workers. Knows nothing about the routes.
"""

import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from controller.app.problems import problem
from controller.config_service import ServerConfig

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/"})
OPEN_BELOW = "/web/"
READING = frozenset({"GET", "HEAD", "OPTIONS"})
MIN_TOKEN_LENGTH = 8
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/?#@]+)(?::\d{1,5})?")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class AccessError(ValueError):
    """The listener must not be opened as configured; the message names the field."""


@dataclass(frozen=True)
class Tokens:
    """Who may do what; without a token for changing everybody may do everything."""

    change: str | None = None
    read: str | None = None


def read_tokens(server: ServerConfig) -> Tokens:
    """Return the tokens of a listener.

    Raises:
        AccessError: a token cannot be read or is unfit, or the address is not loopback and nothing guards it.
    """
    change = _token("token", server.token, server.token_file)
    read = _token("read_token", server.read_token, server.read_token_file)
    if read is not None and change is None:
        raise AccessError(
            "server.token: must be set beside server.read_token, or nobody could change anything"
        )
    if read is not None and read == change:
        raise AccessError("server.read_token: is the same as server.token")
    if change is None and not server.allow_open and not is_loopback(server.host):
        raise AccessError(
            f"server.host: {server.host} is not loopback; set server.token_file (and server.read_token_file), "
            "or server.allow_open = true if everybody who reaches it may change depths"
        )
    return Tokens(change, read)


def allowed_hosts(server: ServerConfig, tokens: Tokens) -> list[str]:
    """Return the names under which the listener answers (`*`: any).

    Without a token these are loopback's only: a web page whose name is made to point to this machine (DNS rebinding)
    asks with its own name in `Host`.
    """
    if tokens.change is not None or server.allow_open:
        return ["*"]
    return [*LOOPBACK_NAMES, f"[{server.host}]" if ":" in server.host else server.host]


def token_of_file(field: str, path: Path) -> str:
    """Return the token that a file holds.

    Raises:
        AccessError: not readable, or not one ASCII word.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"{field}: cannot read {path}: {error}") from None
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise AccessError(f"{field}: {path} does not hold one ASCII token")
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token(name: str, value: SecretStr | None, file: Path | None) -> str | None:
    if file is not None:
        token = token_of_file(f"server.{name}_file", file)
    elif value is not None:
        token = value.get_secret_value()
    else:
        return None
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or any(c.isspace() for c in token):
        raise AccessError(f"server.{name}: must be one ASCII word of at least {MIN_TOKEN_LENGTH} characters")
    return token


class KnownHosts:
    """ASGI middleware: 400 for a request whose `Host` is none of the listener's names."""

    def __init__(self, app: ASGIApp, *, names: Sequence[str]) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it asks for one of the names."""
        if scope["type"] in ("http", "websocket") and not self._knows(Headers(scope=scope).get("host", "")):
            refusal = problem(400, "this listener does not answer to the name in Host")
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        found = HOST.fullmatch(host)
        return "*" in self._names or (found is not None and found[1].lower() in self._names)


class BearerAccess:
    """ASGI middleware: 401 without a valid token, 403 for a change with the token for reading.

    A change that a browser sends from another site's page is refused too (403), with or without tokens: it carries
    an `Origin` that is not the address asked.
    """

    def __init__(self, app: ASGIApp, *, tokens: Tokens, open_metrics: bool = False) -> None:
        self._app = app
        self._tokens = tokens
        self._open = OPEN_PATHS | ({"/metrics"} if open_metrics else frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it may pass."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        is_change = scope["method"] not in READING
        if is_change and not _is_same_site(headers):
            return problem(403, "changes from another site's page are refused (Origin is not this address)")
        is_open = scope["path"] in self._open or scope["path"].startswith(OPEN_BELOW)
        if self._tokens.change is None or (is_open and not is_change):
            return None
        presented = _bearer(headers)
        if presented is None:
            return _unauthorized("a bearer token is needed", "Bearer")
        may_change = hmac.compare_digest(presented, self._tokens.change.encode())
        may_read = self._tokens.read is not None and hmac.compare_digest(
            presented, self._tokens.read.encode()
        )
        if not may_change and not may_read:
            return _unauthorized("the bearer token is not known", 'Bearer error="invalid_token"')
        if is_change and not may_change:
            return problem(403, "this token is for reading; a change needs the other one")
        return None


def _bearer(headers: Headers) -> bytes | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    presented = token.strip().encode("latin-1")
    return presented if scheme.lower() == "bearer" and presented else None


def _is_same_site(headers: Headers) -> bool:
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == headers.get("host", "")
    except ValueError:  # no address at all
        return False


def _unauthorized(detail: str, challenge: str) -> Response:
    return problem(401, detail, headers={"WWW-Authenticate": challenge})
