"""A control loop on virtual time, around simulated workers."""

import importlib.util
import logging
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from controller.app.build import build_loop, open_journal
from controller.config import ControllerConfig
from controller.metrics import ControllerMetrics
from controller.turn import Turn
from controller.types import Observation


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
        sections = {"journal": {"path": ":memory:"}, **sections}
        # These tests are about the loop; `threshold` needs no costs, which this worker does not have.
        sections["policy"] = {"name": "threshold", **sections.get("policy", {})}
        sections["guards"] = {"window_seconds": 2.0, **sections.get("guards", {})}
        self.config = ControllerConfig(workers=listed, **sections)
        self.registry = CollectorRegistry()
        self.metrics = ControllerMetrics(self.registry)
        self.start()

    def start(self) -> None:
        """Start a controller; after `stop`, another one with the same journal."""
        self.journal = open_journal(self.config, clock=self.clock, metrics=self.metrics)
        self.loop = build_loop(
            self.config,
            self.simulated,
            clock=self.clock,
            metrics=self.metrics,
            journal=self.journal,
            rng=random.Random(1),
        )

    def stop(self) -> None:
        """End the controller; the workers go on."""
        self.journal.close()

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
def make_rig(clock: Any) -> Iterator[Callable[..., Rig]]:
    """`make_rig({"a": worker}, guards={…}, …)` -> Rig."""
    made: list[Rig] = []

    def make(workers: dict[str, Any], **sections: Any) -> Rig:
        made.append(Rig(workers, clock, **sections))
        return made[-1]

    yield make
    for rig in made:
        rig.stop()


@pytest.fixture
def turn_of() -> Callable[..., Turn]:
    """`turn_of(now=…)` -> an idle turn."""

    def make(now: float = 0.0) -> Turn:
        observation = Observation(
            boot_id="boot-1",
            seconds=now,
            span_seconds=0.25,
            cells=(),
            running=0,
            waiting=0,
            generated_tokens=0,
        )
        return Turn(observation=observation, now=now, age_seconds=0.0, mode="active")

    return make


@pytest.fixture(autouse=True)
def _leave_the_log_as_it_was() -> Iterator[None]:
    """A command that sets the log up sends it to this test's stderr, which the next test does not have."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
