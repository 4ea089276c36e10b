"""The plan table: order of authority, time to live, versions, dead band, probes."""

import pytest
from pydantic import ValidationError

from worker.protocol import SpecPlan
from worker.spec.plan import DEAD_BAND_ROUNDS, PlanConflict, PlanTable, UnknownTier

BOOT = "boot"


def plan(**changes):
    values = {
        "controller_epoch": 1,
        "version": 1,
        "boot_id": BOOT,
        "ttl_seconds": 10.0,
        "entries": [
            {"max_batch_size": 1, "num_steps": 5},
            {"max_batch_size": 8, "num_steps": 3},
            {"max_batch_size": 32, "num_steps": 1},
        ],
    }
    return SpecPlan.model_validate(values | changes)


@pytest.fixture
def table():
    return PlanTable(boot_id=BOOT, candidate_steps=[0, 1, 3, 5, 7], fallback_num_steps=1)


def test_fallback_plan_and_lapse(table):
    assert table.depth_for_round(1, 0.0) == (1, "fallback", False)
    table.put(plan(), 0.0)
    assert table.depth_for_round(1, 9.9) == (5, "plan", False)
    assert table.depth_for_round(1, 10.0) == (1, "fallback", False)
    status = table.status(12.0)
    assert (status.source, status.remaining_seconds, status.age_seconds) == ("fallback", 0.0, 12.0)
    table.put(plan(), 13.0)  # the same plan again brings it back
    assert table.depth_for_round(1, 22.0) == (5, "plan", False)


@pytest.mark.parametrize(("batch_size", "num_steps"), [(1, 5), (2, 3), (8, 3), (32, 1), (500, 1)])
def test_table_lookup(table, batch_size, num_steps):
    table.put(plan(dead_band=0.0), 0.0)
    assert table.depth_for_round(batch_size, 1.0).num_steps == num_steps


def test_dead_band_keeps_a_swinging_batch_size_from_flipping_the_depth(table):
    entries = [{"max_batch_size": 16, "num_steps": 3}, {"max_batch_size": 64, "num_steps": 1}]
    table.put(plan(entries=entries), 0.0)
    depths = [table.depth_for_round(bs, 1.0).num_steps for bs in (16, 17, 18, 16, 17, 18)]
    assert depths == [3] * 6  # 18 is within 15 % of the edge
    assert table.depth_for_round(19, 1.0).num_steps == 1
    assert [table.depth_for_round(bs, 1.0).num_steps for bs in (16, 15, 14)] == [1] * 3
    assert table.depth_for_round(13, 1.0).num_steps == 3


def test_a_batch_size_that_stays_within_the_dead_band_gets_its_own_entry(table):
    """A server that settles at exactly an edge, from above, would never see what was decided for it."""
    entries = [{"max_batch_size": 4, "num_steps": 3}, {"max_batch_size": 8, "num_steps": 0}]
    table.put(plan(entries=entries), 0.0)
    sizes = [8] + [4] * (DEAD_BAND_ROUNDS + 3)
    depths = [table.depth_for_round(bs, 1.0).num_steps for bs in sizes]
    assert depths == [0] * DEAD_BAND_ROUNDS + [3] * 4
    # One that swings does not stay.
    table.depth_for_round(8, 1.0)
    assert {table.depth_for_round(bs, 1.0).num_steps for bs in [4, 4, 4, 5] * DEAD_BAND_ROUNDS} == {0}


@pytest.mark.parametrize("dead_band", [0.0, 0.15, 0.5])
@pytest.mark.parametrize(("low", "high", "num_steps"), [(1, 1, 5), (2, 8, 3), (9, 32, 1)])
def test_the_far_end_of_an_entry_is_reached_from_everywhere(table, dead_band, low, high, num_steps):
    table.put(plan(dead_band=dead_band), 0.0)
    for start in (1, 2, 5, 8, 9, 20, 32):
        table.depth_for_round(start, 1.0)
        far_end = high if start <= high else low
        assert table.depth_for_round(far_end, 1.0).num_steps == num_steps, start


