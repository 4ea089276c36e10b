"""The loop on virtual time: adoption, evidence, modes, pins, comings and goings."""

import asyncio
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from controller.commands import ModeForbids, NotATier, NotConfirmed, Operator
from controller.worker_client import Refused
from worker.protocol import Pin, PlanEntry, SpecPlan

MakeRig = Callable[..., Any]
SLOTS = [
    {"max_batch_size": 1, "candidate_steps": [0, 1, 2, 3, 5, 7]},
    {"max_batch_size": 4, "candidate_steps": [0, 1, 2, 3]},
    {"max_batch_size": 8, "candidate_steps": [0, 1, 2]},
]


def go(rig: Any, seconds: float, **other: float) -> None:
    asyncio.run(rig.run(seconds, **other))


def test_a_just_started_controller_adopts_and_changes_nothing_within_its_window(
    worker: Any, make_rig: MakeRig
) -> None:
    worker.acceptance = [1.0] * 64
    rig = make_rig({"a": worker}, guards={"window_seconds": 2.0})
    go(rig, 1.75)
    assert {entry.num_steps for plan in worker.plans for entry in plan.entries} == {2}
    assert set(worker.depths) == {2} and rig.reasons() == ["met", "climb"]
    held = rig.journal.read()[-1].decision
    assert (held.outcome, held.guard) == ("held", "window")


def test_full_acceptance_climbs_to_the_top(worker: Any, make_rig: MakeRig) -> None:
    worker.acceptance = [1.0] * 64
    worker.fallback = 1
    worker.restart("boot-1")
    rig = make_rig({"a": worker}, guards={"dwell_seconds": 0.5})
    go(rig, 10)
    assert worker.depths[-1] == 7
    assert rig.reasons("depth").count("climb") == 4 + 1, "four tiers up, one held back by the window"


