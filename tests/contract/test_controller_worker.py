"""The controller's own client and loop against the real worker: real engine, real control app, tiny model.

The draft model is the target itself, so every draft is correct and the depth must climb to the top.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client import CollectorRegistry

from controller.app.build import build_loop as build_controller_loop
from controller.app.build import open_journal
from controller.clock import SystemClock
from controller.commands import Operator
from controller.config import ControllerConfig
from controller.journal import Journal
from controller.loop import ControlLoop
from controller.metrics import ControllerMetrics
from controller.worker_client import (
    BadAnswer,
    Conflict,
    Forbidden,
    HttpWorkerClient,
    NotReady,
    Refused,
    Unreachable,
)
from worker.api.served import ServedModel
from worker.build import build_engine
from worker.config import WorkerConfig
from worker.control import create_control_app
from worker.engine_thread import EngineThread
from worker.protocol import Pin, PlanEntry, Probe, SpecPlan
from worker.request import Request, SamplingParams, TokenChunk

TOKEN = "a-token-for-the-tests"


@pytest.fixture(scope="module")
def worker_config(
    tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> WorkerConfig:
    directory = str(tiny_model_dir(dtype=torch.float64))
    token = tmp_path_factory.mktemp("control") / "token"
    token.write_text(TOKEN)
    return WorkerConfig.model_validate(
        {
            "model": {"path": directory, "device": "cpu", "dtype": "float64", "threads": 1},
            "spec": {"drafter": "model", "draft_model_path": directory, "num_steps": 1},
            "engine": {"max_context_tokens": 512, "profile_seconds": 0},
            "server": {"control_token_file": token},
        }
    )


@pytest.fixture
def engine(worker_config: WorkerConfig) -> Iterator[EngineThread]:
    threads = torch.get_num_threads()
    engine = build_engine(worker_config)
    engine.start()
    yield engine
    engine.shutdown(0.0)
    torch.set_num_threads(threads)


@pytest.fixture
def control_app(engine: EngineThread, worker_config: WorkerConfig) -> Any:
    served: Any = ServedModel(engine, object())  # type: ignore[arg-type]
    return create_control_app(served, worker_config)


def client_of(app: Any, token: str | None = TOKEN) -> HttpWorkerClient:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return HttpWorkerClient(
        httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers),
        timeout_seconds=10,
    )


@pytest.fixture
def client(control_app: Any) -> HttpWorkerClient:
    return client_of(control_app)


def plan_for(engine: EngineThread, **fields: Any) -> SpecPlan:
    defaults: dict[str, Any] = {
        "controller_epoch": 5,
        "version": 5,
        "boot_id": engine.info.boot_id,
        "ttl_seconds": 60.0,
        "entries": [PlanEntry(max_batch_size=1, num_steps=3), PlanEntry(max_batch_size=8, num_steps=1)],
    }
    return SpecPlan(**{**defaults, **fields})


def test_reads_come_back_as_the_wire_types(client: HttpWorkerClient, engine: EngineThread) -> None:
    info = asyncio.run(client.info())
    assert info == engine.info and info.adaptation and info.candidate_steps == [0, 1, 2, 3, 5, 7]
    stats = asyncio.run(client.stats())
    assert stats.boot_id == info.boot_id and stats.plan.source == "fallback" and stats.plan.num_steps == 1
    assert asyncio.run(client.plan_status()).plan is None


def test_a_plan_is_taken_and_renewed(client: HttpWorkerClient, engine: EngineThread) -> None:
    plan = plan_for(
        engine,
        probe=Probe(num_steps=2, rounds=4, max_batch_size=2),
        pin=Pin(num_steps=7, ttl_seconds=30.0),
        reason="a test",
    )
    status = asyncio.run(client.put_plan(plan))
    assert (status.source, status.num_steps, status.plan) == ("pin", 7, plan)
    renewed = asyncio.run(
        client.put_plan(plan.model_copy(update={"pin": Pin(num_steps=7, ttl_seconds=20.0)}))
    )
    assert renewed.pin_remaining_seconds <= 20


def test_refusals_are_typed(client: HttpWorkerClient, engine: EngineThread) -> None:
    held = plan_for(engine)
    asyncio.run(client.put_plan(held))
    for newer in ({"version": 4}, {"controller_epoch": 4}, {"reason": "other"}, {"boot_id": "somebody"}):
        with pytest.raises(Conflict) as conflict:
            asyncio.run(client.put_plan(plan_for(engine, **newer)))
        assert conflict.value.current is not None and conflict.value.current.plan == held
    with pytest.raises(Refused, match="4") as refused:
        entries = [PlanEntry(max_batch_size=1, num_steps=4)]
        asyncio.run(client.put_plan(plan_for(engine, version=6, entries=entries)))
    assert refused.value.candidate_steps == [0, 1, 2, 3, 5, 7]
    assert asyncio.run(client.plan_status()).plan == held


@pytest.mark.parametrize("token", [None, "wrong"])
def test_without_the_token_nothing_is_told(control_app: Any, token: str | None) -> None:
    with pytest.raises(Forbidden):
        asyncio.run(client_of(control_app, token).stats())


def test_a_worker_that_loads_is_not_ready(worker_config: WorkerConfig) -> None:
    with pytest.raises(NotReady, match="loading"):
        asyncio.run(client_of(create_control_app(ServedModel(), worker_config)).info())


def test_no_listener_and_nonsense_are_typed() -> None:
    async def nobody() -> None:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9", trust_env=False) as http:
            await HttpWorkerClient(http, timeout_seconds=5).info()

    with pytest.raises(Unreachable):
        asyncio.run(nobody())
    for answer in (httpx.Response(200, text="hello"), httpx.Response(500), httpx.Response(302)):
        transport = httpx.MockTransport(lambda _, answer=answer: answer)
        http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        with pytest.raises(BadAnswer):
            asyncio.run(HttpWorkerClient(http, timeout_seconds=5).info())


def test_an_answer_that_never_ends_is_unreachable() -> None:
    async def drip() -> None:
        async def answer(request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

        http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://localhost")
        await HttpWorkerClient(http, timeout_seconds=0.05).info()

    with pytest.raises(Unreachable, match="within"):
        asyncio.run(drip())


# ---- the loop against the real engine ----


class Stream:
    """A request on the real engine that is started again whenever it ends, until told to stop."""

    def __init__(self, engine: EngineThread, prompt: list[int]) -> None:
        self.engine, self.prompt = engine, prompt
        self.texts: list[list[int]] = []
        self.stopped = threading.Event()
        self._current: list[int] = []
        self._count = 0
        self.submit()

    def submit(self) -> None:
        self._count += 1
        params = SamplingParams(max_tokens=200, temperature=0.0)
        self.engine.submit(Request(f"{self.prompt}-{self._count}", self.prompt, params, self._take))

    def _take(self, chunk: TokenChunk) -> None:
        self._current += chunk.token_ids
        if chunk.finish_reason is not None:
            self.texts.append(self._current)
            self._current = []
            if not self.stopped.is_set():
                threading.Thread(target=self.submit).start()


def build_loop(client: HttpWorkerClient, **sections: Any) -> tuple[ControlLoop, Journal]:
    config = ControllerConfig.model_validate(
        {
            "workers": [{"id": "a", "url": "http://worker"}],
            "guards": {"window_seconds": 0.2, "dwell_seconds": 0.0},
            "journal": {"path": ":memory:"},
        }
        | sections
    )
    clock, metrics = SystemClock(), ControllerMetrics(CollectorRegistry())
    journal = open_journal(config, clock=clock, metrics=metrics)
    loop = build_controller_loop(config, {"a": client}, clock=clock, metrics=metrics, journal=journal)
    return loop, journal


@pytest.mark.parametrize(("policy", "way"), [("threshold", [2, 3, 5, 7]), ("goodput", None)])
def test_the_loop_climbs_on_a_perfect_drafter_and_pins_hold(
    client: HttpWorkerClient, engine: EngineThread, policy: str, way: list[int] | None
) -> None:
    loop, journal = build_loop(client, policy={"name": policy})
    worker, operator = loop.workers["a"], Operator(loop)
    stream = Stream(engine, [5, 6, 7])

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await loop.tick(worker)
            await asyncio.sleep(0.02)

    async def scene() -> None:
        await until(lambda: engine.plan_status().num_steps == 7)
        assert (await operator.pin(worker, 2, ttl_seconds=600)).is_applied
        before = {(b.num_steps, b.max_batch_size): b.rounds for b in engine.stats().buckets}
        await until(lambda: rounds_at(2) > before.get((2, 1), 0) + 20)
        assert engine.plan_status().source == "pin"
        assert (await operator.release(worker)).is_applied
        await until(lambda: engine.plan_status().num_steps == 7)
        await until(lambda: len(stream.texts) >= 2)

    def rounds_at(depth: int) -> int:
        return sum(b.rounds for b in engine.stats().buckets if b.num_steps == depth)

    asyncio.run(asyncio.wait_for(scene(), 150))
    stream.stopped.set()
    assert worker.life is not None
    figures = worker.life.recent.figures()
    assert {rate for rate in figures.position_acceptance if rate is not None} == {1.0}
    made = [r.decision for r in journal.read() if r.decision.outcome == "applied"]
    depths = [decision.num_steps for decision in made if decision.kind == "depth"]
    assert depths[:4] == way or (way is None and 7 in depths)
    assert all(text == stream.texts[0] for text in stream.texts)


def test_when_the_controller_stops_the_worker_falls_back(
    client: HttpWorkerClient, engine: EngineThread
) -> None:
    loop, _ = build_loop(
        client,
        loop={"plan_ttl_seconds": 0.5, "poll_interval_seconds": 0.05},
        policy={"name": "static", "parameters": {"num_steps": 5}},
    )

    async def scene() -> None:
        while engine.plan_status().num_steps != 5:
            await loop.tick(loop.workers["a"])
            await asyncio.sleep(0.02)
        while engine.plan_status().source != "fallback":  # nobody renews
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(scene(), 60))
    assert engine.plan_status().num_steps == 1
