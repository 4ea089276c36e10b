"""Server-sent events, and noticing that the client has gone.

Two ways to lose a client: it closes the connection (`http.disconnect` arrives), or it stops reading (a write does
not end within the timeout). Both end the work at once. Knows nothing about what is sent.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, but cancel it as soon as the client disconnects (then ClientGone).

    The request's body must have been read: from then on `receive` has nothing but the disconnect to say.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        return worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""What Unicode takes for the end of a line and JSON does not escape. For server-sent events only CR and LF are one, but
clients that cut by `str.splitlines` (httpx's `iter_lines`) would see a broken event."""


def event(data: dict[str, Any]) -> bytes:
    """Return one server-sent event: one line, whatever a client takes for a line's end."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS)
    return b"data: " + text.encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """A streamed answer; `on_close` is called exactly once, however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], None],
        write_timeout_seconds: float,
        headers: Mapping[str, str],
    ) -> None:
        self._events = events
        self._on_close = on_close
        self._write_timeout_seconds = write_timeout_seconds
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end, the client leaves, or a write takes too long."""
        try:
            await until_disconnect(receive, self._produce(send))
        except ClientGone:
            log.info("client left a stream")
        except TimeoutError:
            log.info("client did not read a stream for %g s", self._write_timeout_seconds)
        finally:
            self._on_close()

    async def _produce(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:
            async for data in events:
                message = {"type": "http.response.body", "body": data, "more_body": True}
                await asyncio.wait_for(send(message), self._write_timeout_seconds)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