def test_no_acceptance_goes_to_0_and_probes_rarely(worker: Any, make_rig: MakeRig) -> None:
    rig = make_rig({"a": worker})
    go(rig, 120)
    late = worker.depths[len(worker.depths) // 2 :]
    assert set(late) == {0, 1} and late.count(1) / len(late) < 0.05


def test_0_is_left_when_acceptance_returns(worker: Any, make_rig: MakeRig) -> None:
    rig = make_rig({"a": worker})
    go(rig, 60)
    assert worker.depths[-1] == 0
    worker.acceptance = [1.0] * 64
    go(rig, 20)
    assert worker.depths[-1] == 7
    assert "probe_succeeded" in rig.reasons()


def test_one_bad_window_changes_nothing(worker: Any, make_rig: MakeRig) -> None:
    worker.acceptance = [1.0] * 64
    rig = make_rig({"a": worker})
    go(rig, 15)
    worker.acceptance = [0.0] * 64
    worker.rounds(1)
    worker.acceptance = [1.0] * 64
    changes = len(rig.reasons("depth"))
    go(rig, 5)
    assert len(rig.reasons("depth")) == changes and worker.depths[-1] == 7


def test_an_idle_worker_uses_nothing_up(worker: Any, make_rig: MakeRig) -> None:
    rig = make_rig({"a": worker})
    go(rig, 20)
    records = len(rig.reasons())
    go(rig, 300, rounds_per_second=0)
    assert len(rig.reasons()) == records


def test_plans_are_renewed_and_not_sent_each_tick(worker: Any, make_rig: MakeRig) -> None:
    rig = make_rig({"a": worker})
    go(rig, 30, rounds_per_second=0)
    assert 8 <= len(worker.plans) <= 12, "a third of the ttl of 10 s"
    assert len({plan.version for plan in worker.plans}) == 1


def test_a_new_version_for_each_new_content(worker: Any, make_rig: MakeRig) -> None:
    worker.acceptance = [1.0] * 64
    rig = make_rig({"a": worker})
    go(rig, 15)
    by_version = {p.version: (tuple(p.entries), p.probe) for p in worker.plans}
    assert len(set(map(repr, by_version.values()))) == len(by_version)
    assert [p.version for p in worker.plans] == sorted(p.version for p in worker.plans)


def test_a_lost_answer_is_sent_again_under_the_same_version(
    worker: Any, make_rig: MakeRig, simulation: ModuleType
) -> None:
    rig = make_rig({"a": worker})
    worker.plan_failure = simulation.UNREACHABLE
    go(rig, 0.5)
    worker.plan_failure = None
    go(rig, 0.5)
    assert [plan.version for plan in worker.plans] == [1, 1, 1]
    assert (
        rig.registry.get_sample_value(
            "spec_controller_actuation_failures_total", {"worker": "a", "reason": "unreachable"}
        )
        == 2
    )


def test_a_newer_plan_of_somebody_else_is_gone_past(worker: Any, make_rig: MakeRig) -> None:
    rig = make_rig({"a": worker})
    go(rig, 3, rounds_per_second=0)
    other = SpecPlan(
        controller_epoch=worker.plans[-1].controller_epoch + 5,
        version=7,
        boot_id="boot-1",
        ttl_seconds=10,
        entries=[PlanEntry(max_batch_size=1, num_steps=5)],
    )
    asyncio.run(worker.put_plan(other))
    go(rig, 5, rounds_per_second=0)
    newest = worker.plans[-1]
    assert (newest.controller_epoch, newest.version) == (other.controller_epoch, 8)
    assert conflicts(rig) == 1 and rig.reasons("plan") == ["conflict"]


def conflicts(rig: Any) -> float | None:
    labels = {"worker": "a", "reason": "conflict"}
    found: float | None = rig.registry.get_sample_value("spec_controller_actuation_failures_total", labels)
    return found


def test_two_controllers_on_one_worker_are_counted_and_told_of_once(worker: Any, make_rig: MakeRig) -> None:
    guards = {"window_seconds": 0.0, "dwell_seconds": 0.0}
    rigs = [
        make_rig({"a": worker}, policy={"name": "static", "parameters": {"num_steps": n}}, guards=guards)
        for n in (0, 5)
    ]
    for _ in range(30):
        for rig in rigs:
            go(rig, 1, rounds_per_second=0)
    for rig in rigs:
        counted = conflicts(rig)
        assert counted is not None and counted > 3
        told = [r.decision for r in rig.journal.read() if r.decision.kind == "plan"]
        assert [d.reason for d in told] == ["conflict"] and "stop one" in told[0].message


def test_a_restarted_worker_is_met_again(worker: Any, make_rig: MakeRig) -> None:
    worker.acceptance = [1.0] * 64
    rig = make_rig({"a": worker})
    go(rig, 15)
    worker.restart("boot-2")
    go(rig, 1)
    assert worker.plans[-1].boot_id == "boot-2" and worker.depths[-1] == worker.fallback
    assert rig.reasons("worker") == ["met", "restarted"]
    go(rig, 15)
    assert worker.depths[-1] == 7


def test_a_vanished_worker_is_told_of_once_and_picked_up_again(
    worker: Any, make_rig: MakeRig, simulation: ModuleType
) -> None:
    rig = make_rig({"a": worker})
    go(rig, 3)
    worker.failure = simulation.UNREACHABLE
    go(rig, 10)
    assert rig.reasons()[-2:] == ["unreachable", "stale"]
    worker.failure = None
    worker.restart("boot-2")
    go(rig, 3)
    assert rig.reasons("worker") == ["met", "unreachable", "restarted"]
    assert rig.loop.workers["a"].is_reachable


def test_stale_data_hold_and_very_stale_data_let_the_plan_lapse(
    worker: Any, make_rig: MakeRig, simulation: ModuleType
) -> None:
    async def broken() -> Any:
        raise simulation.BadAnswer("500: out of order")

    rig = make_rig({"a": worker})
    go(rig, 3)
    stats, worker.stats = worker.stats, broken
    sent = len(worker.plans)
    go(rig, 28)
    assert len(worker.plans) - sent >= 6, "still renewed"
    sent = len(worker.plans)
    go(rig, 30)
    assert len(worker.plans) == sent, "left to lapse"
    worker.stats = stats
    go(rig, 1)
    assert len(worker.plans) > sent and rig.reasons("worker")[-1] == "returned"


def test_a_worker_that_is_never_there_is_tried_with_pauses(
    worker: Any, make_rig: MakeRig, simulation: ModuleType
) -> None:
    calls = 0

    async def refuse() -> Any:
        nonlocal calls
        calls += 1
        raise simulation.UNREACHABLE

    worker.stats = refuse
    rig = make_rig({"a": worker})
    go(rig, 60, rounds_per_second=0)
    assert 30 <= calls <= 90 and rig.reasons() == ["unreachable"]


def test_a_worker_without_adaptation_is_left_alone(
    clock: Any, simulation: ModuleType, make_rig: MakeRig
) -> None:
    worker = simulation.SimulatedWorker(clock, adaptation=False)
    rig = make_rig({"a": worker})
    go(rig, 10)
    assert worker.plans == [] and rig.reasons() == ["met", "adaptation_off"]


def test_static_goes_through_the_guards_too(worker: Any, make_rig: MakeRig) -> None:
    rig = make_rig(
        {"a": worker},
        policy={"name": "static", "parameters": {"num_steps": 7}, "slots": SLOTS},
        guards={"max_num_steps": 3, "window_seconds": 2.0},
    )
    go(rig, 1.5, rounds_per_second=0)
    assert {e.num_steps for e in worker.plans[-1].entries} == {2}
    go(rig, 2, rounds_per_second=0)
    assert [e.num_steps for e in worker.plans[-1].entries] == [3, 3, 2], "applied when idle too"
    first = [r.decision for r in rig.journal.read() if r.decision.max_batch_size == 1]
    assert [(d.outcome, d.guard) for d in first] == [
        ("held", "window"),
        ("applied", "bounds"),
        ("held", "bounds"),
    ]


# ---- modes ----


def set_mode(rig: Any, mode: Any) -> None:
    asyncio.run(Operator(rig.loop).set_mode(mode))


def test_advisory_records_and_sends_nothing(worker: Any, make_rig: MakeRig) -> None:
    worker.acceptance = [1.0] * 64
    rig = make_rig({"a": worker}, policy={"mode": "advisory"})
    go(rig, 20)
    assert worker.plans == [] and set(worker.depths) == {2}
    advised = [r.decision for r in rig.journal.read() if r.decision.outcome == "advisory"]
    assert [(d.num_steps_before, d.num_steps) for d in advised] == [(2, 3)], "once, not once per interval"


def test_frozen_renews_what_is_there(worker: Any, make_rig: MakeRig) -> None:
    worker.acceptance = [1.0] * 64
    rig = make_rig({"a": worker})
    go(rig, 10)
    set_mode(rig, "frozen")
    worker.acceptance = [0.0] * 64
    go(rig, 30)
    assert worker.depths[-1] == 7 and rig.reasons("mode") == ["frozen"]
    set_mode(rig, "active")
    go(rig, 5)
    assert worker.depths[-1] < 7


def test_released_lets_the_plan_lapse(worker: Any, make_rig: MakeRig) -> None:
    worker.acceptance = [1.0] * 64
    rig = make_rig({"a": worker})
    go(rig, 10)
    set_mode(rig, "released")
    sent = len(worker.plans)
    go(rig, 12)
    assert len(worker.plans) == sent and worker.depths[-1] == worker.fallback
    set_mode(rig, "active")
    go(rig, 10)
    assert worker.depths[-1] == 7


# ---- pins ----


def pin(rig: Any, num_steps: int, ttl_seconds: float = 60) -> bool:
    worker = rig.loop.workers["a"]
    return asyncio.run(Operator(rig.loop).pin(worker, num_steps, ttl_seconds=ttl_seconds)).is_applied


def test_a_pin_holds_for_its_time_and_the_policy_goes_on_after_it(worker: Any, make_rig: MakeRig) -> None:
    worker.acceptance = [1.0] * 64
    rig = make_rig({"a": worker})
    go(rig, 10)
    assert pin(rig, 1, ttl_seconds=20)
    go(rig, 18)
    assert set(worker.depths[-600:]) == {1}
    assert worker.plans[-1].pin is not None and worker.plans[-1].pin.ttl_seconds < 10
    go(rig, 5)
    assert worker.depths[-1] == 7 and rig.reasons("pin") == ["pinned", "expired"]
    assert worker.plans[-1].pin is None


def test_a_pin_without_a_tier_changes_nothing(worker: Any, make_rig: MakeRig) -> None:
    rig = make_rig({"a": worker})
    go(rig, 1)
    with pytest.raises(NotATier, match=r"4 .*\[0, 1, 2, 3, 5, 7\]"):
        pin(rig, 4)
    assert rig.loop.workers["a"].pin is None and all(p.pin is None for p in worker.plans)


def test_a_pin_that_the_worker_refuses_is_withdrawn(worker: Any, make_rig: MakeRig) -> None:
    rig = make_rig({"a": worker})
    go(rig, 1)
    worker.plan_failure = Refused("422: no", [0, 1])
    with pytest.raises(NotATier):
        pin(rig, 3)
    assert rig.loop.workers["a"].pin is None


def test_an_unreachable_worker_gets_its_pin_when_it_returns(
    worker: Any, make_rig: MakeRig, simulation: ModuleType
) -> None:
    rig = make_rig({"a": worker})
    worker.failure = simulation.UNREACHABLE
    go(rig, 1)
    with pytest.raises(NotConfirmed):
        pin(rig, 3)
    worker.failure = None
    go(rig, 3)
    assert worker.depths[-1] == 3


def test_a_pin_reaches_a_restarted_worker(worker: Any, make_rig: MakeRig) -> None:
    rig = make_rig({"a": worker})
    go(rig, 1)
    pin(rig, 5)
    worker.restart("boot-2")
    go(rig, 1)
    assert worker.depths[-1] == 5


def test_a_new_controller_takes_over_a_pin(worker: Any, make_rig: MakeRig) -> None:
    plan = SpecPlan(
        controller_epoch=1,
        version=1,
        boot_id="boot-1",
        ttl_seconds=5,
        entries=[PlanEntry(max_batch_size=8, num_steps=1)],
        pin=Pin(num_steps=5, ttl_seconds=30),
    )
    asyncio.run(worker.put_plan(plan))
    rig = make_rig({"a": worker})
    go(rig, 28)
    assert set(worker.depths) == {5} and rig.reasons("pin") == ["adopted"]
    go(rig, 3)
    assert worker.depths[-1] != 5


def test_a_released_pin_does_not_come_back(worker: Any, make_rig: MakeRig, simulation: ModuleType) -> None:
    rig = make_rig({"a": worker})
    go(rig, 1)
    pin(rig, 7, ttl_seconds=600)
    worker.failure = simulation.UNREACHABLE
    with pytest.raises(NotConfirmed):
        asyncio.run(Operator(rig.loop).release(rig.loop.workers["a"]))
    go(rig, 40)
    worker.failure = None
    go(rig, 4)
    assert worker.depths[-1] != 7 and worker.plans[-1].pin is None


@pytest.mark.parametrize("mode", ["advisory", "frozen"])
def test_pins_work_where_the_policy_does_not_actuate(worker: Any, make_rig: MakeRig, mode: str) -> None:
    rig = make_rig({"a": worker}, policy={"mode": mode})
    go(rig, 1)
    assert pin(rig, 7)
    go(rig, 1)
    assert worker.depths[-1] == 7
    assert asyncio.run(Operator(rig.loop).release(rig.loop.workers["a"])).is_applied
    go(rig, 1)
    assert worker.depths[-1] == 2


def test_no_pin_while_released(worker: Any, make_rig: MakeRig) -> None:
    rig = make_rig({"a": worker}, policy={"mode": "released"})
    go(rig, 1)
    with pytest.raises(ModeForbids):
        pin(rig, 1)
    assert rig.loop.workers["a"].pin is None


# ---- the loop itself ----


def test_a_worker_that_hangs_delays_nobody(
    worker: Any, clock: Any, simulation: ModuleType, make_rig: MakeRig
) -> None:
    hanging = simulation.SimulatedWorker(clock)

    async def hang() -> Any:
        await asyncio.Event().wait()

    hanging.stats = hang
    rig = make_rig({"hanging": hanging, "fine": worker}, loop={"poll_interval_seconds": 0.001})

    async def scene() -> None:
        task = asyncio.create_task(rig.loop.run())
        while rig.registry.get_sample_value("spec_controller_ticks_total", {"worker": "fine"}) != 5:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(asyncio.wait_for(scene(), 30))
    assert worker.plans and rig.loop.workers["hanging"].turn_seconds is None
    clock.now += 100
    assert "hanging" in rig.loop.late()


def test_the_loop_survives_what_a_turn_raises(worker: Any, make_rig: MakeRig, caplog: Any) -> None:
    async def explode() -> Any:
        raise RuntimeError("a bug")

    stats, worker.stats = worker.stats, explode
    rig = make_rig({"a": worker}, loop={"poll_interval_seconds": 0.001})

    async def scene() -> None:
        task = asyncio.create_task(rig.loop.run())
        while not rig.registry.get_sample_value("spec_controller_tick_failures_total", {"worker": "a"}):
            await asyncio.sleep(0.001)
        worker.stats = stats
        while not worker.plans:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(asyncio.wait_for(scene(), 30))
    assert "a bug" in caplog.text
