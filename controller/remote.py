"""A running controller as the command line sees it: requests with a token, answers, and the event stream.

Errors say what to do and carry the exit status that they mean. Prints nothing.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import httpx

from controller.app.access import AccessError, token_of_file

DEFAULT_URL = "http://127.0.0.1:8200"
TIMEOUT_SECONDS = 10.0
SILENCE_SECONDS = 15.0
"""The event stream speaks every second; after so long without a word it is dead."""
RECONNECT_SECONDS = 2.0

NOT_DONE, BAD_ARGUMENTS, NOT_CONFIRMED, NO_ACCESS = 1, 2, 3, 4
"""Exit statuses: refused or not reached; wrong arguments; taken but not seen to be followed; token missing or unfit."""


class RemoteError(Exception):
    """The controller could not be asked, or said no; with the exit status that this means."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Event(NamedTuple):
    """One event of the stream; `cursor` is None for what is no decision."""

    name: str
    cursor: int | None
    body: Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--url` and `--token-file`."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the controller (default {DEFAULT_URL})")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="holds the controller's bearer token")


def worker_path(worker_id: str, *parts: str) -> str:
    """Return the path of a worker's part of the API."""
    return "/".join(["/v1/workers", quote(worker_id, safe=""), *parts])


class Remote:
    """Asks one controller; closed at the end of a `with`."""

    def __init__(self, url: str, token_file: Path | None = None) -> None:
        """Take the address and the token.

        Raises:
            RemoteError: the token cannot be read, or the address is none.
        """
        self._url = url.rstrip("/")
        headers = {}
        try:
            if token_file is not None:
                headers["authorization"] = f"Bearer {token_of_file('--token-file', token_file)}"
            if not self._url.startswith(("http://", "https://")):
                raise RemoteError(
                    f"--url: must be http://HOST:PORT or https://HOST:PORT, got {url!r}", BAD_ARGUMENTS
                )
            self._client = httpx.Client(
                base_url=self._url,
                headers=headers,
                timeout=TIMEOUT_SECONDS,
                trust_env=False,  # no proxy from the environment between an operator and the controller
                verify=self._url.startswith("https"),  # plain HTTP: spare reading the certificates
            )
        except AccessError as error:
            raise RemoteError(str(error), BAD_ARGUMENTS) from error
        except httpx.InvalidURL as error:
            raise RemoteError(f"--url: {url!r}: {error}", BAD_ARGUMENTS) from error

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self._client.close()

    def ask(
        self, method: str, path: str, *, body: Any = None, params: Any = None, taken: Iterable[int] = ()
    ) -> tuple[int, Any]:
        """Return status and body of an answer below 300, or with one of the statuses `taken`.

        Raises:
            RemoteError: no answer, or a refusal.
        """
        try:
            answer = self._client.request(method, path, json=body, params=params)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        found = _body(answer)
        if answer.status_code >= 300 and answer.status_code not in taken:
            raise self._refusal(answer.status_code, found)
        return answer.status_code, found

    def follow(
        self,
        after: int,
        *,
        on_loss: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[Event]:
        """Yield the stream's events for ever, decisions behind a cursor; a lost stream is taken up again.

        Args:
            after: cursor.
            on_loss: told why, each time.
            sleep: waits before the next try.

        Raises:
            RemoteError: refused, or not reached at the first try.
        """
        was_there = False
        while True:
            try:
                timeout = httpx.Timeout(TIMEOUT_SECONDS, read=SILENCE_SECONDS)
                with self._client.stream(
                    "GET", "/v1/events", params={"after": after}, timeout=timeout
                ) as answer:
                    if answer.status_code != 200:
                        answer.read()
                        raise self._refusal(answer.status_code, _body(answer))
                    for event in parse_events(answer.iter_bytes()):
                        was_there = True
                        after = event.cursor if event.cursor is not None else after
                        yield event
                reason = "the controller ended the stream"
            except httpx.HTTPError as error:
                if not was_there:
                    raise self._unreachable(error) from error
                reason = str(error) or type(error).__name__
            on_loss(reason)
            sleep(RECONNECT_SECONDS)

    def _unreachable(self, error: Exception) -> RemoteError:
        why = str(error) or type(error).__name__
        return RemoteError(
            f"no controller answers at {self._url} ({why}); is it running (spec-controller run)? "
            "Another address: --url",
            NOT_DONE,
        )

    def _refusal(self, status: int, body: Any) -> RemoteError:
        detail = body.get("detail") if isinstance(body, dict) else None
        if detail is None:
            return RemoteError(
                f"{self._url} answers {status}, and not as a controller does; see --url", NOT_DONE
            )
        if status == 401:
            return RemoteError(f"{detail}; give the file that holds it with --token-file", NO_ACCESS)
        if status == 403:
            return RemoteError(f"{detail}; give its file with --token-file", NO_ACCESS)
        return RemoteError(str(detail), BAD_ARGUMENTS if status in (404, 422) else NOT_DONE)


def _body(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


def parse_events(chunks: Iterable[bytes]) -> Iterator[Event]:
    """Yield the server-sent events in a stream of bytes, as far as they are complete."""
    rest, fields = b"", dict[str, str]()
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            name, _, value = line.decode("utf-8", "replace").rstrip("\r").partition(":")
            if name:
                fields[name] = value.removeprefix(" ")
            elif not value:  # an empty line ends an event; `: …` is a comment
                if "data" in fields:
                    cursor = int(fields["id"]) if fields.get("id", "").isdecimal() else None
                    yield Event(fields.get("event", "message"), cursor, json.loads(fields["data"]))
                fields = {}
