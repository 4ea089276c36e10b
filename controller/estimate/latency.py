"""Latency: the seconds of a round at any batch size and depth, measured at start and corrected while serving.

    ln t(bs, k) = ln profile(bs, k) + level + slope_k k/K + slope_bs log2(bs) + own(bucket, k)

The profile is read at the rows that would really be verified: a request for which the drafter finds nothing has
one row, whatever the depth. `level` is what the whole machine does (other load, longer contexts) and moves fast;
the slopes are errors that cells share and move slowly; `own` is a cell's own error. All are tracked by a Kalman
filter on the logarithm of each window's mean round; what cells share cancels when two depths are compared. Without
a profile a plain formula stands in, the slopes start wide and learn within the first seconds.

Depth 0 is a cell like the others. Rounds that shared their step with a prefill are never in a window's times.
Pure. Knows nothing about acceptance.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from controller.types import CellDelta

LEVEL_DRIFT = 0.04
"""Standard deviation that the level gathers per square root of a second."""
SLOPE_DRIFT = 0.002
CELL_DRIFT = 0.002
PROFILE_SLOPE_SD = 0.03
PROFILE_CELL_SD = 0.03
UNPROFILED_SLOPE_SD = 0.4
UNPROFILED_CELL_SD = 0.06
CLIP = 3.0
"""Standard deviations beyond which a window's mean counts as a stall of the machine."""
REMEMBERED = 200
"""Points of the profile that are kept."""
GUESS_PER_STEP = 0.12
"""Without a profile: a round's growth per draft, relative to depth 0, until it is known."""


@dataclass(frozen=True)
class ProfileCell:
    """Seconds of one round at an exact batch size, every request drafting the whole depth."""

    batch_size: int
    num_steps: int
    verify_seconds: float
    round_seconds: float


class CostForecast(NamedTuple):
    """Seconds of a round at one depth."""

    seconds: float
    variance: float
    """Of ln(seconds), but for the level."""
    spread: float
    """Standard deviation of ln(seconds) between single rounds."""


class Profile:
    """The start-up profile, read between its cells and at fewer rows than it was taken with."""

    def __init__(self, cells: Sequence[ProfileCell], error: float = 0.0) -> None:
        """Take the cells, at least one, and the standard deviation of the logarithm of their seconds."""
        self.error = error
        self._cells = {(c.batch_size, c.num_steps): c for c in cells}
        self._sizes = sorted({c.batch_size for c in cells})
        self._read: dict[tuple[int, int, int], float] = {}
        self._steps = {
            size: sorted(c.num_steps for c in cells if c.batch_size == size) for size in self._sizes
        }

    def seconds(self, batch_size: float, num_steps: int, drafts: float) -> float:
        """Return the seconds of a round with this many drafts verified per request (at most num_steps).

        Read on a grid of hundredths and remembered: the same few points are asked for in every turn.
        """
        key = round(100 * batch_size), num_steps, round(100 * drafts)
        found = self._read.get(key)
        if found is None:
            if len(self._read) >= REMEMBERED:
                self._read.clear()
            found = self._read[key] = self._between(key[0] / 100, num_steps, key[2] / 100)
        return found

    def _between(self, batch_size: float, num_steps: int, drafts: float) -> float:
        low, high, share = bracket(self._sizes, batch_size)
        value = (1 - share) * self._at(low, num_steps, drafts)
        if share:
            value += share * self._at(high, num_steps, drafts)
        # NOTE: beyond the largest size profiled the rows of the largest are scaled up: slow rather than free.
        return value * max(1.0, batch_size / self._sizes[-1])

    def _at(self, size: int, num_steps: int, drafts: float) -> float:
        steps = self._steps[size]
        low, high, share = bracket(steps, num_steps)
        cells = self._cells[size, low], self._cells[size, high]
        rest = [c.round_seconds - c.verify_seconds for c in cells]
        low_rows, high_rows, row_share = bracket(steps, drafts)
        verify = (1 - row_share) * self._cells[size, low_rows].verify_seconds
        verify += row_share * self._cells[size, high_rows].verify_seconds
        return max(1e-9, (1 - share) * rest[0] + share * rest[1] + verify)


