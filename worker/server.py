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

from worker.access import BearerAccess, read_api_key
from worker.api.aborting import AbortRoutes
from worker.api.errors import ApiError, BodyLimit, install_error_answers
from worker.api.intake import Intake
from worker.api.native import ServerInfo, model_info
from worker.api.routes import GenerationRoutes
from worker.api.schema import openapi_document
from worker.api.served import NotReady, ServedModel
from worker.config import WorkerConfig
from worker.metrics import ServerMetrics, SpecCollector

OPEN_PATHS = ("/healthz", "/health", "/readyz", "/metrics", "/metrics/")
"""No key is asked for these: probes and scrapers have none, and they tell counts only."""


def create_app(
    model: ServedModel,
    config: WorkerConfig,
    *,
    registry: CollectorRegistry,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> FastAPI:
    """Build the app around a model that may still be loading (then generation answers 503).

    Args:
        model: what is served; the control app gets the same one.
        config: the worker's configuration.
        registry: metrics are registered here; one app per registry.
        clock: monotonic seconds, for latencies.
        wall_clock: Unix seconds, for the `created` stamps.

    Raises:
        worker.access.AccessError: the API key cannot be read.
    """
    server = config.server
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    install_error_answers(app)
    app.add_exception_handler(NotReady, _on_not_ready)
    app.add_middleware(BodyLimit, max_bytes=server.max_body_bytes)
    key = read_api_key(server)
    if key is not None:
        app.add_middleware(
            BearerAccess, tokens=[key], refuse=_refuse_key, open_paths=OPEN_PATHS, unknown_status=401
        )
    registry.register(SpecCollector(model))
    intake = Intake(
        model=model,
        metrics=ServerMetrics(registry),
        max_waiting_requests=config.engine.max_waiting_requests,
        clock=clock,
    )
    generation = GenerationRoutes(
        intake=intake,
        write_timeout_seconds=server.write_timeout_seconds,
        metrics_level=server.per_request_spec_decode_metrics,
        wall_clock=wall_clock,
    )
    _add_generation_routes(app, generation, AbortRoutes(intake.live))
    _add_model_routes(app, model, int(wall_clock()))
    _add_native_routes(app, model, config)
    _add_metrics_route(app, registry)
    _add_health_routes(app, model)
    _add_openapi_route(app, model, config, has_key=key is not None)
    return app


async def _on_not_ready(request: Request, error: Exception) -> JSONResponse:
    return ApiError(503, str(error), code="not_ready", headers={"Retry-After": "5"}).response()


def _add_openapi_route(app: FastAPI, model: ServedModel, config: WorkerConfig, *, has_key: bool) -> None:
    async def openapi() -> JSONResponse:
        """Return this document: its bounds are the loaded model's."""
        return JSONResponse(openapi_document(model, config, has_key=has_key))

    app.add_api_route("/openapi.json", openapi, methods=["GET"], response_model=None)


def _refuse_key(status: int, message: str) -> Response:
    return ApiError(status, f"{message}; it is the API key here", code="invalid_api_key").response()


def _add_generation_routes(app: FastAPI, routes: GenerationRoutes, aborting: AbortRoutes) -> None:
    for path, endpoint in (
        ("/v1/chat/completions", routes.chat_completions),
        ("/v1/completions", routes.text_completions),
        ("/generate", routes.native_generate),
        ("/v1/requests/{request_id:path}/abort", aborting.abort),
        ("/abort_request", aborting.native_abort),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)


def _add_native_routes(app: FastAPI, model: ServedModel, config: WorkerConfig) -> None:
    server_info = ServerInfo(model, config)

    # Plain functions run on threads: taking the statistics may wait for the engine's lock.
    def get_server_info() -> dict[str, object]:
        """Settings, limits and state under SGLang's names."""
        return server_info.document()

    def get_model_info() -> dict[str, object]:
        """What is served, under SGLang's names."""
        return model_info(model)

    for path, endpoint in (
        ("/server_info", get_server_info),
        ("/get_server_info", get_server_info),
        ("/model_info", get_model_info),
        ("/get_model_info", get_model_info),
    ):
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)


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

    async def list_models() -> dict[str, object]:
        """The one model."""
        return {"object": "list", "data": [card()]}

    async def get_model(name: str) -> dict[str, object]:
        """One model by its name."""
        found = card()
        if name != found["id"]:
            raise ApiError(404, f"model: {name!r} is not served here, only {found['id']!r} is", param="model")
        return found

    for path, endpoint in (("/v1/models", list_models), ("/v1/models/{name:path}", get_model)):
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)


def _add_metrics_route(app: FastAPI, registry: CollectorRegistry) -> None:
    # A plain function runs on a thread: taking the snapshot may wait for the engine's lock.
    def metrics(request: Request) -> Response:
        """Prometheus metrics."""
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
