"""Errors as problem+json (RFC 9457), FastAPI's own included; a client's mistake is never a 500."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from controller.commands import ModeForbids, NotATier, NothingToUndo
from controller.journal import JournalError

_TITLES = {
    400: "Bad request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Body too large",
    422: "Invalid value",
    500: "Internal error",
    503: "Unavailable",
}


class ProblemBody(BaseModel):
    """An error (RFC 9457); some carry further members."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[dict[str, str]] | None = None
    """For 422: each refused field with its message."""


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what the API's description says about error answers."""
    schema = {"$ref": "#/components/schemas/ProblemBody"}
    content = {"application/problem+json": {"schema": schema}}
    return {status: {"description": _TITLES[status], "content": content} for status in statuses}


class Problem(Exception):
    """An error answer with extra members."""

    def __init__(self, status: int, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.extra = extra


def problem(status: int, detail: str, headers: Any = None, **extra: Any) -> JSONResponse:
    """Return a problem+json answer."""
    body = {"type": "about:blank", "title": _TITLES.get(status, "Error"), "status": status, "detail": detail}
    return JSONResponse(
        body | extra, status_code=status, headers=headers, media_type="application/problem+json"
    )


def install(app: FastAPI) -> None:
    """Make every error of the app a problem+json answer."""

    @app.exception_handler(Problem)
    async def _problem(_: Request, error: Problem) -> JSONResponse:
        return problem(error.status, error.detail, **error.extra)

    @app.exception_handler(NotATier)
    async def _not_a_tier(_: Request, error: NotATier) -> JSONResponse:
        return problem(422, str(error), candidate_steps=error.tiers)

    @app.exception_handler(ModeForbids)
    @app.exception_handler(NothingToUndo)
    async def _not_now(_: Request, error: Exception) -> JSONResponse:
        return problem(409, str(error))

    @app.exception_handler(JournalError)
    async def _no_journal(_: Request, error: JournalError) -> JSONResponse:
        return problem(503, f"the journal cannot be read: {error}")

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        errors = [{"field": _field(item["loc"]), "message": _message(item)} for item in error.errors()]
        detail = "; ".join(f"{item['field']}: {item['message']}" for item in errors)
        return problem(422, detail, errors=errors)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        headers = dict(error.headers or {})
        if error.status_code == 405:  # a path with two methods is two routes, and each knows only its own
            headers["Allow"] = ", ".join(_methods(app, request))
        return problem(error.status_code, str(error.detail), headers=headers)

    @app.exception_handler(Exception)
    async def _unexpected(_: Request, error: Exception) -> JSONResponse:
        return problem(500, "an unexpected error; the controller's log has it")


def _methods(app: FastAPI, request: Request) -> list[str]:
    """Return the methods that the request's path knows."""
    return [
        method
        for method in ("DELETE", "GET", "HEAD", "POST", "PUT")
        if any(
            route.matches({**request.scope, "method": method})[0] == Match.FULL for route in app.router.routes
        )
    ]


def _field(location: tuple[Any, ...]) -> str:
    """Name the field without FastAPI's `body` or `query` in front; the body itself stays `body`."""
    inner = location[1:] if len(location) > 1 and not isinstance(location[1], int) else location[:1]
    return ".".join(str(part) for part in inner)


def _message(item: Any) -> str:
    # NOTE: the offending input is left out: it may be NaN or a lone surrogate, which JSON cannot carry back.
    message = str(item["msg"]).removeprefix("Value error, ")
    return message.encode("utf-8", "replace").decode()
