"""Bodies: orders are small, so a large body is refused (413) before it is held in memory, announced or not."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.app.problems import problem

MAX_BODY_BYTES = 64 * 1024


class SmallBodies:
    """ASGI middleware around routes that take small bodies."""

    def __init__(self, app: ASGIApp, *, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on while its body stays within the limit."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        detail = f"the body is larger than {self._max_bytes} bytes"
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            await problem(413, detail)(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise HTTPException(413, detail)
            return message

        await self._app(scope, counted, send)
