"""The recent past in ratios, for people: accept_length, position acceptance, tokens per second.

No decision ever reads these (they mix depths); decisions use `estimate`.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from controller.types import Observation


@dataclass(frozen=True, kw_only=True)
class RecentFigures:
    """Ratios over a recent stretch of time, for people and dashboards; never an input of a decision."""

    span_seconds: float
    accept_length: float | None
    """Mean num_accept_tokens per request-round (bonus counted); None without rounds."""
    position_acceptance: tuple[float | None, ...]
    tokens_per_second: float | None
    rounds_by_num_steps: dict[int, int]


class RecentWindow:
    """The last observations, up to `seconds` back, summed on demand."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._observations: deque[Observation] = deque()

    def add(self, observation: Observation) -> None:
        """Take an observation in and drop what is too old; a baseline empties the window."""
        if observation.is_baseline:
            self._observations.clear()
            return
        self._observations.append(observation)
        while observation.seconds - self._observations[0].seconds >= self._seconds:
            self._observations.popleft()

    def pooled(self) -> tuple[float, list[dict[str, Any]]]:
        """Return the window's seconds and its counts summed per (num_steps, max_batch_size), for the record."""
        pooled: dict[tuple[int, int], dict[str, Any]] = {}
        for cell in (cell for observation in self._observations for cell in observation.cells):
            counts = dict(vars(cell))
            key = cell.num_steps, cell.max_batch_size
            pooled[key] = _sum(pooled[key], counts) if key in pooled else counts
        span = sum(observation.span_seconds for observation in self._observations)
        return span, [pooled[key] for key in sorted(pooled)]

    def figures(self) -> RecentFigures:
        """Return the ratios of the window, each from pooled sums."""
        cells = [cell for observation in self._observations for cell in observation.cells]
        span = sum(observation.span_seconds for observation in self._observations)
        request_rounds = sum(cell.request_rounds for cell in cells)
        width = max((cell.num_steps for cell in cells), default=0)
        reached = [sum(c.reached[i] for c in cells if c.num_steps > i) for i in range(width)]
        correct = [sum(c.correct[i] for c in cells if c.num_steps > i) for i in range(width)]
        rounds: dict[int, int] = {}
        for cell in cells:
            rounds[cell.num_steps] = rounds.get(cell.num_steps, 0) + cell.rounds
        generated = sum(observation.generated_tokens for observation in self._observations)
        return RecentFigures(
            span_seconds=span,
            accept_length=sum(c.accept_tokens for c in cells) / request_rounds if request_rounds else None,
            position_acceptance=tuple(c / r if r else None for c, r in zip(correct, reached, strict=True)),
            tokens_per_second=generated / span if span > 0 else None,
            rounds_by_num_steps=dict(sorted(rounds.items())),
        )


def _sum(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Add two cells of the same bucket, position by position."""
    added: dict[str, Any] = {}
    for name, value in new.items():
        if name in ("num_steps", "max_batch_size"):
            added[name] = value
        elif isinstance(value, tuple | list):
            added[name] = [a + b for a, b in zip(old[name], value, strict=True)]
        else:
            added[name] = old[name] + value
    return added
