"""Errors of the inference port, always in OpenAI's shape `{"error": {message, type, param, code}}`.

Also what every body goes through before a route sees it: a size limit, then strict JSON. Knows nothing about
what the bodies mean.
"""

import logging
from collections.abc import Mapping
from typing import Any

import pydantic_core
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

ERROR_TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer other than 200; `param` names the field at fault, if one is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON answer."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = ERROR_TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the HTTP answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def field_errors(error: ValidationError | Any) -> list[tuple[str, str]]:
    """Return (field path, message) of every complaint; input values are left out, they may not be JSON."""
    found = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"])
        found.append((path, item["msg"].removeprefix("Value error, ")))
    return found


def from_validation(error: ValidationError, prefix: str = "") -> ApiError:
    """Turn pydantic's complaints into one 400 that names the first field and tells all."""
    found = [
        (prefix + path if path else prefix.rstrip("."), message) for path, message in field_errors(error)
    ]
    text = "; ".join(f"{path}: {message}" if path else message for path, message in found)
    return ApiError(400, text, param=found[0][0] or None, code="invalid_value")


async def read_json_object(request: Request) -> dict[str, Any]:
    """Read the body as one JSON object.

    Raises:
        ApiError: 400 when it is not JSON (NaN, lone surrogates and broken UTF-8 are not) or no object.
    """
    try:
        value = pydantic_core.from_json(await request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


class BodyLimit:
    """ASGI middleware: a body above `max_bytes` is a 413, announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a `receive` that counts."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        received = 0

        async def counting_receive() -> Message:
            nonlocal received
            if announced.isdigit() and int(announced) > self.max_bytes:
                raise self._too_large()
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise self._too_large()
            return message

        await self.app(scope, counting_receive, send)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than {self.max_bytes} bytes")


def install_error_answers(app: FastAPI) -> None:
    """Give every error of the app OpenAI's shape, the framework's own included."""

    async def on_api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{message}: {request.method} {request.url.path}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        log.error("unexpected error in %s %s", request.method, request.url.path)
        return ApiError(500, "internal error; see the server's log").response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
