"""The rivals' rules, for comparison in simulations only: they decide inside the engine, every few rounds.

Written from descriptions of SGLang's adaptive speculation (its EMA policy and its throughput-aware policy); they get
what they get there, counts of every round without a controller's delay, and a start-up table of costs.
"""

import bisect
import math
from collections import deque
from collections.abc import Mapping, Sequence

from controller.simulate.scenario import Scenario
from controller.simulate.surface import Surface
from worker.protocol import LatencyProfile

EMA_SLOTS: Mapping[int, tuple[tuple[int, ...], float, float]] = {
    1: ((1, 3, 5, 7), 0.0, -0.25),
    8: ((0, 1, 3), 0.0, 0.0),
    32: ((0, 1), 0.0, 0.0),
    64: ((0,), 0.0, 0.0),
}
"""Lower bound of the batch size -> candidates, hysteresis upwards, hysteresis downwards: its defaults."""


class EmaSlot:
    """The EMA rule for the batch sizes of one slot."""

    ALPHA = 0.2
    INTERVAL = 5
    WARMUP = 10

    def __init__(self, candidates: Sequence[int], up: float, down: float, initial: int) -> None:
        self._candidates = list(candidates)
        self._up, self._down = up, down
        self.current = initial if initial in self._candidates else self._candidates[len(candidates) // 2]
        self._ema = float(self.current - 1)
        self._count = 0

    def verified(self, num_steps: int, correct: Sequence[int]) -> None:
        """Take one round in; every `INTERVAL` rounds the depth is settled anew."""
        if not correct:
            return
        if num_steps > 0:
            self._ema += self.ALPHA * (sum(correct) / len(correct) - self._ema)
        self._count += 1
        if self._count <= self.WARMUP or (self._count - self.WARMUP) % self.INTERVAL:
            return
        self._settle()

    def _settle(self) -> None:
        tiers = self._candidates
        index = tiers.index(self.current)
        if self.current == 0:
            if len(tiers) > 1:
                self.current = tiers[1]
                if self._ema < 0:
                    self._ema = self.current - 1.0
            return
        start = index
        while index > 0:
            below = tiers[index - 1]
            if self._ema > (0.5 if below == 0 else below - 0.5) + self._down:
                break
            index -= 1
        if index == start:
            while index + 1 < len(tiers) and self._ema > tiers[index] - 0.5 + self._up:
                index += 1
        self.current = tiers[index]


class SglangEma:
    """Candidates by batch size, one EMA of correct drafts per slot, thresholds half a draft below the tiers."""

    def __init__(self, scenario: Scenario, profile: LatencyProfile | None) -> None:
        self._edges = sorted(EMA_SLOTS)
        self._slots = {}
        for edge, (wanted, up, down) in EMA_SLOTS.items():
            tiers = [t for t in wanted if t in scenario.candidate_steps] or list(scenario.candidate_steps)
            self._slots[edge] = EmaSlot(tiers, up, down, scenario.fallback)

    def _slot(self, batch_size: int) -> EmaSlot:
        return self._slots[self._edges[bisect.bisect_right(self._edges, batch_size) - 1]]

    def depth(self, batch_size: int) -> int:
        """See `EngineRule.depth`."""
        return self._slot(batch_size).current

    def verified(self, batch_size: int, num_steps: int, correct: Sequence[int]) -> None:
        """See `EngineRule.verified`."""
        self._slot(batch_size).verified(num_steps, correct)


class SglangThroughput:
    """argmax of (1 + Σ p) / cost, p from the last rounds at all batch sizes, cost from a start-up table."""

    WINDOW = 20
    INTERVAL = 10

    def __init__(self, scenario: Scenario, profile: LatencyProfile | None) -> None:
        self._tiers = [tier for tier in scenario.candidate_steps if tier > 0]
        self._costs, self._sizes = _cost_table(scenario, profile, self._tiers)
        self._windows: list[deque[float]] = [deque(maxlen=self.WINDOW) for _ in range(self._tiers[-1])]
        self._current = max([t for t in self._tiers if t <= scenario.fallback], default=self._tiers[0])
        self._count = 0

    def depth(self, batch_size: int) -> int:
        """See `EngineRule.depth`."""
        return self._current

    def verified(self, batch_size: int, num_steps: int, correct: Sequence[int]) -> None:
        """See `EngineRule.verified`."""
        for position in range(num_steps):
            self._windows[position].append(sum(c > position for c in correct) / len(correct))
        self._count += 1
        if self._count % self.INTERVAL:
            return
        if any(len(window) < self.WINDOW for window in self._windows[:num_steps]):
            return
        size = self._sizes[min(bisect.bisect_left(self._sizes, batch_size), len(self._sizes) - 1)]
        accepted = self._accepted()
        best = max(self._tiers, key=lambda t: (1 + sum(accepted[:t])) / self._costs[size, t])
        if best < self._current:
            for window in self._windows[best:]:
                window.clear()
        self._current = best

    def _accepted(self) -> list[float]:
        """Unconditional acceptance per position; positions without a window are extrapolated geometrically."""
        known = []
        for window in self._windows:
            if not window:
                break
            known.append(sum(window) / len(window))
        ratio = 1.0
        if len(known) > 1 and known[0] > 0:
            ratio = (max(known[-1], 1e-6) / known[0]) ** (1 / (len(known) - 1))
        elif known:
            ratio = known[0]
        first = known[0] if known else 0.0
        rest = range(len(known), len(self._windows))
        return known + [first * math.pow(ratio, position) for position in rest]


def _cost_table(
    scenario: Scenario, profile: LatencyProfile | None, tiers: Sequence[int]
) -> tuple[dict[tuple[int, int], float], list[int]]:
    """The start-up table: the profile that the controller gets too, else the true surface."""
    if profile is not None:
        costs = {(c.batch_size, c.num_steps): c.round_seconds for c in profile.cells}
        return costs, sorted({size for size, _ in costs})
    surface = Surface(scenario.latency, scenario.directory)
    sizes = sorted(
        {min(1 << i, scenario.largest_batch) for i in range(scenario.largest_batch.bit_length() + 1)}
    )
    return {(b, k): surface.seconds(b, k, b * (k + 1), 256) for b in sizes for k in tiers}, sizes
