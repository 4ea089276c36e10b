"""What runs are worth: against the best fixed depth of each phase, and how calmly.

For every fixed depth the whole scenario is played with the same seeds. A phase's best depth is the one with the
least mean time over the seeds; a policy's figure is the time of the best depths over its own time, for the same
work. 100 % is thus what nobody reaches who has to find the depths out.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.simulate.run import RunResult
from controller.simulate.scenario import Scenario

SETTLED_WITHIN = 0.97
"""A depth is right for a phase if it is at most 3 % slower there than the best one."""
SETTLED_ROUNDS = 20
"""Rounds in a row at right depths that make a phase settled."""


@dataclass(frozen=True)
class Oracle:
    """The fixed depths, phase by phase."""

    mean_seconds: Mapping[int, Sequence[float]]
    """num_steps -> mean seconds of each phase."""
    seconds: Mapping[int, Sequence[Sequence[float]]]
    """num_steps -> per seed, seconds of each phase."""
    best: Sequence[int]
    """Best fixed depth of each phase."""

    @staticmethod
    def of(fixed: Mapping[int, Sequence[RunResult]]) -> "Oracle":
        """Compare the runs of the fixed depths (num_steps -> one run per seed)."""
        seconds = {depth: [run.phase_seconds for run in runs] for depth, runs in fixed.items()}
        means = {
            depth: [statistics.fmean(phase) for phase in zip(*runs, strict=True)]
            for depth, runs in seconds.items()
        }
        phases = len(next(iter(means.values())))
        best = [min(means, key=lambda depth: means[depth][phase]) for phase in range(phases)]
        return Oracle(means, seconds, best)

    @property
    def best_single(self) -> int:
        """The one depth that is best over all phases together."""
        return min(self.mean_seconds, key=lambda depth: sum(self.mean_seconds[depth]))

    def phase_seconds(self, seed: int) -> list[float]:
        """The best depths' seconds of each phase, for one seed (by its place)."""
        return [self.seconds[depth][seed][phase] for phase, depth in enumerate(self.best)]

    def right(self, phase: int) -> set[int]:
        """Depths that are right for a phase."""
        limit = self.mean_seconds[self.best[phase]][phase] / SETTLED_WITHIN
        return {depth for depth, means in self.mean_seconds.items() if means[phase] <= limit}


def score(scenario: Scenario, oracle: Oracle, runs: Sequence[RunResult]) -> dict[str, object]:
    """Return the figures of one policy on one scenario; one run per seed."""
    percents, adapt = [], []
    phases: list[list[float]] = [[] for _ in oracle.best]
    for seed, run in enumerate(runs):
        ideal = oracle.phase_seconds(seed)
        percents.append(100 * sum(ideal) / run.seconds)
        for phase, (best, own) in enumerate(zip(ideal, run.phase_seconds, strict=True)):
            phases[phase].append(100 * best / own)
        adapt += adapt_seconds(scenario, oracle, run)
    worst = min(statistics.fmean(phase) for phase in phases)
    low, high = interval(percents)
    rounds = sum(run.rounds for run in runs)
    busy = sum(run.seconds for run in runs)
    return {
        "oracle_pct": round(statistics.fmean(percents), 2),
        "oracle_pct_ci": [round(low, 2), round(high, 2)],
        "worst_phase_pct": round(worst, 2),
        "changes_per_1000": round(1000 * sum(run.changes for run in runs) / rounds, 2),
        "probe_pct": round(100 * sum(run.probe_seconds for run in runs) / busy, 2),
        "adapt_seconds": round(statistics.fmean(adapt), 2) if adapt else None,
        "oracle_pct_by_seed": [round(percent, 2) for percent in percents],
    }


def adapt_seconds(scenario: Scenario, oracle: Oracle, run: RunResult) -> list[float]:
    """Seconds from the beginning of each phase until its depth was right for good (or for 20 rounds in a row).

    Only phases at one batch size count, and not the first: nothing shifts there. A phase that never settles counts
    with its whole length.
    """
    found = []
    sizes = [phase.batch_size for phase in scenario.phases] * scenario.repeat
    for phase in range(1, len(run.phase_seconds)):
        if not isinstance(sizes[phase], int):
            continue
        right = oracle.right(phase)
        stretches = [s for s in run.stretches if s.phase == phase and not s.is_probe]
        settled: float | None = None
        in_a_row = 0
        for stretch in stretches:
            if stretch.num_steps not in right:
                settled, in_a_row = None, 0
                continue
            settled = stretch.started if settled is None else settled
            in_a_row += stretch.rounds
            if in_a_row >= SETTLED_ROUNDS:
                break
        began = run.phase_started[phase]
        found.append(run.phase_seconds[phase] if settled is None else settled - began)
    return found


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the confidence interval of a mean, by Student's t; the value itself for a single one."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean
    half = t_quantile(confidence, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def t_quantile(confidence: float, degrees: int) -> float:
    """Two-sided quantile of Student's t (Cornish-Fisher expansion; within 1 % from 4 degrees of freedom on)."""
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    n = degrees
    first = (z**3 + z) / (4 * n)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + first + second + third
