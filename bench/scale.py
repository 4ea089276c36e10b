"""`python -m bench.scale`: what the controller costs with many workers.

- `core`: 1000 workers on a virtual clock, one poll a second each, through whole turns of the real loop (journal in
  memory, no HTTP). Reported: CPU seconds per virtual second; above 1 a turn would be late on one core.
- `http`: 100 workers over real HTTP on loopback, twice a second each. The workers answer from one process of their
  own; reported are the controller's CPU share, and the turns per second that it reached.

JSON in the last line.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import httpx
import uvicorn
from prometheus_client import CollectorRegistry

from controller.app.build import build_loop, open_journal
from controller.cli import collect_seldom
from controller.clock import SystemClock
from controller.config import ControllerConfig
from controller.metrics import ControllerMetrics
from controller.simulate.profile import profile_of
from controller.simulate.scenario import PhaseConfig, Scenario
from controller.simulate.surface import Surface
from controller.simulate.worker import SimulatedWorker
from controller.worker_client import HttpWorkerClient
from worker.protocol import PlanStatus, SpecInfo, SpecPlan, SpecStats

SCENARIO = Scenario.model_validate(
    {
        "name": "scale",
        "latency": {"host_seconds": 0.002, "weights_seconds": 0.01, "draft_step_seconds": 0.001},
        "profile": {},
        "max_running_requests": 8,
        "phases": [{"tokens": 1, "acceptance": [0.9, 0.88], "batch_size": 4, "dispersion": 0.5}],
    }
)
TEXTS = [[0.9, 0.88], [0.5, 0.4], [0.1]]
PHASE_TOKENS = 3000


class VirtualWorker:
    """A simulated worker as a `WorkerClient`; its text changes every few seconds."""

    def __init__(self, number: int) -> None:
        name = f"scale {number}"
        self._surface = Surface(SCENARIO.latency, SCENARIO.directory)
        self._worker = SimulatedWorker(SCENARIO, self._surface, name)
        self._info = self._worker.info(profile_of(SCENARIO, self._surface, name))
        self._number = number
        self.advance(0.0)

    def advance(self, until: float) -> None:
        """Play rounds up to a time."""
        while self._worker.now < until:
            if self._worker.is_done:
                self._number += 1
                text = TEXTS[self._number % len(TEXTS)]
                phase: PhaseConfig = SCENARIO.phases[0].model_copy(update={"acceptance": text})
                self._worker.begin(phase, self._number, PHASE_TOKENS)
            _, counted = self._worker.play()
            self._worker.count(counted)
        self._stats = self._worker.stats(self._worker.now)

    async def info(self) -> SpecInfo:
        return self._info

    async def stats(self) -> SpecStats:
        return self._stats

    async def plan_status(self) -> PlanStatus:
        return self._stats.plan

    async def put_plan(self, plan: SpecPlan) -> PlanStatus:
        self._worker.plan.put(plan, self._worker.now)
        return self._worker.plan_status(self._worker.now)


class VirtualClock:
    """Time that moves when told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_790_000_000.0 + self.now


def core(workers: int, seconds: int) -> dict[str, Any]:
    """Measure whole turns on a virtual clock."""
    clock = VirtualClock()
    clients = {f"w{i}": VirtualWorker(i) for i in range(workers)}
    config = ControllerConfig.model_validate(
        {
            "workers": [{"id": name, "url": f"http://{name}:1"} for name in clients],
            "loop": {"poll_interval_seconds": 1.0},
            "journal": {"path": ":memory:"},
        }
    )
    metrics = ControllerMetrics(CollectorRegistry())
    journal = open_journal(config, clock=clock, metrics=metrics)
    loop = build_loop(config, clients, clock=clock, metrics=metrics, journal=journal)
    spent = []

    async def play() -> None:
        for second in range(1, seconds + 1):
            for client in clients.values():
                client.advance(float(second))
            clock.now = float(second)
            began = time.process_time()
            for worker in loop.workers.values():
                await loop.tick(worker)
            spent.append(time.process_time() - began)

    asyncio.run(play())
    journal.close()
    return {
        "workers": workers,
        "virtual_seconds": seconds,
        "cpu_seconds_per_second": round(sum(spent[1:]) / len(spent[1:]), 3),
        "worst_second": round(max(spent[1:]), 3),
        "first_second": round(spent[0], 3),
        "late_seconds": sum(seconds > 1.0 for seconds in spent[1:]),
    }


