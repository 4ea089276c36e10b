"""A second policy looks on: it is recorded and exported, and no plan differs for it."""

import asyncio
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from controller.config import ControllerConfig
from controller.policies import policy_kinds

MakeRig = Callable[..., Any]


def play(rig: Any, worker: Any) -> None:
    for acceptance, batch_size in (([0.95] * 64, 1), ([0.0] * 64, 4), ([0.6] * 64, 2), ([0.95] * 64, 8)):
        worker.acceptance, worker.batch_size = acceptance, batch_size
        asyncio.run(rig.run(15))


@pytest.mark.parametrize("shadow", sorted(policy_kinds()))
@pytest.mark.parametrize("policy", ["threshold", "goodput"])
def test_no_plan_differs_with_a_shadow(
    simulation: ModuleType, make_rig: MakeRig, policy: str, shadow: str
) -> None:
    sent, decided = [], []
    for sections in ({}, {"shadow": {"name": shadow}}):
        clock = simulation.VirtualClock()
        worker = simulation.SimulatedWorker(clock, seed=3)
        rig = make_rig({"a": worker}, policy={"name": policy}, **sections)
        rig.clock = rig.loop.clock = clock
        rig.stop()
        rig.start()
        play(rig, worker)
        sent.append([(p.version, p.entries, p.probe, p.pin, p.reason) for p in worker.plans])
        records = [r.decision for r in rig.journal.read(limit=10_000)]
        decided.append([(d.kind, d.reason, d.message) for d in records if d.kind != "shadow"])
    assert sent[0] == sent[1] and len(sent[0]) > 5
    assert decided[0] == decided[1]


def test_what_it_would_do_is_recorded_and_exported(worker: Any, make_rig: MakeRig) -> None:
    rig = make_rig(
        {"a": worker},
        policy={"name": "static", "parameters": {"num_steps": 5}},
        shadow={"name": "threshold"},
        guards={"window_seconds": 0.0},
    )
    worker.acceptance = [0.0] * 64
    asyncio.run(rig.run(10))
    rig.loop.show(rig.loop.workers["a"])
    shadows = [r.decision for r in rig.journal.read(limit=1000) if r.decision.kind == "shadow"]
    (wanted,) = [decision for decision in shadows if decision.max_batch_size == 1]
    assert (wanted.policy, wanted.outcome, wanted.reason) == ("threshold", "advisory", "drop")
    assert (wanted.num_steps_before, wanted.num_steps) == (5, 0), "from where the worker really is"
    assert worker.depths[-1] == 5
    labels = {"worker": "a", "batch_size_le": "1"}
    assert rig.registry.get_sample_value("spec_controller_shadow_num_steps", labels) == 0
    gain = rig.registry.get_sample_value("spec_controller_shadow_gain_ratio", labels)
    assert gain is None or -1 < gain < 10


def test_an_unknown_shadow_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="shadow: .*nonsense"):
        ControllerConfig.model_validate({"shadow": {"name": "nonsense"}})
    with pytest.raises(ValueError, match="shadow: .*depth"):
        ControllerConfig.model_validate({"shadow": {"name": "static", "parameters": {"depth": 1}}})
