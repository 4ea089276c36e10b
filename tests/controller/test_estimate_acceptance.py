"""Acceptance from censored counts: unbiased, shared by depths, fading with time, quick to notice a change."""

import random
from collections.abc import Sequence

import pytest

from controller.estimate.acceptance import Acceptance
from controller.types import CellDelta


def cell(
    num_steps: int, acceptance: Sequence[float], rows: int, rng: random.Random, *, batch_size: int = 1,
    propose: float = 1.0, limit: int = 99,
) -> CellDelta:  # fmt: skip
    """A window of `rows` request-rounds, drawn; drafts from `limit` on are cut (censored)."""
    reached, correct, proposed = ([0] * num_steps for _ in range(3))
    for _ in range(rows):
        budget = min(num_steps, limit)
        count = budget if rng.random() < propose else 0
        for position in range(count):
            proposed[position] += 1
        position = 0
        while position < budget:
            reached[position] += 1
            if position >= count or rng.random() >= acceptance[position]:
                break
            correct[position] += 1
            position += 1
    return CellDelta(
        num_steps=num_steps, max_batch_size=batch_size, rounds=rows // batch_size, request_rounds=rows,
        reached=tuple(reached), correct=tuple(correct), correct_squared=0, accept_tokens=rows + sum(correct),
        emitted_tokens=rows + sum(correct), timed_rounds=rows // batch_size, round_seconds=0.01 * rows,
        proposed=tuple(proposed),
    )  # fmt: skip


def learn(
    acceptance: Acceptance, curve: Sequence[float], depth: int, windows: int, rng: random.Random
) -> None:
    for _ in range(windows):
        acceptance.add([cell(depth, curve, 40, rng)], 0.25)


def hazards(acceptance: Acceptance) -> list[float]:
    return [hazard.probability for hazard in acceptance.estimate().hazards]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_what_is_seen_at_any_depth_is_the_texts_own(depth: int) -> None:
    curve = [0.8, 0.7, 0.6, 0.5, 0.4]
    acceptance = Acceptance(5)
    learn(acceptance, curve, depth, 40, random.Random(1))
    assert hazards(acceptance)[:depth] == pytest.approx(curve[:depth], abs=0.05)


def test_full_acceptance_at_a_shallow_depth_says_deeper_may_pay() -> None:
    acceptance = Acceptance(7)
    learn(acceptance, [1.0], 1, 20, random.Random(0))
    estimate = acceptance.estimate()
    assert estimate.expected_tokens()[7] > 5
    assert estimate.hazards[6].variance > 5 * estimate.hazards[0].variance


def test_cut_drafts_bias_nothing() -> None:
    rng = random.Random(2)
    acceptance = Acceptance(3)
    for _ in range(40):
        acceptance.add([cell(3, [0.7] * 3, 30, rng), cell(3, [0.7] * 3, 30, rng, limit=1)], 0.25)
    assert hazards(acceptance) == pytest.approx([0.7] * 3, abs=0.05)


def test_mixed_depths_use_their_own_denominators() -> None:
    rng = random.Random(3)
    acceptance = Acceptance(3)
    for _ in range(40):
        acceptance.add([cell(1, [0.7] * 3, 40, rng), cell(3, [0.7] * 3, 20, rng)], 0.25)
    assert hazards(acceptance) == pytest.approx([0.7] * 3, abs=0.06)


def test_idle_time_fades_what_is_known() -> None:
    acceptance = Acceptance(2)
    learn(acceptance, [0.9, 0.9], 2, 40, random.Random(4))
    before = acceptance.estimate()
    acceptance.add([], 60.0)
    after = acceptance.estimate()
    assert after.hazards[0].variance > 5 * before.hazards[0].variance
    assert after.request_rounds < 0.01 * before.request_rounds


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.3), (0.2, 0.9)])
def test_a_change_is_noticed_within_two_windows(before: float, after: float) -> None:
    rng = random.Random(5)
    acceptance = Acceptance(3)
    learn(acceptance, [before] * 3, 2, 60, rng)
    seen = []
    for _ in range(2):
        acceptance.add([cell(2, [after] * 3, 40, rng)], 0.25)
        seen.append(acceptance.estimate())
    assert any(estimate.has_changed for estimate in seen)
    assert (seen[0].surprise > 0) == (after > before)
    assert seen[-1].hazards[0].probability == pytest.approx(after, abs=0.12)


def test_steady_text_alarms_seldom() -> None:
    rng = random.Random(6)
    acceptance = Acceptance(3)
    alarms = 0
    for _ in range(1000):
        acceptance.add([cell(3, [0.7, 0.6, 0.5], 20, rng)], 0.25)
        alarms += acceptance.estimate().has_changed
    assert alarms < 15


def test_a_single_bad_round_changes_little() -> None:
    rng = random.Random(7)
    acceptance = Acceptance(3)
    learn(acceptance, [1.0] * 3, 3, 20, rng)
    acceptance.add([cell(3, [0.0] * 3, 1, rng)], 0.25)
    assert hazards(acceptance)[0] > 0.9


def test_how_often_the_drafter_has_something_is_learned() -> None:
    rng = random.Random(9)
    acceptance = Acceptance(5)
    for _ in range(40):
        acceptance.add([cell(2, [0.9] * 5, 40, rng, propose=0.4)], 0.25)
    assert acceptance.estimate().proposed == pytest.approx([0.4] * 5, abs=0.06)


def test_the_shape_of_the_curve_is_remembered() -> None:
    """With a drafter that seldom finds anything but is then right, one look at p_1 tells about p_2."""
    rng = random.Random(10)
    acceptance = Acceptance(3)
    for _ in range(200):
        acceptance.add([cell(3, [0.95] * 3, 40, rng, propose=0.4)], 0.25)
    acceptance.add([], 30.0)  # recent evidence is gone, the shape is not
    learn(acceptance, [0.38], 1, 8, rng)
    assert hazards(acceptance)[1] > 0.7


def test_ends_are_learned_from_what_is_lost() -> None:
    acceptance = Acceptance(3)
    # All drafts correct; one token in twenty is a request's last.
    base = cell(3, [1.0] * 3, 400, random.Random(0))
    lost = round(400 * sum(1 - 0.95**i for i in (1, 2, 3)))
    for _ in range(40):
        acceptance.add([CellDelta(**{**vars(base), "emitted_tokens": base.accept_tokens - lost})], 0.25)
    estimate = acceptance.estimate()
    assert estimate.end_rate == pytest.approx(0.05, abs=0.01)
    assert estimate.expected_tokens()[3] == pytest.approx((1600 - lost) / 400, rel=0.02)


def test_silence_is_no_surprise() -> None:
    acceptance = Acceptance(3)
    rng = random.Random(0)
    learn(acceptance, [0.9, 0.9, 0.9], 3, 20, rng)
    learn(acceptance, [0.1, 0.1, 0.1], 3, 1, rng)
    assert abs(acceptance.estimate().surprise) > 3
    acceptance.add([], 0.25)
    assert acceptance.estimate().surprise == 0
