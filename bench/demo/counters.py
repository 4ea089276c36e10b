"""Arithmetic on the worker's cumulative statistics: what happened between two of them.

Numbers in, numbers out. Everything shown is a ratio of differences of counters; position acceptance has each
position's own denominator (`reached`).
"""

from collections import Counter
from dataclasses import dataclass

from worker.protocol import SpecStats


@dataclass(frozen=True)
class Interval:
    """Sums over the rounds between two statistics of the same boot."""

    generated_tokens: int
    rounds_by_depth: Counter[int]
    request_rounds: int
    accept_tokens: int
    reached: tuple[int, ...]
    correct: tuple[int, ...]

    @property
    def accept_length(self) -> float | None:
        """Mean tokens that a request got from a round (≥ 1), or None without a round."""
        return self.accept_tokens / self.request_rounds if self.request_rounds else None

    @property
    def position_acceptance(self) -> list[float]:
        """P(draft i correct | drafts before it correct), as far as a position was reached."""
        return [c / r for c, r in zip(self.correct, self.reached, strict=True) if r]

    @property
    def depth_shares(self) -> list[tuple[int, float]]:
        """Depths used, rising, each with its share of the rounds."""
        rounds = self.rounds_by_depth.total()
        return [(depth, count / rounds) for depth, count in sorted(self.rounds_by_depth.items()) if count]


def between(before: SpecStats, after: SpecStats) -> Interval:
    """Return what happened from `before` to `after` (ValueError across a restart of the worker)."""
    if before.boot_id != after.boot_id:
        raise ValueError(f"the worker restarted: boot {before.boot_id} is not {after.boot_id}")
    earlier = {(bucket.num_steps, bucket.max_batch_size): bucket for bucket in before.buckets}
    deepest = max((bucket.num_steps for bucket in after.buckets), default=0)
    reached, correct = [0] * deepest, [0] * deepest
    rounds: Counter[int] = Counter()
    request_rounds = accept_tokens = 0
    for bucket in after.buckets:
        base = earlier.get((bucket.num_steps, bucket.max_batch_size))
        rounds[bucket.num_steps] += bucket.rounds - (base.rounds if base else 0)
        request_rounds += bucket.request_rounds - (base.request_rounds if base else 0)
        accept_tokens += bucket.accept_tokens - (base.accept_tokens if base else 0)
        for position in range(bucket.num_steps):
            reached[position] += bucket.reached[position] - (base.reached[position] if base else 0)
            correct[position] += bucket.correct[position] - (base.correct[position] if base else 0)
    return Interval(
        generated_tokens=after.generated_tokens - before.generated_tokens,
        rounds_by_depth=rounds,
        request_rounds=request_rounds,
        accept_tokens=accept_tokens,
        reached=tuple(reached),
        correct=tuple(correct),
    )


def add(left: Interval, right: Interval) -> Interval:
    """Return the sums of both."""
    width = max(len(left.reached), len(right.reached))

    def padded(counts: tuple[int, ...]) -> tuple[int, ...]:
        return counts + (0,) * (width - len(counts))

    return Interval(
        generated_tokens=left.generated_tokens + right.generated_tokens,
        rounds_by_depth=left.rounds_by_depth + right.rounds_by_depth,
        request_rounds=left.request_rounds + right.request_rounds,
        accept_tokens=left.accept_tokens + right.accept_tokens,
        reached=tuple(a + b for a, b in zip(padded(left.reached), padded(right.reached), strict=True)),
        correct=tuple(a + b for a, b in zip(padded(left.correct), padded(right.correct), strict=True)),
    )
