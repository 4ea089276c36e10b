"""The inference listener: generation, models, metrics and health as one ASGI app.

Everything it needs comes in through `create_app`; nothing is kept at module level. What changes the depth is on the
control listener (`control`), not here.
"""

import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from worker.api.errors import ApiError, BodyLimit, install_error_answers
from worker.api.routes import GenerationRoutes
from worker.api.served import NotReady, ServedModel
from worker.config import WorkerConfig
from worker.metrics import ServerMetrics, SpecCollector

MAX_BODY_BYTES = 4 * 1024 * 1024
WRITE_TIMEOUT_SECONDS = 30.0
"""A streaming client that takes nothing for this long is dropped."""


def create_app(
    model: ServedModel,
    config: WorkerConfig,
    *,
    registry: CollectorRegistry,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    write_timeout_seconds: float = WRITE_TIMEOUT_SECONDS,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """Build the app around a model that may still be loading (then generation answers 503).

    Args:
        model: what is served; the control app gets the same one.
        config: the worker's configuration.
        registry: metrics are registered here; one app per registry.
        clock: monotonic seconds, for latencies.
        wall_clock: Unix seconds, for the `created` stamps.
        write_timeout_seconds: longest wait for a streaming client to take data.
        max_body_bytes: larger bodies get 413.
    """
    app = FastAPI(
        title="Slipstream worker", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    install_error_answers(app)
    app.add_exception_handler(NotReady, _on_not_ready)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    registry.register(SpecCollector(model))
    generation = GenerationRoutes(
        model=model,
        metrics=ServerMetrics(registry),
        max_waiting_requests=config.engine.max_waiting_requests,
        write_timeout_seconds=write_timeout_seconds,
        clock=clock,
        wall_clock=wall_clock,
    )
    app.add_api_route(
        "/v1/chat/completions", generation.chat_completions, methods=["POST"], response_model=None
    )
    app.add_api_route("/generate", generation.native_generate, methods=["POST"], response_model=None)
    _add_model_routes(app, model, int(wall_clock()))
    _add_metrics_route(app, registry)
    _add_health_routes(app, model)
    return app


async def _on_not_ready(request: Request, error: Exception) -> JSONResponse:
    return ApiError(503, str(error), code="not_ready", headers={"Retry-After": "5"}).response()


def _add_model_routes(app: FastAPI, model: ServedModel, created: int) -> None:
    def card() -> dict[str, object]:
        info = model.engine.info
        return {
            "id": info.model,
            "object": "model",
            "created": created,
            "owned_by": "slipstream",
            "max_model_len": info.max_context_tokens,
        }

    @app.get("/v1/models")
    async def list_models() -> dict[str, object]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, object]:
        found = card()
        if name != found["id"]:
            raise ApiError(404, f"model: {name!r} is not served here, only {found['id']!r} is", param="model")
        return found


def _add_metrics_route(app: FastAPI, registry: CollectorRegistry) -> None:
    # A plain function runs on a thread: taking the snapshot may wait for the engine's lock.
    def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    for path in ("/metrics", "/metrics/"):
        app.add_api_route(path, metrics, methods=["GET"], response_model=None)


def _add_health_routes(app: FastAPI, model: ServedModel) -> None:
    async def healthz() -> Response:
        """Alive: the process answers and its engine thread, once started, has not died."""
        state = model.readiness()
        if not state.alive:
            return JSONResponse({"status": "dead", "detail": state.detail}, status_code=503)
        return JSONResponse({"status": "alive"})

    async def readyz() -> Response:
        """Ready: the model is loaded and the engine's loop ticks."""
        state = model.readiness()
        if not state.ready:
            return JSONResponse({"status": "not ready", "detail": state.detail}, status_code=503)
        return JSONResponse({"status": "ready"})

    for path in ("/healthz", "/health"):
        app.add_api_route(path, healthz, methods=["GET"], response_model=None)
    app.add_api_route("/readyz", readyz, methods=["GET"], response_model=None)
