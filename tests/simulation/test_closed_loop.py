"""The whole control loop against a simulated worker whose acceptance shifts: does the depth follow, calmly?

Virtual time and seeded chance: nothing here measures anything. The plan table and counters are the worker's own.
"""

import asyncio
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

CONTROLLER_TESTS = Path(__file__).parents[1] / "controller"


def _load(name: str, file: str) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, CONTROLLER_TESTS / file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


simulated = _load("simulated_worker", "simulated_worker.py")
Rig = _load("controller_rig", "conftest.py").Rig

PREDICTABLE = [0.95] * 16
CHAT = [0.65, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2, 0.2]
PROSE = [0.08] * 16


class Scene:
    """Phases played on one worker; what each brought."""

    def __init__(self, seed: int = 0, **sections: Any) -> None:
        self.clock = simulated.VirtualClock()
        self.worker = simulated.SimulatedWorker(self.clock, seed=seed)
        self.rig = Rig({"a": self.worker}, self.clock, **sections)

    def play(self, acceptance: list[float], seconds: float, *, batch_size: int = 1) -> tuple[list[int], int]:
        """Return the depth of every round of the phase, and the number of depth changes applied in it."""
        first, cursor = len(self.worker.depths), len(self.rig.journal.read(limit=100_000))
        self.worker.acceptance, self.worker.batch_size = acceptance, batch_size
        asyncio.run(self.rig.run(seconds))
        records = self.rig.journal.read(after=cursor, limit=100_000)
        applied = [r for r in records if r.decision.kind == "depth" and r.decision.outcome == "applied"]
        return self.worker.depths[first:], len(applied)


@pytest.mark.parametrize("seed", range(3))
def test_the_depth_follows_the_phases(seed: int) -> None:
    scene = Scene(seed)
    total = 0
    for _ in range(3):
        for acceptance, low, high in ((PREDICTABLE, 5, 7), (CHAT, 1, 3), (PROSE, 0, 0), (CHAT, 1, 3)):
            depths, changes = scene.play(acceptance, 60)
            settled = Counter(depths[len(depths) // 2 :])
            share = sum(n for depth, n in settled.items() if low <= depth <= high) / settled.total()
            assert share > 0.9, (acceptance, settled)
            assert changes <= 12
            total += changes
    assert total <= 80


@pytest.mark.parametrize("seed", range(3))
def test_a_steady_phase_brings_few_changes(seed: int) -> None:
    scene = Scene(seed)
    for acceptance in (PREDICTABLE, CHAT, PROSE):
        scene.play(acceptance, 60)
        _, changes = scene.play(acceptance, 120)
        assert changes <= 4, acceptance


@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_0_is_reached_and_left_at_every_batch_size(batch_size: int) -> None:
    scene = Scene()
    depths, _ = scene.play([0.0] * 16, 60, batch_size=batch_size)
    assert Counter(depths[-1000:])[0] > 900
    depths, _ = scene.play([1.0] * 16, 30, batch_size=batch_size)
    assert depths[-1] == {1: 7, 4: 3, 8: 2}[batch_size]


def test_probes_at_0_cost_little() -> None:
    depths, _ = Scene().play([0.0] * 16, 300)
    late = depths[len(depths) // 4 :]
    assert 0 < sum(depth > 0 for depth in late) / len(late) < 0.05


def test_a_batch_size_that_swings_moves_no_depth_by_itself() -> None:
    scene = Scene()
    scene.play(CHAT, 60, batch_size=1)
    scene.play(CHAT, 60, batch_size=4)
    changes = 0
    for step in range(60):
        _, changed = scene.play(CHAT, 1, batch_size=(1, 4)[step % 2])
        changes += changed
    assert changes <= 6


def test_the_same_history_gives_the_same_decisions() -> None:
    def history() -> list[Any]:
        scene = Scene(3)
        for acceptance in (PREDICTABLE, PROSE, CHAT):
            scene.play(acceptance, 30)
        return [record.decision for record in scene.rig.journal.read(limit=100_000)]

    assert history() == history()


def test_no_policy_oversteps_the_bounds() -> None:
    scene = Scene(guards={"min_num_steps": 1, "max_num_steps": 3})
    for acceptance in (PREDICTABLE, PROSE):
        depths, _ = scene.play(acceptance, 60)
        assert set(depths) <= {1, 2, 3}
