"""Metrics of rounds: what was drafted, accepted and emitted, and how long it took, by what was executed.

Names and suffixes that vLLM and llama.cpp share are kept (`spec_decode_num_…`). Labels are bounded: depths are the
worker's tiers, batch sizes the powers of two up to its limit, positions those of the deepest tier. Reads one
`Telemetry`; keeps nothing.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from worker.durations import EDGES_SECONDS, STAGES, DurationHistogram
from worker.protocol import SpecInfo, StatsBucket, batch_size_bucket
from worker.telemetry import Telemetry

_LE = [*map(floatToGoString, EDGES_SECONDS), "+Inf"]
_EMPTY = DurationHistogram((0,) * len(_LE), 0.0)


def batch_size_buckets(info: SpecInfo) -> list[int]:
    """Return the batch-size buckets that this worker can have: 1, 2, 4, … up to its largest batch."""
    return [1 << i for i in range(batch_size_bucket(info.max_running_requests).bit_length())]


def round_metrics(info: SpecInfo, telemetry: Telemetry) -> Iterator[Metric]:
    """Yield all of them."""
    buckets = telemetry.stats.buckets
    yield from _draft_counters(telemetry)
    yield from _position_counters(buckets, max(1, *info.candidate_steps))
    yield from _round_counters(buckets, info)
    yield from _by_depth(buckets, info)
    yield _durations(info, telemetry)


def _draft_counters(telemetry: Telemetry) -> Iterator[Metric]:
    """Whole-worker sums, under the names that vLLM's dashboards use (without its prefix)."""
    buckets = telemetry.stats.buckets
    drafts = sum(bucket.proposed[0] for bucket in buckets if bucket.proposed)
    proposed = sum(sum(bucket.proposed) for bucket in buckets)
    correct = sum(sum(bucket.correct) for bucket in buckets)
    emitted = sum(bucket.emitted_tokens for bucket in buckets)
    for name, help_text, value in (
        ("spec_decode_num_drafts", "Request-rounds in which a draft was verified", drafts),
        ("spec_decode_num_draft_tokens", "Draft tokens that verify looked at", proposed),
        ("spec_decode_num_accepted_tokens", "Draft tokens accepted and kept", correct),
        ("spec_emitted_tokens", "Tokens that rounds handed out (first tokens not among them)", emitted),
        (
            "spec_eager_rounds",
            "Rounds with a forward that replayed no captured graph; all of them on a CPU",
            telemetry.eager_rounds,
        ),
    ):
        yield CounterMetricFamily(name, help_text, value=value)


def _position_counters(buckets: Sequence[StatsBucket], positions: int) -> Iterator[Metric]:
    for name, help_text, attribute in (
        ("spec_decode_num_accepted_tokens_per_pos", "Drafts accepted and kept, by position from 0", "correct"),
        ("spec_decode_num_draft_tokens_per_pos", "Drafts that verify looked at, by position from 0", "proposed"),
        (
            "spec_decode_reached_per_pos",
            "Request-rounds in which every draft before this position was right and the position was not cut "
            "off: the denominator of per-position acceptance",
            "reached",
        ),
    ):  # fmt: skip
        counts: Counter[int] = Counter()
        for bucket in buckets:
            counts.update(dict(enumerate(getattr(bucket, attribute))))
        family = CounterMetricFamily(name, help_text, labels=("position",))
        for position in range(positions):
            family.add_metric([str(position)], counts[position])
        yield family


def _round_counters(buckets: Sequence[StatsBucket], info: SpecInfo) -> Iterator[Metric]:
    """By depth and batch size; every family has tiers × batch-size buckets series."""
    found = {(bucket.num_steps, bucket.max_batch_size): bucket for bucket in buckets}
    cells = {(tier, size): None for tier in info.candidate_steps for size in batch_size_buckets(info)} | found
    for name, help_text, attribute in (
        ("spec_rounds", "Rounds", "rounds"),
        ("spec_timed_rounds", "Rounds without a prefill in their step: those that are timed", "timed_rounds"),
        ("spec_timed_round_seconds", "Wall seconds of the timed rounds", "round_seconds"),
        ("spec_request_rounds", "Requests in rounds, summed", "request_rounds"),
        ("spec_accept_tokens", "Correct drafts + 1 per request-round, before a stop cuts", "accept_tokens"),
        ("spec_verify_rows", "Rows that the target computed in rounds", "verify_rows"),
    ):
        family = CounterMetricFamily(name, help_text, labels=("num_steps", "batch_size_le"))
        for (num_steps, size), bucket in sorted(cells.items()):
            family.add_metric([str(num_steps), str(size)], getattr(bucket, attribute) if bucket else 0)
        yield family


def _by_depth(buckets: Sequence[StatsBucket], info: SpecInfo) -> Iterator[Metric]:
    wasted: Counter[int] = Counter(dict.fromkeys(info.candidate_steps, 0))
    for bucket in buckets:
        wasted[bucket.num_steps] += sum(bucket.proposed) - sum(bucket.correct)
    family = CounterMetricFamily(
        "spec_wasted_drafts",
        "Drafts that were verified for nothing: rejected, behind a rejected one, or behind the request's end",
        labels=("num_steps",),
    )
    for num_steps, count in sorted(wasted.items()):
        family.add_metric([str(num_steps)], count)
    yield family


def _durations(info: SpecInfo, telemetry: Telemetry) -> Metric:
    family = HistogramMetricFamily(
        "spec_round_seconds",
        "Wall seconds of timed rounds, by stage; `round` is the whole, `catch_up` comes on top of it",
        labels=("stage", "num_steps"),
    )
    for stage in STAGES:
        for num_steps in info.candidate_steps:
            found = telemetry.durations.get((stage, num_steps), _EMPTY)
            buckets = list(zip(_LE, map(float, accumulate(found.counts)), strict=True))
            family.add_metric([stage, str(num_steps)], buckets=buckets, sum_value=found.seconds)
    return family