def test_versions(table):
    table.put(plan(version=5), 0.0)
    for older in (plan(version=4), plan(controller_epoch=0, version=9)):
        with pytest.raises(PlanConflict, match="older") as caught:
            table.put(older, 1.0)
        assert caught.value.current.plan == plan(version=5)
    with pytest.raises(PlanConflict, match="other content"):
        table.put(plan(version=5, reason="else"), 1.0)
    with pytest.raises(PlanConflict, match="boot_id"):
        table.put(plan(version=6, boot_id="other"), 1.0)
    table.put(plan(controller_epoch=2, version=0), 1.0)  # a new controller starts counting again


def test_unknown_tiers_change_nothing(table):
    table.put(plan(), 0.0)
    for bad in (
        {"entries": [{"max_batch_size": 1, "num_steps": 4}]},
        {"pin": {"num_steps": 2, "ttl_seconds": 5.0}},
        {"probe": {"num_steps": 6, "rounds": 3}},
    ):
        with pytest.raises(UnknownTier, match=r"is no tier, allowed: \[0, 1, 3, 5, 7\]"):
            table.put(plan(version=2, **bad), 1.0)
    assert table.status(1.0).plan == plan()


def test_a_pin_outlives_the_plan_and_is_taken_away_by_a_plan_without_it(table):
    table.put(plan(pin={"num_steps": 7, "ttl_seconds": 100.0}), 0.0)
    assert table.depth_for_round(1, 50.0) == (7, "pin", False)  # the plan itself lapsed at 10
    status = table.status(50.0)
    assert (status.source, status.pin_remaining_seconds) == ("pin", 50.0)
    assert table.depth_for_round(1, 100.0) == (1, "fallback", False)
    table.put(plan(version=2, pin={"num_steps": 7, "ttl_seconds": 100.0}), 100.0)
    table.put(plan(version=3), 101.0)
    assert table.depth_for_round(1, 102.0).num_steps == 5


def test_a_renewal_carries_the_pins_remaining_time(table):
    table.put(plan(pin={"num_steps": 7, "ttl_seconds": 100.0}), 0.0)
    table.put(plan(pin={"num_steps": 7, "ttl_seconds": 95.0}), 5.0)  # no conflict: the rest of the same pin
    assert table.status(6.0).pin_remaining_seconds == pytest.approx(94.0)


def test_a_probe_runs_once_and_a_renewal_does_not_repeat_it(table):
    probing = plan(probe={"num_steps": 7, "rounds": 2})
    table.put(probing, 0.0)
    depths = [table.depth_for_round(1, 1.0) for _ in range(3)]
    assert [(d.num_steps, d.is_probe) for d in depths] == [(7, True), (7, True), (5, False)]
    table.put(probing, 2.0)
    assert table.depth_for_round(1, 2.0).num_steps == 5


def test_a_probe_waits_for_its_batch_size_and_yields_to_a_pin(table):
    table.put(plan(probe={"num_steps": 7, "rounds": 1, "max_batch_size": 4}), 0.0)
    assert table.depth_for_round(1, 1.0).num_steps == 5
    assert table.depth_for_round(3, 1.0) == (7, "plan", True)
    table.put(
        plan(version=2, probe={"num_steps": 7, "rounds": 1}, pin={"num_steps": 0, "ttl_seconds": 9.0}), 2.0
    )
    assert table.depth_for_round(1, 2.0) == (0, "pin", False)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"entries": []}, "entries"),
        ({"entries": [{"max_batch_size": 4, "num_steps": 1}] * 2}, "entries"),
        ({"entries": [{"max_batch_size": True, "num_steps": 1}]}, "max_batch_size"),
        ({"entries": [{"max_batch_size": 4, "num_steps": 3.0}]}, "num_steps"),
        ({"entries": [{"max_batch_size": 4, "num_steps": "3"}]}, "num_steps"),
        ({"entries": [{"max_batch_size": 4, "num_steps": -1}]}, "num_steps"),
        ({"entries": [{"max_batch_size": 4, "num_steps": 3, "num_draft_tokens": 3}]}, "num_draft_tokens 3"),
        ({"ttl_seconds": float("nan")}, "ttl_seconds"),
        ({"ttl_seconds": float("inf")}, "ttl_seconds"),
        ({"ttl_seconds": 0}, "ttl_seconds"),
        ({"version": None}, "version"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_bad_plans_name_their_field(changes, field):
    with pytest.raises(ValidationError, match=field):
        plan(**changes)
