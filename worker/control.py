"""The control listener: statistics out, plans in. The only place where the depth can be changed from outside.

Loopback by default; anything else needs a bearer token (or the operator's word that it may be open), see `access`. A
second token may read only. Errors are problem+json. Decides nothing: plans go to the engine as they come.
"""

import logging
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Match, Route

from worker.access import BearerAccess, allowed_control_hosts, read_control_tokens
from worker.api import openapi30
from worker.api.errors import BodyLimit, field_errors
from worker.api.served import NotReady, ServedModel
from worker.config import WorkerConfig
from worker.protocol import PlanStatus, SpecInfo, SpecPlan, SpecStats
from worker.spec.plan import PlanConflict, UnknownTier

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024


def create_control_app(model: ServedModel, config: WorkerConfig) -> FastAPI:
    """Build the app around the same model as the inference app.

    Raises:
        AccessError: see `read_control_tokens`.
    """
    tokens = read_control_tokens(config.server)
    app = FastAPI(title="Slipstream worker control", docs_url=None, redoc_url=None, redirect_slashes=False)
    _install_problem_answers(app)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    if tokens.change is not None:
        app.add_middleware(
            BearerAccess,
            tokens=[tokens.change],
            read_tokens=[] if tokens.read is None else [tokens.read],
            refuse=problem,
        )

    app.add_middleware(
        TrustedHostMiddleware, allowed_hosts=allowed_control_hosts(config.server, tokens), www_redirect=False
    )

    # Plain functions run on threads: the engine's locks are short, but the event loop waits for none.
    @app.get("/v1/spec/info")
    def info() -> SpecInfo:
        """What this worker is and can do."""
        return model.engine.info

    @app.get("/v1/spec/stats")
    def stats() -> SpecStats:
        """Cumulative counters since `boot_id`."""
        return model.engine.stats()

    @app.get("/v1/spec/plan")
    def plan_status() -> PlanStatus:
        """What the worker follows now."""
        return model.engine.plan_status()

    @app.put("/v1/spec/plan")
    def put_plan(plan: SpecPlan) -> PlanStatus:
        """Take or renew a plan; it holds from the next round."""
        return model.engine.put_plan(plan)

    _install_document(app, has_token=tokens.change is not None)
    return app


def _install_document(app: FastAPI, *, has_token: bool) -> None:
    """Describe the routes with the answers that they really give (the framework knows only half of them)."""
    ref = {"$ref": "#/components/schemas/Problem"}
    refusal = {"application/problem+json": {"schema": ref}}

    def document() -> dict[str, Any]:
        made = get_openapi(title=app.title, version=version("slipstream"), routes=app.routes)
        for path in made["paths"].values():
            for method, operation in path.items():
                statuses = [500, 503, *([401, 403] if has_token else [])]
                statuses += [400, 409, 413, 422] if method == "put" else []
                for status in statuses:
                    description = HTTPStatus(status).phrase
                    operation["responses"][str(status)] = {"description": description, "content": refusal}
                if has_token:
                    operation["security"] = [{"token": []}]
        schemas = made["components"]["schemas"]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        schemas["Problem"] = PROBLEM_SCHEMA
        if has_token:
            made["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        return dict(openapi30.downgraded(made | {"openapi": openapi30.VERSION}))

    app.openapi = document  # type: ignore[method-assign]


PROBLEM_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "errors": {"type": "array", "items": {"type": "object"}},
        "current": {"$ref": "#/components/schemas/PlanStatus"},
        "candidate_steps": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["type", "title", "status", "detail"],
}
"""RFC 9457, with our members: `errors` of a 422, `current` of a 409, `candidate_steps` of an unknown tier."""


def problem(
    status: int, detail: str, *, headers: dict[str, str] | None = None, **members: Any
) -> JSONResponse:
    """Return an RFC 9457 answer with extra members."""
    content = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return JSONResponse(
        content | members, status_code=status, headers=headers, media_type="application/problem+json"
    )


def _methods(app: FastAPI, request: Request) -> set[str]:
    """Return every method that the request's path knows."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in found for method in route.methods or ()}


def _install_problem_answers(app: FastAPI) -> None:
    async def on_conflict(request: Request, error: PlanConflict) -> JSONResponse:
        return problem(409, str(error), current=error.current.model_dump(mode="json"))

    async def on_unknown_tier(request: Request, error: UnknownTier) -> JSONResponse:
        return problem(422, str(error), candidate_steps=error.candidate_steps)

    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        found = [(path.removeprefix("body.") or "body", message) for path, message in field_errors(error)]
        errors = [{"field": path, "message": message} for path, message in found]
        detail = "; ".join(f"{path}: {message}" for path, message in found)
        return problem(422, detail, errors=errors)

    async def on_not_ready(request: Request, error: NotReady) -> JSONResponse:
        return problem(503, str(error), headers={"Retry-After": "1"})

    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        detail = f"{error.detail}: {request.method} {request.url.path}"
        headers = dict(error.headers or {})
        if error.status_code == 405:  # a path with two methods is two routes, and each knows only its own
            headers["Allow"] = ", ".join(sorted(_methods(app, request)))
        return problem(error.status_code, detail, headers=headers)

    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        log.error("unexpected error in %s %s", request.method, request.url.path)
        return problem(500, "internal error; see the worker's log")

    handlers: dict[type[Exception], Any] = {
        PlanConflict: on_conflict,
        UnknownTier: on_unknown_tier,
        RequestValidationError: on_invalid,
        NotReady: on_not_ready,
        HTTPException: on_http_error,
        Exception: on_bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
