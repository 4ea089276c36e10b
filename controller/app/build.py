"""Put the controller together: loop, journal, metrics and routes; nothing is global."""

import asyncio
import contextlib
import importlib.metadata
import logging
from collections.abc import AsyncIterator, Mapping

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from controller.app import problems
from controller.app.routes import build_router
from controller.clock import Clock
from controller.commands import Operator
from controller.config import ControllerConfig, WorkerConfig
from controller.journal import Journal, MemoryJournal
from controller.loop import ControlLoop
from controller.metrics import ControllerMetrics
from controller.record import Recorder
from controller.worker_client import HttpWorkerClient, WorkerClient

logger = logging.getLogger("controller.app")


def create_app(
    config: ControllerConfig,
    *,
    clock: Clock,
    registry: CollectorRegistry,
    clients: Mapping[str, WorkerClient] | None = None,
    journal: Journal | None = None,
    epoch: int | None = None,
) -> FastAPI:
    """Build the application; its lifespan runs the control loop.

    Args:
        config: the resolved configuration.
        clock: monotonic and wall time.
        registry: takes the metrics.
        clients: how to reach each worker by id; None: over HTTP, by the configured address.
        journal: takes the decisions; None: in memory.
        epoch: `controller_epoch` of this start. None takes the wall clock's milliseconds, which grow with each
            start as long as the clock is not set back (a worker that holds a newer epoch is followed past it).

    Raises:
        OSError, ValueError: a token file cannot be read or is empty.
    """
    version = importlib.metadata.version("slipstream")
    http: list[httpx.AsyncClient] = []
    if clients is None:
        http = [_http_client(worker) for worker in config.workers]
        timeout = config.loop.request_timeout_seconds
        clients = {
            worker.id: HttpWorkerClient(client, timeout_seconds=timeout)
            for worker, client in zip(config.workers, http, strict=True)
        }
    journal = journal or MemoryJournal(wall=clock.wall, capacity=config.loop.journal_capacity)
    metrics = ControllerMetrics(registry)
    loop = ControlLoop(
        config,
        clients,
        clock=clock,
        metrics=metrics,
        recorder=Recorder(journal, metrics, policy=config.policy.kind, code_version=version),
        epoch=int(clock.wall() * 1000) if epoch is None else epoch,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(loop.run(), name="control loop")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            for client in http:
                await client.aclose()

    app = FastAPI(title="Slipstream controller", version=version, lifespan=lifespan)
    app.state.loop, app.state.journal = loop, journal
    problems.install(app)
    app.include_router(build_router(loop, Operator(loop), journal, registry))
    return app


def _http_client(worker: WorkerConfig) -> httpx.AsyncClient:
    headers = {}
    if worker.token_file is not None:
        token = worker.token_file.read_text(encoding="utf-8").strip()
        if not token or not token.isascii() or any(character.isspace() for character in token):
            raise ValueError(
                f"workers.{worker.id}.token_file: {worker.token_file} does not hold one ASCII token"
            )
        headers["authorization"] = f"Bearer {token}"
    # trust_env=False: a proxy from the environment has no business between controller and worker.
    return httpx.AsyncClient(base_url=worker.url, headers=headers, trust_env=False, timeout=None)
