"""Histograms of how long the stages of rounds took, by the depth that was executed.

The sums on the wire are enough for deciding; people want quantiles. Counts only, cumulative since the start; what they
are called and who reads them is `round_metrics`' business. Not locked: its owner's lock guards it.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

STAGES = ("draft", "verify", "round", "catch_up")
"""Parts of a round; `round` is the whole, without the catch-up of the drafter's own KV."""

EDGES_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.007, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.14, 0.2, 0.3,
    0.45, 0.7, 1.0, 1.5, 2.5, 5.0,
)  # fmt: skip
"""Upper edges. From n-gram lookup (tens of microseconds) to a large batch on a slow CPU."""


class DurationHistogram(NamedTuple):
    """One distribution."""

    counts: tuple[int, ...]
    """Per edge, and one more for what is above all edges. Not cumulative."""
    seconds: float
    """Sum of all durations."""


class RoundDurations:
    """Adds rounds up, by (stage, num_steps)."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], list[int]] = {}
        self._seconds: dict[tuple[str, int], float] = {}

    def add(self, num_steps: int, times: tuple[float, ...]) -> None:
        """Add one round; `times` has one value for each of `STAGES`."""
        for stage, seconds in zip(STAGES, times, strict=True):
            key = stage, num_steps
            counts = self._counts.setdefault(key, [0] * (len(EDGES_SECONDS) + 1))
            counts[bisect_left(EDGES_SECONDS, seconds)] += 1
            self._seconds[key] = self._seconds.get(key, 0.0) + seconds

    def snapshot(self) -> Mapping[tuple[str, int], DurationHistogram]:
        """Return a copy."""
        return {
            key: DurationHistogram(tuple(counts), self._seconds[key]) for key, counts in self._counts.items()
        }
