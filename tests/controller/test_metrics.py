"""What the controller counts and shows: series come and go with what they tell of."""

import asyncio
import dataclasses
import math
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from controller.metrics import ControllerMetrics
from controller.shadow import Wished
from controller.types import Decision, Estimate, SlotForecast, TierForecast
from controller.worker_client import Unreachable
from controller.worth import gain_over_plain


def decision(worker: str = "a", **fields: Any) -> Decision:
    defaults = {"kind": "worker", "reason": "met", "message": "", "outcome": "noted", "mode": "active"}
    return Decision(worker=worker, **{**defaults, **fields})


def test_series_of_a_removed_worker_disappear() -> None:
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    for worker in ("a", "b"):
        metrics.ticked(worker, 0.01)
        metrics.tick_failed(worker)
        metrics.actuation_failed(worker, "unreachable")
        metrics.decided(decision(worker), 1.0)
        metrics.decided(
            decision(worker, kind="depth", outcome="applied", num_steps_before=1, num_steps=0), 2.0
        )
        metrics.state(worker, is_up=True, is_pinned=False, mode="active", age_seconds=0.1, depths={1: 2})
        metrics.gain(worker, 0.1)
        metrics.shadow(worker, [Wished(slot=1, num_steps_now=2, num_steps=3, gain=0.25)])
    metrics.forget("a")
    text = generate_latest(registry).decode()
    assert 'worker="a"' not in text and text.count('worker="b"') > 20


def test_the_off_state_is_visible() -> None:
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    metrics.state("a", is_up=True, is_pinned=False, mode="active", age_seconds=None, depths={1: 0})
    labels = {"worker": "a", "batch_size_le": "1"}
    assert registry.get_sample_value("spec_controller_desired_num_steps", labels) == 0
    assert registry.get_sample_value("spec_controller_observation_age_seconds", {"worker": "a"}) is None


def test_depths_of_slots_that_are_gone_leave_no_series() -> None:
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    for depths in ({1: 2, 8: 1}, {4: 3}, {}):
        metrics.state("a", is_up=True, is_pinned=False, mode="active", age_seconds=0.1, depths=depths)
        found = {
            int(edge): registry.get_sample_value(
                "spec_controller_desired_num_steps", {"worker": "a", "batch_size_le": edge}
            )
            for edge in ("1", "4", "8")
        }
        assert {edge: depth for edge, depth in found.items() if depth is not None} == depths


def test_changes_are_counted_by_reason_and_direction() -> None:
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    for outcome, before, after in (("applied", 0, 2), ("unconfirmed", 2, 3), ("applied", 3, 1), ("held", 1, 0),
                                   ("advisory", 1, 0)):  # fmt: skip
        change = decision(
            kind="depth", reason="climb", outcome=outcome, num_steps_before=before, num_steps=after
        )
        metrics.decided(change, 100.0 + after)
    metrics.decided(decision(kind="pin", reason="pinned", outcome="applied", num_steps=3), 1.0)
    get = registry.get_sample_value
    labels = {"worker": "a", "reason": "climb"}
    assert get("spec_controller_depth_changes_total", labels | {"direction": "up"}) == 2
    assert get("spec_controller_depth_changes_total", labels | {"direction": "down"}) == 1
    assert "pinned" not in {
        s.labels.get("reason")
        for m in registry.collect()
        for s in m.samples
        if s.name == "spec_controller_depth_changes_total"
    }
    newest = labels | {"kind": "depth", "outcome": "applied"}
    assert get("spec_controller_last_decision_timestamp_seconds", newest) == 101.0


def test_a_shadow_that_is_gone_leaves_no_series() -> None:
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    wish = Wished(slot=1, num_steps_now=2, num_steps=3, gain=0.25)
    metrics.shadow("a", [wish])
    labels = {"worker": "a", "batch_size_le": "1"}
    assert registry.get_sample_value("spec_controller_shadow_num_steps", labels) == 3
    assert registry.get_sample_value("spec_controller_shadow_gain_ratio", labels) == 0.25
    metrics.shadow("a", [dataclasses.replace(wish, gain=None)])
    assert registry.get_sample_value("spec_controller_shadow_gain_ratio", labels) is None
    metrics.shadow("a", [])
    assert registry.get_sample_value("spec_controller_shadow_num_steps", labels) is None


def forecast(share: float, **goodput: float) -> SlotForecast:
    tiers = tuple(
        TierForecast(
            num_steps=int(name[1:]), tokens=1.0, round_seconds=1.0, round_variance=0.0, spread=0.0, goodput=value
        )
        for name, value in goodput.items()
    )  # fmt: skip
    return SlotForecast(batch_size=1.0, tiers=tiers, share=share)


@pytest.mark.parametrize(
    ("forecasts", "gain"),
    [
        ({}, None),  # no costs known
        ({1: forecast(0.0, k0=10, k2=15)}, None),  # no rounds yet
        ({1: forecast(1.0, k0=10, k2=15)}, 0.5),
        ({1: forecast(0.75, k0=10, k2=8), 4: forecast(0.25, k0=10)}, -0.15),  # at 4 it runs plain
        ({1: forecast(1.0, k0=10, k1=15)}, None),  # the depth in force is no candidate
    ],
)
def test_what_speculation_is_worth(forecasts: dict[int, SlotForecast], gain: float | None) -> None:
    found = gain_over_plain(Estimate(slots=(), forecasts=forecasts), {1: 2, 4: 0})
    assert found == (None if gain is None else pytest.approx(gain))


def run_and_scrape(rig: Any, seconds: float) -> dict[tuple[str, ...], float]:
    asyncio.run(rig.run(seconds))
    for controlled in rig.loop.workers.values():
        rig.loop.show(controlled)
    samples = [s for m in rig.registry.collect() for s in m.samples]
    assert all(math.isfinite(s.value) and s.value >= (-1 if "ratio" in s.name else 0) for s in samples)
    return {(s.name, *s.labels.values()): s.value for s in samples}


def test_what_was_known_of_a_worker_goes_with_it(worker: Any, make_rig: Any) -> None:
    worker.acceptance = [1.0] * 64
    rig = make_rig({"a": worker}, shadow={"name": "static"})
    state = {
        "spec_controller_desired_num_steps",
        "spec_controller_gain_over_plain_ratio",
        "spec_controller_shadow_num_steps",
    }
    there = run_and_scrape(rig, 8)
    assert there["spec_controller_worker_up", "a"] == 1
    assert {key[0] for key in there} >= state
    assert there["spec_controller_journal_bytes",] > 0
    worker.failure = Unreachable("down")
    gone = run_and_scrape(rig, 8)
    assert gone["spec_controller_worker_up", "a"] == 0
    assert gone["spec_controller_observation_age_seconds", "a"] > 5
    assert not {key[0] for key in gone} & state
    worker.failure = None
    back = run_and_scrape(rig, 8)
    assert {key[0] for key in back} >= state


def test_a_worker_with_an_open_breaker_says_so(worker: Any, make_rig: Any) -> None:
    rig = make_rig({"a": worker})
    assert run_and_scrape(rig, 4)["spec_controller_breaker_open", "a"] == 0
    rig.loop.workers["a"].life.guards.breaker.open_until = rig.clock.now + 60
    assert run_and_scrape(rig, 4)["spec_controller_breaker_open", "a"] == 1
