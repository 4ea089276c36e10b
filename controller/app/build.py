"""Put the controller together: loop, journal, metrics and routes; nothing is global."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from controller.app import problems
from controller.app.access import BearerAccess, KnownHosts, allowed_hosts, read_tokens, token_of_file
from controller.app.bodies import SmallBodies
from controller.app.events import add_events
from controller.app.feed import Feed
from controller.app.page import add_page
from controller.app.routes import build_router
from controller.clock import Clock
from controller.commands import Operator
from controller.config import ControllerConfig, WorkerConfig
from controller.journal import Journal, JournalError
from controller.journal_store import Store
from controller.loop import ControlLoop
from controller.metrics import ControllerMetrics
from controller.record import Recorder
from controller.tape import config_body
from controller.version import code_version, package_version
from controller.worker_client import HttpWorkerClient, WorkerClient

DAY_SECONDS = 86_400.0


def create_app(
    config: ControllerConfig,
    *,
    clock: Clock,
    registry: CollectorRegistry,
    clients: Mapping[str, WorkerClient] | None = None,
) -> FastAPI:
    """Build the application; its lifespan runs the control loop and closes the journal.

    Args:
        config: the resolved configuration.
        clock: monotonic and wall time.
        registry: takes the metrics.
        clients: how to reach each worker by id; None: over HTTP, by the configured address.

    Raises:
        AccessError: a token cannot be read or is unfit, or the listener must not be open.
        JournalError: the journal's file cannot be used.
    """
    tokens = read_tokens(config.server)
    http: list[httpx.AsyncClient] = []
    if clients is None:
        http = [_http_client(worker) for worker in config.workers]
        timeout = config.loop.request_timeout_seconds
        clients = {
            worker.id: HttpWorkerClient(client, timeout_seconds=timeout)
            for worker, client in zip(config.workers, http, strict=True)
        }
    metrics = ControllerMetrics(registry)
    journal = open_journal(config, clock=clock, metrics=metrics)
    loop = build_loop(config, clients, clock=clock, metrics=metrics, journal=journal)
    feed = Feed(loop, journal, clock=clock, version=package_version())

    app = FastAPI(
        title="Slipstream controller",
        version=package_version(),
        lifespan=lambda _: _running(loop, feed, journal, http),
        redirect_slashes=False,
    )
    app.state.loop, app.state.journal, app.state.feed = loop, journal, feed
    problems.install(app)
    app.add_middleware(SmallBodies)
    app.add_middleware(BearerAccess, tokens=tokens, open_metrics=config.server.open_metrics)
    app.add_middleware(KnownHosts, names=allowed_hosts(config.server, tokens))
    router = build_router(loop, Operator(loop), journal, registry)
    add_events(router, feed)
    app.include_router(router)
    add_page(app)
    return app


@contextlib.asynccontextmanager
async def _running(
    loop: ControlLoop, feed: Feed, journal: Journal, http: Sequence[httpx.AsyncClient]
) -> AsyncIterator[None]:
    """Run the loop and the feed; in the end write the journal out."""
    tasks = [
        asyncio.create_task(loop.run(), name="control loop"),
        asyncio.create_task(feed.run(), name="event feed"),
    ]
    try:
        yield
    finally:
        feed.close()
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for client in http:
            await client.aclose()
        for worker in loop.workers.values():
            loop.memory.keep(worker, at_end=True)
        await asyncio.to_thread(journal.close)


def open_journal(config: ControllerConfig, *, clock: Clock, metrics: ControllerMetrics) -> Journal:
    """Open the journal and note this start.

    Raises:
        JournalError: the journal's file cannot be used.
    """
    store = Store(config.journal.path)
    try:
        journal = Journal(
            store,
            wall=clock.wall,
            counts=metrics,
            turn_seconds=config.journal.turn_days * DAY_SECONDS,
            decision_seconds=config.journal.decision_days * DAY_SECONDS,
        )
        journal.begin(code_version(), config_body(config))
    except JournalError:
        store.close()
        raise
    return journal


def build_loop(
    config: ControllerConfig,
    clients: Mapping[str, WorkerClient],
    *,
    clock: Clock,
    metrics: ControllerMetrics,
    journal: Journal,
    **others: Any,
) -> ControlLoop:
    """Put the loop together around an open journal; `others` go to `ControlLoop`."""
    recorder = Recorder(
        journal,
        metrics,
        policy=config.policy.kind,
        code_version=code_version(),
        keeps_turns=config.journal.turn_days > 0,
        checkpoint_seconds=config.journal.checkpoint_seconds,
    )
    return ControlLoop(
        config, clients, clock=clock, metrics=metrics, recorder=recorder, journal=journal, **others
    )


def _http_client(worker: WorkerConfig) -> httpx.AsyncClient:
    headers = {}
    if worker.token_file is not None:
        token = token_of_file(f"workers.{worker.id}.token_file", worker.token_file)
        headers["authorization"] = f"Bearer {token}"
    # trust_env=False: a proxy from the environment has no business between controller and worker.
    return httpx.AsyncClient(base_url=worker.url, headers=headers, trust_env=False, timeout=None)
