"""Round seconds: read from the profile at the rows there are, corrected by what rounds really take."""

import math

import pytest

from controller.estimate.latency import CostForecast, Latency, Profile, ProfileCell
from controller.types import CellDelta

STEPS = (0, 1, 3, 7)


def truth(batch_size: float, drafts: float, num_steps: int) -> float:
    return 0.010 + 0.001 * num_steps + 0.0005 * batch_size * (1 + drafts)


CELLS = [
    ProfileCell(size, steps, truth(size, steps, 0), truth(size, steps, steps))
    for size in (1, 2, 4, 8)
    for steps in STEPS
]


def cell(
    num_steps: int, seconds: float, *, batch_size: int = 4, rounds: int = 20, timed: int | None = None
) -> CellDelta:
    count = rounds if timed is None else timed
    return CellDelta(
        num_steps=num_steps, max_batch_size=1 << (batch_size - 1).bit_length(), rounds=rounds,
        request_rounds=rounds * batch_size, reached=(), correct=(), correct_squared=0, accept_tokens=0,
        emitted_tokens=0, timed_rounds=count, round_seconds=seconds * count,
        round_seconds_squared=seconds * seconds * count,
    )  # fmt: skip


FULL = [float(i) for i in range(9)]


def forecast(latency: Latency, batch_size: int, num_steps: int) -> CostForecast:
    return latency.forecast(batch_size, [num_steps], FULL)[0]


def test_the_profile_is_read_between_its_cells() -> None:
    profile = Profile(CELLS)
    assert profile.seconds(4, 3, 3.0) == pytest.approx(truth(4, 3, 3))
    assert profile.seconds(6, 3, 3.0) == pytest.approx(truth(6, 3, 3))
    assert profile.seconds(3, 5, 5.0) == pytest.approx(truth(3, 5, 5))
    assert profile.seconds(16, 0, 0.0) > profile.seconds(8, 0, 0.0), "beyond the profile: not free"


def test_drafts_that_are_not_there_cost_no_rows() -> None:
    assert Profile(CELLS).seconds(4, 7, 1.5) == pytest.approx(truth(4, 1.5, 7))


def test_a_steady_error_of_one_cell_is_learned_there_only() -> None:
    latency = Latency(Profile(CELLS), 7)
    for _ in range(200):
        latency.add([cell(3, truth(4, 3, 3)), cell(1, 1.1 * truth(4, 1, 1))], 0.25, FULL)
    ratio = forecast(latency, 4, 1).seconds / forecast(latency, 4, 3).seconds
    assert ratio == pytest.approx(1.1 * truth(4, 1, 1) / truth(4, 3, 3), rel=0.02)
    assert forecast(latency, 4, 1).variance < forecast(latency, 4, 7).variance


def test_a_slow_machine_is_slow_at_every_depth() -> None:
    latency = Latency(Profile(CELLS), 7)
    for _ in range(20):
        latency.add([cell(3, 1.5 * truth(4, 3, 3))], 0.25, FULL)
    for steps in STEPS:
        found = forecast(latency, 4, steps).seconds
        assert found == pytest.approx(1.5 * truth(4, steps, steps), rel=0.05)


def test_a_stall_moves_little() -> None:
    latency = Latency(Profile(CELLS), 7)
    for _ in range(40):
        latency.add([cell(3, truth(4, 3, 3))], 0.25, FULL)
    latency.add([cell(3, 50 * truth(4, 3, 3), rounds=1)], 0.25, FULL)
    assert forecast(latency, 4, 3).seconds < 1.3 * truth(4, 3, 3)


def test_rounds_with_a_prefill_are_no_evidence() -> None:
    latency = Latency(Profile(CELLS), 7)
    latency.add([cell(3, 9.0, timed=0)], 0.25, FULL)
    assert forecast(latency, 4, 3).seconds == pytest.approx(truth(4, 3, 3))


def test_without_a_profile_two_depths_tell_the_others() -> None:
    latency = Latency(None, 7)
    assert not latency.is_known
    for _ in range(30):
        latency.add([cell(1, truth(4, 1, 1)), cell(7, truth(4, 7, 7))], 0.25, FULL)
    assert latency.is_known
    assert forecast(latency, 4, 3).seconds == pytest.approx(truth(4, 3, 3), rel=0.12)


def test_noise_between_rounds_is_learned() -> None:
    latency = Latency(Profile(CELLS), 7)
    mean, sd = truth(4, 3, 3), 0.2
    for _ in range(200):
        noisy = cell(3, mean)
        squared = noisy.timed_rounds * mean * mean * (1 + sd * sd)
        latency.add([CellDelta(**{**vars(noisy), "round_seconds_squared": squared})], 0.25, FULL)
    assert forecast(latency, 4, 3).spread == pytest.approx(sd, rel=0.1)
    assert math.isfinite(forecast(latency, 4, 0).variance)


def test_a_shaky_profile_is_believed_less() -> None:
    """The same few rounds correct it sooner, and what is not tried yet is in more doubt."""
    firm, shaky = Latency(Profile(CELLS), 7), Latency(Profile(CELLS, error=0.13), 7)
    assert forecast(shaky, 4, 3).variance > forecast(firm, 4, 3).variance + 0.9 * 0.13**2
    for latency in (firm, shaky):
        for _ in range(3):
            latency.add([cell(0, truth(4, 0, 0)), cell(3, 0.8 * truth(4, 3, 3), rounds=4)], 0.25, FULL)
    ratios = [forecast(latency, 4, 3).seconds / forecast(latency, 4, 0).seconds for latency in (firm, shaky)]
    true = 0.8 * truth(4, 3, 3) / truth(4, 0, 0)
    assert abs(ratios[1] - true) < 0.5 * abs(ratios[0] - true)
    assert forecast(shaky, 4, 3).variance < 0.5 * 0.13**2
