"""Prometheus metrics of a worker.

`SpecCollector` turns one snapshot of the engine's counters into metrics at the moment of the scrape: nothing is
kept here, so nothing goes stale and all numbers of a scrape fit together. `ServerMetrics` are the latencies that
only the server sees. Raw counters only; ratios are PromQL:

    acceptance of draft i, given the drafts before it (position counts from 0):
        rate(spec_decode_num_accepted_tokens_per_pos_total[1m]) / rate(spec_decode_reached_per_pos_total[1m])
    accept_length (tokens per request-round, the target's own included):
        sum(rate(spec_accept_tokens_total[1m])) / sum(rate(spec_request_rounds_total[1m]))
    seconds per round, by depth:
        sum by (num_steps) (rate(spec_round_seconds_total{stage="round"}[1m]))
          / sum by (num_steps) (rate(spec_timed_rounds_total[1m]))
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.api.served import ServedModel
from worker.protocol import PlanSource, SpecStats, StatsBucket
from worker.request import FinishReason

STAGES = ("draft", "verify", "round", "catch_up")
FIRST_TOKEN_EDGES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DURATION_EDGES = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """Latencies as a client of this server sees them, queueing included."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.time_to_first_token = Histogram(
            "spec_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=FIRST_TOKEN_EDGES,
            registry=registry,
        )
        self.request_duration = Histogram(
            "spec_request_duration_seconds",
            "From a request's arrival to its last token; requests that the client gave up are not counted",
            buckets=DURATION_EDGES,
            registry=registry,
        )


class SpecCollector(Collector):
    """Reads the engine's statistics once per scrape. Yields nothing while the model loads."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def describe(self) -> Iterable[Metric]:
        """Say nothing: registering must not ask an engine that is not there."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric from one snapshot."""
        if not self._model.is_attached:
            return
        stats = self._model.engine.stats()
        yield from _draft_counters(stats.buckets)
        yield from _position_counters(stats.buckets)
        yield from _round_counters(stats.buckets)
        yield from _request_counters(stats)
        yield from _gauges(stats)


def _counter(name: str, help_text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, help_text, value=value)


def _draft_counters(buckets: list[StatsBucket]) -> Iterator[Metric]:
    """Whole-worker sums, under the names that vLLM's dashboards use (without its prefix)."""
    drafts = sum(bucket.proposed[0] for bucket in buckets if bucket.proposed)
    yield _counter("spec_decode_num_drafts", "Request-rounds in which a draft was verified", drafts)
    proposed = sum(sum(bucket.proposed) for bucket in buckets)
    yield _counter("spec_decode_num_draft_tokens", "Draft tokens that verify looked at", proposed)
    correct = sum(sum(bucket.correct) for bucket in buckets)
    yield _counter("spec_decode_num_accepted_tokens", "Draft tokens accepted and kept", correct)


def _position_counters(buckets: list[StatsBucket]) -> Iterator[Metric]:
    correct: Counter[int] = Counter()
    reached: Counter[int] = Counter()
    for bucket in buckets:
        correct.update(dict(enumerate(bucket.correct)))
        reached.update(dict(enumerate(bucket.reached)))
    for name, help_text, counts in (
        ("spec_decode_num_accepted_tokens_per_pos", "Drafts accepted and kept, by position from 0", correct),
        (
            "spec_decode_reached_per_pos",
            "Request-rounds in which every draft before this position was right and the position was not cut "
            "off: the denominator of per-position acceptance",
            reached,
        ),
    ):
        family = CounterMetricFamily(name, help_text, labels=("position",))
        for position in sorted(reached):
            family.add_metric([str(position)], counts[position])
        yield family


def _round_counters(buckets: list[StatsBucket]) -> Iterator[Metric]:
    """Rounds by what they executed; every family has at most tiers × batch-size buckets series."""
    for name, help_text, attribute in (
        ("spec_rounds", "Rounds", "rounds"),
        (
            "spec_timed_rounds",
            "Rounds behind spec_round_seconds_total (no prefill in the step)",
            "timed_rounds",
        ),
        ("spec_request_rounds", "Requests in rounds, summed", "request_rounds"),
        ("spec_accept_tokens", "Correct drafts + 1 per request-round, before a stop cuts", "accept_tokens"),
        ("spec_verify_rows", "Rows that the target computed in rounds", "verify_rows"),
    ):
        family = CounterMetricFamily(name, help_text, labels=("num_steps", "batch_size_le"))
        for bucket in buckets:
            labels = [str(bucket.num_steps), str(bucket.max_batch_size)]
            family.add_metric(labels, getattr(bucket, attribute))
        yield family
    emitted = sum(bucket.emitted_tokens for bucket in buckets)
    yield _counter(
        "spec_emitted_tokens", "Tokens that rounds handed out (first tokens not among them)", emitted
    )
    seconds: Counter[tuple[str, int]] = Counter()
    for bucket in buckets:
        for stage in STAGES:
            seconds[stage, bucket.num_steps] += getattr(bucket, f"{stage}_seconds")
    family = CounterMetricFamily(
        "spec_round_seconds",
        "Wall seconds of rounds without a prefill, by stage; `round` is the whole",
        labels=("stage", "num_steps"),
    )
    for (stage, num_steps), value in sorted(seconds.items()):
        family.add_metric([stage, str(num_steps)], value)
    yield family


def _request_counters(stats: SpecStats) -> Iterator[Metric]:
    yield _counter("spec_generated_tokens", "Tokens handed out", stats.generated_tokens)
    yield _counter("spec_first_tokens", "Tokens drawn straight after a prefill", stats.first_tokens)
    yield _counter(
        "spec_prompt_tokens", "Prompt tokens of requests that got a first token", stats.prompt_tokens
    )
    yield _counter(
        "spec_draft_failures", "Rounds at depth 0 because the drafter failed", stats.draft_failures
    )
    finished = CounterMetricFamily("spec_requests_finished", "Requests ended, by reason", labels=("reason",))
    for reason in get_args(FinishReason):
        finished.add_metric([reason], stats.requests_finished.get(reason, 0))
    yield finished


def _gauges(stats: SpecStats) -> Iterator[Metric]:
    queue, plan = stats.queue, stats.plan
    for name, help_text, value in (
        ("spec_requests_running", "Requests that hold a slot", queue.running),
        ("spec_requests_waiting", "Requests in the queue", queue.waiting),
        ("spec_kv_tokens_free", "Free room in the KV cache, in tokens", queue.kv_tokens_free),
        ("spec_kv_tokens_total", "Room in the KV cache, in tokens", queue.kv_tokens_total),
        ("spec_num_steps", "Depth of the latest round", plan.num_steps),
        ("spec_uptime_seconds", "Seconds since the engine started", stats.uptime_seconds),
    ):
        yield GaugeMetricFamily(name, help_text, value=value)
    if plan.age_seconds is not None:
        yield GaugeMetricFamily(
            "spec_plan_age_seconds", "Since the plan was received or renewed", value=plan.age_seconds
        )
    source = GaugeMetricFamily("spec_plan_source", "1 for what decides the depth now", labels=("source",))
    for name in get_args(PlanSource):
        source.add_metric([name], float(name == plan.source))
    yield source
