"""Counts of what rounds really did, by (executed num_steps, batch-size bucket): the source of every metric.

Counters only, cumulative since the process started; ratios are formed where they are read. One writer (the
engine thread) and any number of readers. Knows nothing about tensors, HTTP or Prometheus.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from worker.durations import DurationHistogram, RoundDurations
from worker.protocol import StatsBucket, batch_size_bucket


class RowOutcome(NamedTuple):
    """What one request's row came to in one round."""

    num_proposed_drafts: int
    """Positions at which verify looked at a draft, in a tree at one or more."""
    num_correct_drafts: int
    """Drafts accepted and kept (not counting what EOS, a stop or a limit cut off)."""
    num_accept_tokens: int
    """Correct drafts + 1, before anything was cut."""
    num_emitted_tokens: int
    row_budget: int
    """Positions from here on are censored: the request could not have used a draft there."""
    context_tokens: int
    """Committed length before the round."""

    @property
    def num_reached(self) -> int:
        """Positions with an outcome: all correct ones, plus the one that failed (unless censored).

        "The drafter had nothing to propose" is a failure at its position; a cut by budget or by the request's
        end says nothing about the next one.
        """
        was_cut = self.num_emitted_tokens < self.num_accept_tokens
        if was_cut or self.num_correct_drafts >= self.row_budget:
            return self.num_correct_drafts
        return self.num_correct_drafts + 1


class RoundTimes(NamedTuple):
    """Wall seconds of one round's stages, in the order of `worker.durations.STAGES`."""

    draft_seconds: float
    verify_seconds: float
    round_seconds: float
    catch_up_seconds: float


_COUNTS = (
    "rounds",
    "request_rounds",
    "correct_squared",
    "accept_tokens",
    "emitted_tokens",
    "verify_rows",
    "context_tokens",
    "prefill_rounds",
)


@dataclass
class _Bucket:
    """Mutable twin of `StatsBucket`."""

    num_steps: int
    max_batch_size: int
    proposed: list[int] = field(init=False)
    reached: list[int] = field(init=False)
    correct: list[int] = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(RoundTimes._fields, 0.0))
    seconds_squared: dict[str, float] = field(default_factory=lambda: dict.fromkeys(RoundTimes._fields, 0.0))

    def __post_init__(self) -> None:
        self.proposed, self.reached, self.correct = ([0] * self.num_steps for _ in range(3))

    def add_row(self, row: RowOutcome) -> None:
        for counts, upto in (
            (self.proposed, row.num_proposed_drafts),
            (self.reached, row.num_reached),
            (self.correct, row.num_correct_drafts),
        ):
            for position in range(upto):
                counts[position] += 1
        self.counts["request_rounds"] += 1
        self.counts["correct_squared"] += row.num_correct_drafts**2
        self.counts["accept_tokens"] += row.num_accept_tokens
        self.counts["emitted_tokens"] += row.num_emitted_tokens
        self.counts["context_tokens"] += row.context_tokens

    def add_times(self, times: RoundTimes) -> None:
        for name, value in zip(times._fields, times, strict=True):
            self.seconds[name] += value
            self.seconds_squared[name] += value**2

    def to_wire(self) -> StatsBucket:
        return StatsBucket.model_validate(
            {
                "num_steps": self.num_steps,
                "max_batch_size": self.max_batch_size,
                "proposed": list(self.proposed),
                "reached": list(self.reached),
                "correct": list(self.correct),
                **{name: self.counts[name] for name in _COUNTS},
                **self.seconds,
                **{f"{name}_squared": value for name, value in self.seconds_squared.items()},
            }
        )


class StatsSnapshot(NamedTuple):
    """All counters at one moment."""

    buckets: list[StatsBucket]
    requests_finished: dict[str, int]
    prompt_tokens: int
    generated_tokens: int
    first_tokens: int
    draft_failures: int


class StatsRecorder:
    """Adds up rounds; `snapshot` is consistent: no reader sees half a round."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._finished: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._durations = RoundDurations()

    def record_round(
        self,
        *,
        num_steps: int,
        rows: Sequence[RowOutcome],
        verify_rows: int,
        times: RoundTimes,
        is_timed: bool,
    ) -> None:
        """Add one round that executed `num_steps` for `rows`."""
        with self._lock:
            key = num_steps, batch_size_bucket(len(rows))
            bucket = self._buckets.setdefault(key, _Bucket(*key))
            bucket.counts["rounds"] += 1
            bucket.counts["verify_rows"] += verify_rows
            if is_timed:
                bucket.add_times(times)
                self._durations.add(num_steps, times)
            else:
                bucket.counts["prefill_rounds"] += 1
            for row in rows:
                bucket.add_row(row)
                self._totals["generated_tokens"] += row.num_emitted_tokens

    def record_first_token(self, prompt_tokens: int) -> None:
        """Add a token drawn straight after a prefill; it belongs to no round."""
        with self._lock:
            self._totals["prompt_tokens"] += prompt_tokens
            self._totals["first_tokens"] += 1
            self._totals["generated_tokens"] += 1

    def record_finish(self, reason: str) -> None:
        """Count a request's end."""
        with self._lock:
            self._finished[reason] += 1

    def record_draft_failure(self) -> None:
        """Count a round that fell back to depth 0 because its drafter failed."""
        with self._lock:
            self._totals["draft_failures"] += 1

    def durations(self) -> Mapping[tuple[str, int], DurationHistogram]:
        """Return, by (stage, num_steps), how long the rounds behind the time sums took."""
        with self._lock:
            return self._durations.snapshot()

    def snapshot(self) -> StatsSnapshot:
        """Return a copy of all counters."""
        with self._lock:
            return StatsSnapshot(
                buckets=[self._buckets[key].to_wire() for key in sorted(self._buckets)],
                requests_finished=dict(self._finished),
                prompt_tokens=self._totals["prompt_tokens"],
                generated_tokens=self._totals["generated_tokens"],
                first_tokens=self._totals["first_tokens"],
                draft_failures=self._totals["draft_failures"],
            )