# ---- over HTTP ----


PREPARED_SECONDS = 60


def serve(workers: int, pipe: Connection) -> None:
    """Answer for many workers at `/w<number>/v1/spec/…`, until killed.

    Readings are prepared beforehand and shared, one for each half second: what is measured is the controller.
    """
    virtual = VirtualWorker(0)
    info = asyncio.run(virtual.info()).model_dump_json().encode()
    readings = []
    for half in range(2 * PREPARED_SECONDS):
        virtual.advance(half / 2)
        readings.append(asyncio.run(virtual.stats()).model_dump_json().encode())
    plans: dict[str, bytes] = {}
    began = time.monotonic()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        _, number, _, _, what = scope["path"].split("/")
        if scope["method"] == "PUT":
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message.get("body", b""), message.get("more_body", False)
            plans[number] = _followed(SpecPlan.model_validate_json(body))
        if what == "stats":
            content = readings[min(int(2 * (time.monotonic() - began)), len(readings) - 1)]
        else:
            content = info if what == "info" else plans[number]
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    asyncio.run(server.serve(sockets=[listener]))


def _followed(plan: SpecPlan) -> bytes:
    status = PlanStatus(
        source="plan", plan=plan, age_seconds=0.0, remaining_seconds=plan.ttl_seconds, pin_remaining_seconds=0.0,
        fallback_num_steps=2, num_steps=plan.entries[0].num_steps,
    )  # fmt: skip
    return status.model_dump_json().encode()


def over_http(workers: int, seconds: float, interval: float) -> dict[str, Any]:
    """Run the real loop over HTTP for a while."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(workers, there), daemon=True)
    process.start()
    try:
        address = f"http://127.0.0.1:{here.recv()}"
        return asyncio.run(_drive(address, workers, seconds, interval))
    finally:
        process.kill()
        process.join()


async def _drive(address: str, workers: int, seconds: float, interval: float) -> dict[str, Any]:
    clock = SystemClock()
    config = ControllerConfig.model_validate(
        {
            "workers": [{"id": f"w{i}", "url": f"{address}/w{i}"} for i in range(workers)],
            "loop": {"poll_interval_seconds": interval},
            "journal": {"path": ":memory:"},
        }
    )
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    journal = open_journal(config, clock=clock, metrics=metrics)
    http = [
        httpx.AsyncClient(base_url=worker.url, trust_env=False, timeout=None) for worker in config.workers
    ]
    clients = {
        worker.id: HttpWorkerClient(client, timeout_seconds=config.loop.request_timeout_seconds)
        for worker, client in zip(config.workers, http, strict=True)
    }
    loop = build_loop(config, clients, clock=clock, metrics=metrics, journal=journal)
    task = asyncio.create_task(loop.run())
    await asyncio.sleep(2 * interval)  # meeting all the workers is no steady state

    def turns() -> float:
        found = (registry.get_sample_value("spec_controller_ticks_total", {"worker": w}) for w in clients)
        return sum(value or 0.0 for value in found)

    before, cpu, began = turns(), time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    spent, wall, done = time.process_time() - cpu, time.monotonic() - began, turns() - before
    reachable = sum(worker.is_reachable for worker in loop.workers.values())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for client in http:
        await client.aclose()
    journal.close()
    return {
        "workers": workers,
        "interval_seconds": interval,
        "reachable": reachable,
        "turns_per_second": round(done / wall, 1),
        "wanted_per_second": workers / interval,
        "cpu_share": round(spent / wall, 3),
        "cpu_milliseconds_per_turn": round(1000 * spent / max(done, 1.0), 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--http-workers", type=int, default=100)
    options = parser.parse_args(arguments)
    collect_seldom()
    figures = core(options.workers, options.seconds)
    print(f"core: {figures}")
    http = over_http(options.http_workers, float(options.seconds), 0.5)
    print(f"http: {http}")
    print(json.dumps({"bench": "scale", "core": figures, "http": http}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
