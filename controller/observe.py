"""Observe: cumulative counters in, the difference over a window out.

A first reading, a new `boot_id` or any counter that went backwards starts a new baseline, which is no evidence:
a difference is never negative and never mixes two lives of a worker. Knows nothing about depths or decisions.
"""

from controller.types import CellDelta, Observation
from worker.protocol import SpecStats, StatsBucket

_Key = tuple[int, int]


class Observer:
    """Turns successive readings of one worker into `Observation`s."""

    def __init__(self) -> None:
        self._previous: SpecStats | None = None
        self._seconds = 0.0

    def reset(self) -> None:
        """Forget the last reading: the next one is a baseline."""
        self._previous = None

    def observe(self, stats: SpecStats, seconds: float) -> Observation:
        """Return what happened since the previous reading.

        Args:
            stats: the newest reading.
            seconds: monotonic time of that reading.
        """
        previous, since = self._previous, self._seconds
        self._previous, self._seconds = stats, seconds
        is_baseline = previous is None or previous.boot_id != stats.boot_id or went_backwards(previous, stats)
        cells: tuple[CellDelta, ...] = ()
        generated = 0
        if previous is not None and not is_baseline:
            cells = _differences(previous, stats)
            generated = stats.generated_tokens - previous.generated_tokens
        return Observation(
            boot_id=stats.boot_id,
            seconds=seconds,
            span_seconds=0.0 if is_baseline else seconds - since,
            cells=cells,
            running=stats.queue.running,
            waiting=stats.queue.waiting,
            generated_tokens=generated,
            is_baseline=is_baseline,
        )


def went_backwards(previous: SpecStats, stats: SpecStats) -> bool:
    """Whether a counter is below its previous value, or a bucket has vanished."""
    if stats.generated_tokens < previous.generated_tokens or stats.uptime_seconds < previous.uptime_seconds:
        return True
    now = _by_key(stats)
    return any(key not in now or _shrank(old, now[key]) for key, old in _by_key(previous).items())


def _by_key(stats: SpecStats) -> dict[_Key, StatsBucket]:
    return {(bucket.num_steps, bucket.max_batch_size): bucket for bucket in stats.buckets}


def _shrank(old: StatsBucket, new: StatsBucket) -> bool:
    if len(old.reached) != len(new.reached) or len(old.correct) != len(new.correct):
        return True
    pairs: list[tuple[float, float]] = [
        (old.rounds, new.rounds),
        (old.request_rounds, new.request_rounds),
        (old.correct_squared, new.correct_squared),
        (old.accept_tokens, new.accept_tokens),
        (old.emitted_tokens, new.emitted_tokens),
        (old.timed_rounds, new.timed_rounds),
        (old.round_seconds, new.round_seconds),
        *zip(old.reached, new.reached, strict=True),
        *zip(old.correct, new.correct, strict=True),
    ]
    return any(after < before for before, after in pairs)


def _differences(previous: SpecStats, stats: SpecStats) -> tuple[CellDelta, ...]:
    before = _by_key(previous)
    cells = (_difference(before.get(key), new) for key, new in sorted(_by_key(stats).items()))
    return tuple(cell for cell in cells if cell.rounds > 0)


def _difference(old: StatsBucket | None, new: StatsBucket) -> CellDelta:
    def since(name: str) -> int:
        return int(getattr(new, name) - (getattr(old, name) if old else 0))

    def positions(name: str) -> tuple[int, ...]:
        after: list[int] = getattr(new, name)
        before: list[int] = getattr(old, name) if old else [0] * len(after)
        return tuple(a - b for a, b in zip(after, before, strict=True))

    return CellDelta(
        num_steps=new.num_steps,
        max_batch_size=new.max_batch_size,
        rounds=since("rounds"),
        request_rounds=since("request_rounds"),
        reached=positions("reached"),
        correct=positions("correct"),
        correct_squared=since("correct_squared"),
        accept_tokens=since("accept_tokens"),
        emitted_tokens=since("emitted_tokens"),
        timed_rounds=since("timed_rounds"),
        round_seconds=new.round_seconds - (old.round_seconds if old else 0.0),
        round_seconds_squared=max(
            0.0, new.round_seconds_squared - (old.round_seconds_squared if old else 0.0)
        ),
        proposed=positions("proposed"),
    )
