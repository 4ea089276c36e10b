"""How many tokens a phase of so many seconds is: what its best fixed depth would bring, by expectation."""

import random

from controller.simulate.recorded import RecordedStream, load_streams
from controller.simulate.scenario import PhaseConfig, Scenario
from controller.simulate.surface import Surface

RECORDED_ROUNDS = 400


def phase_tokens(phase: PhaseConfig, scenario: Scenario, surface: Surface) -> int:
    """Return the work of a phase; the same for every policy and seed."""
    if phase.tokens is not None:
        return phase.tokens
    assert phase.seconds is not None
    size = max(1, round(phase.mean_batch_size))
    rates = []
    for depth in scenario.candidate_steps:
        drafts, correct = _expected(phase, scenario, depth)
        seconds = surface.seconds(size, depth, size * (1 + drafts), phase.context_tokens)
        rates.append(phase.mean_batch_size * (1 + correct) / seconds)
    return max(1, round(phase.seconds * max(rates)))


def _expected(phase: PhaseConfig, scenario: Scenario, depth: int) -> tuple[float, float]:
    """Expected drafts proposed and correct per request-round."""
    if phase.recorded is not None:
        return _expected_of_recorded(phase, scenario, depth)
    total = sum(kind.share for kind in phase.kinds)
    drafts = correct = 0.0
    for kind in phase.kinds:
        survival, expected = 1.0, 0.0
        for position in range(depth):
            survival *= kind.acceptance[min(position, len(kind.acceptance) - 1)]
            expected += survival
        drafts += kind.share / total * kind.propose * depth
        correct += kind.share / total * kind.propose * expected
    return drafts, correct


def _expected_of_recorded(phase: PhaseConfig, scenario: Scenario, depth: int) -> tuple[float, float]:
    assert phase.recorded is not None
    streams = load_streams(scenario.directory / phase.recorded)
    rounds = [
        RecordedStream(stream, random.Random(number)).next_round for number, stream in enumerate(streams)
    ]
    outcomes = [play(depth) for play in rounds for _ in range(RECORDED_ROUNDS)]
    return sum(p for p, _ in outcomes) / len(outcomes), sum(c for _, c in outcomes) / len(outcomes)
