"""Evidence per slot: censoring, decay by request-rounds, executed depth only."""

from collections.abc import Sequence

import pytest

from controller.estimate import Estimator, PositionCounts
from controller.types import CellDelta, Observation, ProbeRequest, Slot


def cell(
    num_steps: int, reached: Sequence[int], correct: Sequence[int], *, rounds: int = 0, bucket: int = 1
) -> CellDelta:
    rounds = rounds or (reached[0] if reached else 1)
    return CellDelta(
        num_steps=num_steps,
        max_batch_size=bucket,
        rounds=rounds,
        request_rounds=rounds,
        reached=tuple(reached),
        correct=tuple(correct),
        correct_squared=0,
        accept_tokens=rounds + sum(correct),
        emitted_tokens=rounds + sum(correct),
        timed_rounds=rounds,
        round_seconds=0.01 * rounds,
    )


def window(*cells: CellDelta) -> Observation:
    return Observation(
        boot_id="b", seconds=1.0, span_seconds=1.0, cells=cells, running=1, waiting=0, generated_tokens=0
    )


SLOTS = (
    Slot(max_batch_size=1, candidate_steps=(0, 1, 3)),
    Slot(max_batch_size=4, candidate_steps=(0, 1)),
)


def test_mean_is_the_sum_of_survivals() -> None:
    counts = PositionCounts(0.05)
    counts.add(cell(3, [100, 80, 40], [80, 40, 30]))
    mean, sd = counts.mean_correct(3) or (0, 0)
    assert mean == pytest.approx(0.8 + 0.4 + 0.3)
    # E[x^2] = 1*.8 + 3*.4 + 5*.3; 20 effective request-rounds at most
    assert sd == pytest.approx(((3.5 - 1.5**2) / 20) ** 0.5, rel=0.01)


def test_cut_drafts_say_nothing_about_what_they_did_not_reach() -> None:
    counts = PositionCounts(0.05)
    # 60 of 100 request-rounds were cut after one draft, all of them correct so far.
    counts.add(cell(3, [100, 40, 40], [100, 40, 40]))
    assert counts.acceptance(3) == (1.0, 1.0, 1.0)
    only_cut = PositionCounts(0.05)
    only_cut.add(cell(3, [50, 0, 0], [50, 0, 0]))
    assert only_cut.acceptance(3) == (1.0, None, None)
    assert (only_cut.mean_correct(3) or (9,))[0] == pytest.approx(1.0), "a lower bound, no proof for more"


def test_decay_does_not_depend_on_how_the_windows_were_cut() -> None:
    one, many = PositionCounts(0.1), PositionCounts(0.1)
    one.add(cell(1, [40], [40]))
    one.add(cell(1, [40], [0]))
    for _ in range(40):
        many.add(cell(1, [1], [1]))
    for _ in range(40):
        many.add(cell(1, [1], [0]))
    assert one.acceptance(1)[0] == pytest.approx(many.acceptance(1)[0], rel=1e-6)


def test_only_rounds_at_the_decided_depth_count() -> None:
    estimator = Estimator(SLOTS, {1: 3, 4: 1}, 0.05)
    estimate = estimator.estimate(window(cell(1, [50], [50]), cell(3, [10, 0, 0], [0, 0, 0])))
    slot = estimate.slots[0]
    assert (slot.rounds, slot.mean_correct) == (10, 0.0)


def test_slots_are_separate_and_follow_the_statistics_buckets() -> None:
    estimator = Estimator(SLOTS, {1: 1, 4: 1}, 0.05)
    estimate = estimator.estimate(
        window(cell(1, [5], [5]), cell(1, [6], [0], bucket=2), cell(1, [7], [0], bucket=64))
    )
    assert [slot.rounds for slot in estimate.slots] == [5, 13], "beyond the last edge: the last slot"
    assert [slot.mean_correct for slot in estimate.slots] == [1.0, 0.0]


def test_a_new_depth_restarts_the_sample_counts_and_keeps_what_is_known() -> None:
    estimator = Estimator(SLOTS, {1: 1, 4: 1}, 0.05)
    estimator.estimate(window(cell(1, [50], [40])))
    estimator.follow({1: 3, 4: 1}, None)
    slot = estimator.estimate(window()).slots[0]
    assert (slot.rounds, slot.request_rounds) == (0, 0)
    assert slot.mean_correct == pytest.approx(0.8), "the first position is still known"


def test_depth_0_has_no_evidence_but_its_rounds_count() -> None:
    estimator = Estimator(SLOTS, {1: 0, 4: 0}, 0.05)
    slot = estimator.estimate(window(cell(0, [], [], rounds=30))).slots[0]
    assert (slot.rounds, slot.mean_correct) == (30, 0.0)


def test_a_probe_collects_its_own_evidence_and_hands_it_on() -> None:
    estimator = Estimator(SLOTS, {1: 0, 4: 0}, 0.05)
    probe = ProbeRequest(slot=1, num_steps=1, rounds=12, max_batch_size=1)
    estimator.follow({1: 0, 4: 0}, probe)
    estimate = estimator.estimate(window(cell(0, [], [], rounds=4), cell(1, [12], [9])))
    assert estimate.probe is not None
    assert (estimate.probe.rounds, estimate.probe.waited_rounds) == (12, 4)
    assert estimate.probe.mean_correct == pytest.approx(0.75)
    estimator.follow({1: 1, 4: 0}, None)
    slot = estimator.estimate(window()).slots[0]
    assert slot.probe is None and slot.mean_correct == pytest.approx(0.75) and slot.rounds == 0


def test_a_probe_that_waits_for_a_batch_size_that_is_gone_is_noticed() -> None:
    estimator = Estimator(SLOTS, {1: 0, 4: 0}, 0.05)
    estimator.follow({1: 0, 4: 0}, ProbeRequest(slot=1, num_steps=1, rounds=12, max_batch_size=1))
    estimate = estimator.estimate(window(cell(0, [], [], rounds=70, bucket=4)))
    assert estimate.probe is not None and estimate.probe.waited_rounds == 70
