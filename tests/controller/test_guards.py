"""Each guard refuses what it should, names itself, and lets the rest through."""

import dataclasses
from typing import Any

import pytest

from controller.guards import GuardLimits, Guards
from controller.types import Delivery, ProbeRequest, Proposal, Slot

LIMITS = GuardLimits(
    min_num_steps=0,
    max_num_steps=64,
    dwell_seconds=1.0,
    max_changes_per_minute=3,
    min_rounds=5,
    min_request_rounds=10,
    window_seconds=2.0,
    hold_after_seconds=5.0,
)
SLOTS = [Slot(max_batch_size=1, candidate_steps=(0, 1, 3)), Slot(max_batch_size=4, candidate_steps=(0, 1))]


def guards(**limits: Any) -> Guards:
    return Guards(dataclasses.replace(LIMITS, **limits), SLOTS, met_seconds=0.0)


def change(before: int, after: int, *, slot: int = 1, rounds: int | None = 50, **other: Any) -> Proposal:
    return Proposal(
        slot=slot,
        num_steps_before=before,
        num_steps=after,
        reason="climb",
        message="",
        rounds=rounds,
        request_rounds=rounds,
        **other,
    )


def guard_of(judge: Guards, proposal: Proposal, now: float, age: float = 0.0) -> str | None:
    verdict = judge.judge(proposal, now=now, age_seconds=age)
    assert verdict.is_allowed or verdict.num_steps == proposal.num_steps_before
    return verdict.guard


def test_a_sound_proposal_passes() -> None:
    verdict = guards().judge(change(1, 3), now=10.0, age_seconds=0.1)
    assert verdict.is_allowed and verdict.num_steps == 3 and verdict.guard is None


@pytest.mark.parametrize(("now", "guard"), [(1.99, "window"), (2.0, None)])
def test_a_just_started_controller_watches_first(now: float, guard: str | None) -> None:
    assert guard_of(guards(), change(1, 3), now) == guard


@pytest.mark.parametrize(("age", "guard"), [(5.0, None), (5.01, "stale")])
def test_stale_data_change_nothing(age: float, guard: str | None) -> None:
    assert guard_of(guards(), change(1, 3), 10.0, age) == guard
    assert guard_of(guards(), change(3, 0, is_urgent=True), 10.0, age) == guard


@pytest.mark.parametrize(
    ("rounds", "requests", "guard"), [(5, 10, None), (4, 10, "samples"), (5, 9, "samples")]
)
def test_too_few_samples(rounds: int, requests: int, guard: str | None) -> None:
    proposal = dataclasses.replace(change(1, 3), rounds=rounds, request_rounds=requests)
    assert guard_of(guards(), proposal, 10.0) == guard


def test_a_proposal_that_needs_no_evidence_passes() -> None:
    assert guard_of(guards(), change(1, 3, rounds=None), 10.0) is None


@pytest.mark.parametrize(("now", "guard"), [(10.99, "dwell"), (11.0, None)])
def test_dwell_is_per_slot(now: float, guard: str | None) -> None:
    judge = guards()
    judge.changed(1, 10.0)
    assert guard_of(judge, change(3, 1), now) == guard
    assert guard_of(judge, change(0, 1, slot=4), now) is None


def test_an_urgent_way_down_does_not_wait_an_urgent_way_up_does() -> None:
    judge = guards()
    judge.changed(1, 10.0)
    assert guard_of(judge, change(3, 0, is_urgent=True), 10.1) is None
    assert guard_of(judge, change(1, 3, is_urgent=True), 10.1) == "dwell"


def test_the_budget_of_changes() -> None:
    judge = guards()
    for second in (10.0, 20.0, 30.0):
        judge.changed(1, second)
    assert guard_of(judge, change(0, 1, slot=4), 40.0) == "budget"
    assert guard_of(judge, change(1, 0, is_urgent=True), 40.0) is None
    assert guard_of(judge, change(1, 3), 70.0) is None, "the first change is a minute ago"


