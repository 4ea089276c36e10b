"""The worker's HTTP edge in front of a real engine with a tiny model, in process or on a real socket."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from worker.api.served import ServedModel
from worker.build import build_engine
from worker.config import EngineConfig, ModelConfig, ServerConfig, SpecConfig, WorkerConfig
from worker.control import create_control_app
from worker.engine_thread import EngineThread, Health
from worker.protocol import PlanStatus, SpecInfo, SpecPlan, SpecStats
from worker.request import EngineStopped, Request, RequestRejected, TokenChunk
from worker.server import create_app
from worker.spec.plan import CHANGE_REASONS, DepthCounts
from worker.telemetry import Telemetry
from worker.tokenization import Tokenizer

CONTEXT = 512
TIERS = [0, 1, 3]

WaitUntil = Callable[[Callable[[], bool]], None]


def make_config(directory: Path, **engine: int) -> WorkerConfig:
    sizes = {"max_running_requests": 4, "max_waiting_requests": 8, "max_context_tokens": CONTEXT} | engine
    return WorkerConfig(
        model=ModelConfig(path=str(directory), name="tiny", device="cpu", dtype="float64", threads=1),
        spec=SpecConfig(candidate_steps=TIERS, num_steps=1),
        engine=EngineConfig(profile_seconds=0, **sizes),
        server=ServerConfig(port=0, control_port=0),
    )


@pytest.fixture(scope="session")
def config(tiny_model_dir: Callable[..., Path]) -> WorkerConfig:
    return make_config(tiny_model_dir(max_positions=CONTEXT))


@pytest.fixture(scope="session")
def tokenizer(config: WorkerConfig) -> Tokenizer:
    return Tokenizer.load(Path(config.model.path))


@pytest.fixture(scope="session")
def engine(config: WorkerConfig) -> Iterator[EngineThread]:
    built = build_engine(config)
    built.start()
    yield built
    built.shutdown(0)


@pytest.fixture(scope="session")
def model(engine: EngineThread, tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(engine, tokenizer)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def app(model: ServedModel, config: WorkerConfig, registry: CollectorRegistry) -> FastAPI:
    return create_app(model, config, registry=registry)


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app) as client:
        yield client


@pytest.fixture
def control(model: ServedModel, config: WorkerConfig) -> Iterator[TestClient]:
    with TestClient(create_control_app(model, config), base_url="http://localhost") as client:
        yield client


@pytest.fixture
def wait_until() -> WaitUntil:
    """Poll a condition; fail when it has not come true within 20 s (a bound, not a measurement)."""

    def wait(condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < give_up, "condition did not come true"
            time.sleep(0.01)

    return wait


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@pytest.fixture
def live(wait_until: WaitUntil) -> Iterator[Callable[[FastAPI], int]]:
    """Serve an app on a real loopback socket; returns the port."""
    running: list[tuple[_QuietServer, threading.Thread]] = []

    def serve(app: FastAPI) -> int:
        server = _QuietServer(
            uvicorn.Config(
                app, host="127.0.0.1", port=0, lifespan="off", log_config=None, timeout_graceful_shutdown=1
            )
        )
        thread = threading.Thread(target=server.run)
        running.append((server, thread))
        thread.start()
        wait_until(lambda: server.started)
        return int(server.servers[0].sockets[0].getsockname()[1])

    yield serve
    for server, thread in running:
        server.should_exit = True
        thread.join()


class ScriptedEngine:
    """An engine for what a real one does not do on demand: hang, die, fail, never answer.

    Records what reaches it. `test_server_failures.py` checks that it and the real one fit the same door.
    """

    def __init__(self, info: SpecInfo, stats: SpecStats) -> None:
        self.info = info
        self.frozen_stats = stats
        self.state = Health(alive=True, ready=True, detail="ok")
        self.refuse: RequestRejected | None = None
        self.script: list[TokenChunk] = []
        self.submitted: list[Request] = []
        self.aborted: list[str] = []

    def submit(self, request: Request) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.submitted.append(request)
        for chunk in self.script:
            request.sink(chunk)

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return any(request.id == request_id for request in self.submitted)

    def put_plan(self, plan: SpecPlan) -> PlanStatus:
        return self.frozen_stats.plan

    def plan_status(self) -> PlanStatus:
        return self.frozen_stats.plan

    def stats(self) -> SpecStats:
        return self.frozen_stats

    def telemetry(self) -> Telemetry:
        return Telemetry(
            stats=self.frozen_stats,
            durations={},
            depth=DepthCounts(dict.fromkeys(CHANGE_REASONS, 0), probes=0, probe_rounds=0),
            slow_path_rounds=0,
            eager_rounds=sum(bucket.rounds for bucket in self.frozen_stats.buckets),
        )

    def health(self) -> Health:
        return self.state

    def shutdown(self, grace_seconds: float) -> None:
        self.refuse = EngineStopped("the worker is shutting down")


@pytest.fixture
def scripted(engine: EngineThread) -> ScriptedEngine:
    return ScriptedEngine(engine.info, engine.stats())


@pytest.fixture
def scripted_app(scripted: ScriptedEngine, tokenizer: Tokenizer, config: WorkerConfig) -> FastAPI:
    model = ServedModel(scripted, tokenizer)
    impatient = config.server.model_copy(update={"write_timeout_seconds": 0.2})
    return create_app(model, config.model_copy(update={"server": impatient}), registry=CollectorRegistry())


@pytest.fixture
def scripted_client(scripted_app: FastAPI) -> Iterator[TestClient]:
    with TestClient(scripted_app, raise_server_exceptions=False) as client:
        yield client