class Latency:
    """The costs of one worker's rounds."""

    def __init__(self, profile: Profile | None, deepest: int) -> None:
        self._profile = profile
        self._deepest = max(deepest, 1)
        slope = PROFILE_SLOPE_SD if profile else UNPROFILED_SLOPE_SD
        self._cell_sd = profile_cell_sd(profile.error) if profile else UNPROFILED_CELL_SD
        self._state = [0.0, 0.0, 0.0]
        self._covariance = [[1.0, 0.0, 0.0], [0.0, slope**2, 0.0], [0.0, 0.0, slope**2]]
        self._own: dict[tuple[int, int], list[float]] = {}
        self._spread_squared = 0.05**2
        self._anchor: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether there is a profile, or a round has been timed."""
        return self._profile is not None or self._anchor is not None

    def add(self, cells: Sequence[CellDelta], span_seconds: float, drafts_of: Sequence[float]) -> None:
        """Take a window in.

        Args:
            cells: what was executed.
            span_seconds: time since the window before.
            drafts_of: drafts verified per request-round at each depth, for cells that do not tell.
        """
        self._drift(span_seconds)
        for cell in cells:
            if cell.timed_rounds <= 0 or cell.round_seconds <= 0:
                continue
            batch_size = cell.request_rounds / cell.rounds
            drafts = sum(cell.proposed) / cell.request_rounds if cell.proposed else drafts_of[cell.num_steps]
            mean = cell.round_seconds / cell.timed_rounds
            if self._anchor is None and self._profile is None:
                self._anchor = mean / _guess(batch_size, cell.num_steps)
            self._learn_spread(cell, mean)
            self._update(cell, batch_size, math.log(mean / self._base(batch_size, cell.num_steps, drafts)))

    def forecast(
        self, batch_size: float, depths: Sequence[int], drafts_of: Sequence[float]
    ) -> list[CostForecast]:
        """Return what a round would take at each of some depths; `is_known` must hold.

        Args:
            batch_size: requests of the round.
            depths: what to tell of.
            drafts_of: drafts verified per request-round, by depth.
        """
        level, slope_steps, slope_size = self._state
        (_, _, _), (_, c11, c12), (_, _, c22) = self._covariance
        size = _size_feature(batch_size)
        bucket = 1 << max(0, math.ceil(batch_size) - 1).bit_length()
        unknown, spread = (0.0, self._cell_sd**2), math.sqrt(self._spread_squared)
        costs = []
        for num_steps in depths:
            steps = num_steps / self._deepest
            own, own_variance = self._own.get((bucket, num_steps), unknown)
            value = level + steps * slope_steps + size * slope_size + own
            shared = steps * steps * c11 + 2 * steps * size * c12 + size * size * c22
            seconds = self._base(batch_size, num_steps, drafts_of[num_steps]) * math.exp(value)
            costs.append(CostForecast(seconds, own_variance + shared, spread))
        return costs

    # ---- inside ----

    def _features(self, batch_size: float, num_steps: int) -> list[float]:
        return [1.0, num_steps / self._deepest, _size_feature(batch_size)]

    def _base(self, batch_size: float, num_steps: int, drafts: float) -> float:
        if self._profile is not None:
            return self._profile.seconds(batch_size, num_steps, min(drafts, num_steps))
        assert self._anchor is not None
        return self._anchor * _guess(batch_size, num_steps)

    def _drift(self, span_seconds: float) -> None:
        self._covariance[0][0] = min(1.0, self._covariance[0][0] + LEVEL_DRIFT**2 * span_seconds)
        for index in (1, 2):
            self._covariance[index][index] += SLOPE_DRIFT**2 * span_seconds
        for own in self._own.values():
            own[1] = min(self._cell_sd**2, own[1] + CELL_DRIFT**2 * span_seconds)

    def _learn_spread(self, cell: CellDelta, mean: float) -> None:
        if cell.timed_rounds < 3 or cell.round_seconds_squared <= 0:
            return
        variance = cell.round_seconds_squared / cell.timed_rounds - mean * mean
        relative = min(0.25, max(0.0, variance) / mean**2 * cell.timed_rounds / (cell.timed_rounds - 1))
        share = min(0.2, cell.timed_rounds / 200)
        self._spread_squared += share * (relative - self._spread_squared)

    def _update(self, cell: CellDelta, batch_size: float, observed: float) -> None:
        x = self._features(batch_size, cell.num_steps)
        own = self._own.setdefault((cell.max_batch_size, cell.num_steps), [0.0, self._cell_sd**2])
        covariance = self._covariance
        gains = [sum(covariance[i][j] * x[j] for j in range(3)) for i in range(3)]
        noise = max(self._spread_squared, 1e-4) / cell.timed_rounds + 1e-4
        total = sum(x[i] * gains[i] for i in range(3)) + own[1] + noise
        surprise = observed - sum(x[i] * self._state[i] for i in range(3)) - own[0]
        limit = CLIP * math.sqrt(total)
        surprise = min(max(surprise, -limit), limit)
        for i in range(3):
            self._state[i] += gains[i] / total * surprise
        own[0] += own[1] / total * surprise
        own[1] -= own[1] * own[1] / total
        self._covariance = [
            [covariance[i][j] - gains[i] * gains[j] / total for j in range(3)] for i in range(3)
        ]


def profile_cell_sd(error: float) -> float:
    """Return how far off a cell may be: by what serving differs from any profile, and by the profile's own error."""
    return math.hypot(PROFILE_CELL_SD, error)


def bracket(points: Sequence[int], value: float) -> tuple[int, int, float]:
    """Return the points around a value and how far it is from the lower to the upper one (0…1)."""
    index = bisect.bisect_left(points, value)
    if index == 0:
        return points[0], points[0], 0.0
    if index == len(points):
        return points[-1], points[-1], 0.0
    low, high = points[index - 1], points[index]
    return low, high, (value - low) / (high - low)


def _size_feature(batch_size: float) -> float:
    return math.log2(max(batch_size, 1.0)) / 4


def _guess(batch_size: float, num_steps: int) -> float:
    """A shape for machines without a profile; its errors are what the slopes learn."""
    return (1 + GUESS_PER_STEP * num_steps) * math.pow(batch_size, 0.25)