@pytest.mark.parametrize(
    ("bounds", "before", "wanted", "allowed", "guard"),
    [
        ({"max_num_steps": 2}, 0, 3, 1, "bounds"),
        ({"max_num_steps": 2}, 1, 3, None, "bounds"),
        ({"min_num_steps": 1}, 3, 0, 1, "bounds"),
        ({"min_num_steps": 1}, 1, 0, None, "bounds"),
        ({"min_num_steps": 2, "max_num_steps": 2}, 3, 1, 0, "bounds"),
        ({}, 0, 3, 3, None),
    ],
)
def test_bounds(
    bounds: dict[str, int], before: int, wanted: int, allowed: int | None, guard: str | None
) -> None:
    verdict = guards(**bounds).judge(change(before, wanted), now=10.0, age_seconds=0.0)
    assert (verdict.num_steps if verdict.is_allowed else None) == allowed
    assert verdict.guard == guard


def test_a_probe_keeps_to_the_bounds_and_ignores_the_dwell() -> None:
    probe = ProbeRequest(slot=1, num_steps=1, rounds=10, max_batch_size=1)
    proposal = change(0, 0, probe=probe)
    judge = guards()
    judge.changed(1, 9.9)
    assert guard_of(judge, proposal, 10.0) is None
    assert guard_of(guards(max_num_steps=0), proposal, 10.0) == "bounds"
    assert guard_of(guards(), proposal, 1.0) == "window"


def test_an_adopted_depth_outside_the_bounds_is_brought_in() -> None:
    found = guards(max_num_steps=1).outside({1: 3, 4: 1})
    assert [(p.slot, p.num_steps_before, p.num_steps, p.reason) for p in found] == [(1, 3, 1, "bounds")]
    assert guards().outside({1: 3, 4: 2})[0].num_steps == 1, "2 is no candidate of the slot"


# ---- the breaker ----


def deliver(judge: Guards, ratios: list[float], start: float = 0.0, request_rounds: int = 200) -> None:
    for index, ratio in enumerate(ratios):
        judge.breaker.watch(
            Delivery(
                request_rounds=request_rounds, tokens=round(1000 * ratio), expected_tokens=1000.0, seconds=2.0,
                expected_seconds=2.0,
            ),
            start + index,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("ratios", "trips"),
    [
        ([0.85] * 3, 0),
        ([0.85] * 4, 1),
        ([1.15] * 4, 1),
        ([0.95] * 50, 0),
        ([0.85, 1.15] * 20, 0),
        ([0.85] * 3 + [1.0] + [0.85] * 3, 0),
    ],
)
def test_forecasts_that_stay_off_open_the_breaker(ratios: list[float], trips: int) -> None:
    judge = guards()
    deliver(judge, ratios)
    assert judge.breaker.trips_total == trips
    assert judge.breaker.is_open(len(ratios)) == bool(trips)
    assert not judge.breaker.is_open(len(ratios) + 31.0), "it closes again"


def test_small_windows_are_put_together_first() -> None:
    judge = guards()
    deliver(judge, [0.5] * 30, request_rounds=20)
    assert judge.breaker.trips_total == 0, "three windows"
    deliver(judge, [0.5] * 10, request_rounds=20)
    assert judge.breaker.trips_total == 1


def test_without_tolerance_there_is_no_breaker() -> None:
    judge = guards(breaker_tolerance=0.0)
    deliver(judge, [0.2] * 20)
    assert judge.breaker.trips_total == 0


def test_an_open_breaker_leads_to_the_nearest_safe_depth() -> None:
    found = guards().to_safety({1: 3, 4: 1}, safe_num_steps=2)
    assert [(p.slot, p.num_steps, p.reason) for p in found] == [(1, 1, "breaker")]


def test_changes_at_one_time_are_one_plan() -> None:
    judge = guards(max_changes_per_minute=2)
    judge.changed(1, 10.0)
    judge.changed(4, 10.0)
    assert guard_of(judge, change(0, 1, slot=4), 40.0) is None
