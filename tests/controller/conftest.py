"""A control loop on virtual time, around simulated workers."""

import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from controller.config import ControllerConfig
from controller.journal import MemoryJournal
from controller.loop import ControlLoop
from controller.metrics import ControllerMetrics
from controller.record import Recorder


def _load(name: str) -> ModuleType:
    """Load a module that lies beside this file (tests are no package)."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Rig:
    """One loop, one clock, any number of simulated workers."""

    def __init__(self, workers: dict[str, Any], clock: Any, **sections: Any) -> None:
        self.clock = clock
        self.simulated = workers
        listed = [{"id": name, "url": f"http://{name}:1"} for name in workers]
        self.config = ControllerConfig(workers=listed, **sections)
        self.registry = CollectorRegistry()
        self.journal = MemoryJournal(wall=clock.wall)
        metrics = ControllerMetrics(self.registry)
        recorder = Recorder(self.journal, metrics, policy=self.config.policy.kind, code_version="test")
        self.loop = ControlLoop(
            self.config,
            workers,
            clock=clock,
            metrics=metrics,
            recorder=recorder,
            epoch=int(clock.wall() * 1000),
            rng=random.Random(1),
        )

    async def run(self, seconds: float, rounds_per_second: float = 40, poll: float = 0.25) -> None:
        """Let workers and loop run for a stretch of virtual time."""
        for _ in range(round(seconds / poll)):
            self.clock.now += poll
            for worker in self.simulated.values():
                worker.rounds(round(rounds_per_second * poll))
            for controlled in self.loop.workers.values():
                await self.loop.tick(controlled)

    def reasons(self, kind: str | None = None) -> list[str]:
        """Reason codes recorded so far."""
        records = self.journal.read(limit=10_000)
        return [r.decision.reason for r in records if kind in (None, r.decision.kind)]


@pytest.fixture
def simulation() -> ModuleType:
    """The module of the simulated worker."""
    return _load("simulated_worker")


@pytest.fixture
def clock(simulation: ModuleType) -> Any:
    return simulation.VirtualClock()


@pytest.fixture
def worker(simulation: ModuleType, clock: Any) -> Any:
    return simulation.SimulatedWorker(clock)


@pytest.fixture
def make_rig(clock: Any) -> Callable[..., Rig]:
    """`make_rig({"a": worker}, guards={…}, …)` -> Rig."""

    def make(workers: dict[str, Any], **sections: Any) -> Rig:
        return Rig(workers, clock, **sections)

    return make
