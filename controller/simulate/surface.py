"""The latency surface of a simulated worker: seconds of a round by batch size, depth, rows and context."""

import bisect
import json
import random
from collections.abc import Sequence
from pathlib import Path

from controller.simulate.scenario import LatencyConfig
from worker.protocol import LatencyProfile


class Surface:
    """True mean seconds; noise is added by `Noise`."""

    def __init__(self, config: LatencyConfig, directory: Path) -> None:
        self._config = config
        self.measured: LatencyProfile | None = None
        """The profile behind the surface, if it is a real worker's."""
        self._table = None
        if config.table_file is not None:
            content = json.loads((directory / config.table_file).read_text(encoding="utf-8"))
            self.measured = LatencyProfile.model_validate(content.get("profile", content))
            self._table = ProfileTable(self.measured)

    def seconds(self, batch_size: int, num_steps: int, rows: float, context_tokens: float) -> float:
        """Return the mean seconds of a round.

        Args:
            batch_size: decoding rows, one per request.
            num_steps: executed depth.
            rows: rows verified, roots included; at most batch_size × (num_steps + 1).
            context_tokens: mean committed length of the batch's requests.
        """
        if self._table is not None:
            return self._table.seconds(batch_size, num_steps, rows)
        c = self._config
        total = c.host_seconds + max(c.weights_seconds, rows * c.row_seconds)
        total += self.draft_seconds(batch_size, num_steps)
        for edge, extra in c.row_steps:
            if rows > edge:
                total += extra
        return total + c.context_row_seconds * batch_size * context_tokens / 1000

    def draft_seconds(self, batch_size: int, num_steps: int) -> float:
        """Return the mean seconds of the draft stage."""
        if self._table is not None:
            return self._table.draft_seconds(batch_size, num_steps)
        if num_steps == 0:
            return 0.0
        c = self._config
        return c.draft_base_seconds + num_steps * (c.draft_step_seconds + c.draft_row_seconds * batch_size)


class ProfileTable:
    """A measured profile read at any batch size and number of rows: piecewise linear, held at its ends."""

    def __init__(self, profile: LatencyProfile) -> None:
        self._cells = {(c.batch_size, c.num_steps): c for c in profile.cells}
        self._sizes = sorted({c.batch_size for c in profile.cells})
        self._steps = sorted({c.num_steps for c in profile.cells})

    def seconds(self, batch_size: int, num_steps: int, rows: float) -> float:
        """See `Surface.seconds`; the draft stage is paid in full, the verify stage for the rows there are."""
        low, high, share = _bracket(self._sizes, batch_size)
        filled = rows / batch_size - 1
        return sum(
            weight * self._at(size, num_steps, min(filled, num_steps))
            for size, weight in ((low, 1 - share), (high, share))
            if weight
        )

    def draft_seconds(self, batch_size: int, num_steps: int) -> float:
        """See `Surface.draft_seconds`."""
        low, high, share = _bracket(self._sizes, batch_size)
        draft = (1 - share) * self._cells[low, num_steps].draft_seconds
        return draft + share * self._cells[high, num_steps].draft_seconds

    def _at(self, size: int, num_steps: int, drafts: float) -> float:
        own = self._cells[size, num_steps]
        low, high, share = _bracket(self._steps, drafts)
        verify = (1 - share) * self._cells[size, low].verify_seconds
        verify += share * self._cells[size, high].verify_seconds if share else 0.0
        return own.round_seconds - own.verify_seconds + verify


def _bracket(points: Sequence[int], value: float) -> tuple[int, int, float]:
    """Return the points around a value and how far it is from the lower to the upper one (0…1)."""
    index = bisect.bisect_left(points, value)
    if index == 0:
        return points[0], points[0], 0.0
    if index == len(points):
        return points[-1], points[-1], 0.0
    low, high = points[index - 1], points[index]
    return low, high, (value - low) / (high - low)


class Noise:
    """What makes one round longer or shorter than another: log-normal noise, rare spikes."""

    def __init__(self, config: LatencyConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng

    def factor(self) -> float:
        """Draw a factor; its mean is 1 without spikes."""
        c = self._config
        value = self._rng.lognormvariate(-(c.noise**2) / 2, c.noise) if c.noise else 1.0
        if c.spike_probability and self._rng.random() < c.spike_probability:
            value *= c.spike_factor
        return value
