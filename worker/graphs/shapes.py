"""Which shapes get a graph: batch sizes in buckets, rows per request, and how much of the context is read.

Knows the limits of a configuration; knows nothing about what a forward computes.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from worker.models.attention import Segment

LEAST_CONTEXT = 512
CONTEXT_FACTOR = 4
"""Between two lengths of context that are captured: a finer grid saves reading, and costs a graph per shape."""


class Shape(NamedTuple):
    """What a captured forward is fixed to."""

    bucket: int
    """Requests, those that only fill up included."""
    width: int
    """Rows per request."""
    context: int
    """KV tokens that attention reads in each slot; what lies behind a row's own position is masked."""


class ShapeGrid:
    """All shapes of one forward: every bucket with every width and context, since a plan may ask for any pair."""

    def __init__(self, *, max_batch_size: int, widths: Sequence[int], max_tokens: int) -> None:
        """Lay out the grid.

        Args:
            max_batch_size: requests that can run at once, or the largest batch that is to have graphs.
            widths: rows per request that rounds can have, in any order.
            max_tokens: room per slot.
        """
        self.buckets = _steps(1, 2, max_batch_size)
        self.widths = sorted(set(widths))
        self.contexts = _steps(LEAST_CONTEXT, CONTEXT_FACTOR, max_tokens)

    def shapes(self) -> list[Shape]:
        """Return all, those that take the most memory first: the others then fit into what these have taken."""
        return [
            Shape(bucket, width, context)
            for bucket in reversed(self.buckets)
            for width in reversed(self.widths)
            for context in reversed(self.contexts)
        ]

    def fit(self, segments: Sequence[Segment]) -> Shape | None:
        """Return the smallest shape that holds the segments; None where there is none, or a segment is no chain."""
        if any(type(segment) is not Segment for segment in segments):
            return None
        bucket = _at_least(self.buckets, len(segments))
        width = _at_least(self.widths, max(segment.count for segment in segments))
        context = _at_least(self.contexts, max(segment.stop for segment in segments))
        return None if bucket is None or width is None or context is None else Shape(bucket, width, context)


def _steps(first: int, factor: int, last: int) -> list[int]:
    """Return first, first · factor, … below `last`, then `last`."""
    steps = []
    while first < last:
        steps.append(first)
        first *= factor
    return [*steps, last]


def _at_least(rising: Sequence[int], value: int) -> int | None:
    index = bisect_left(rising, value)
    return rising[index] if index < len(rising) else None
