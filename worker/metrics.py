"""Prometheus metrics of a worker; docs/metrics.md lists them with their PromQL.

`SpecCollector` turns one reading of the engine into metrics at the moment of the scrape: nothing is kept here, so
nothing goes stale and all numbers of a scrape fit together. `ServerMetrics` are the latencies that only the server
sees. Raw counters only, ratios are PromQL; every series there can be is there from the first scrape (with 0), so a
rate never misses its first event and an idle worker shows zeros, not gaps.
"""

from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.api.served import ServedModel
from worker.protocol import PlanSource, PlanStatus, SpecInfo, SpecStats
from worker.request import FinishReason
from worker.round_metrics import batch_size_buckets, round_metrics
from worker.spec.plan import find_entry
from worker.telemetry import Telemetry

FIRST_TOKEN_EDGES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
INTER_TOKEN_EDGES = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10,
)  # fmt: skip
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
        self.inter_token = Histogram(
            "spec_inter_token_seconds",
            "Time per token after a request's first: one observation for each token; those that came out of one "
            "round share its time evenly",
            buckets=INTER_TOKEN_EDGES,
            registry=registry,
        )
        self.request_duration = Histogram(
            "spec_request_duration_seconds",
            "From a request's arrival to its last token; requests that the client gave up are not counted",
            buckets=DURATION_EDGES,
            registry=registry,
        )


MAX_ROUND_TOKENS = 65
"""The deepest tier that the protocol allows, and the bonus token."""


class TokenTimes:
    """Times the tokens of one request as they reach the server."""

    def __init__(self, metrics: ServerMetrics, started_seconds: float) -> None:
        """Begin at the request's arrival (monotonic seconds, as in `arrived`)."""
        self._metrics = metrics
        self._started = started_seconds
        self._last: float | None = None

    def arrived(self, count: int, now: float) -> None:
        """Take `count` tokens in; the first ever is the time to first token, each later one is an interval."""
        if count < 1:
            return
        if self._last is None:
            self._metrics.time_to_first_token.observe(max(0.0, now - self._started))
            self._last = now
            count -= 1
        # The event loop does this: bounded, by what a round can yield at most.
        for _ in range(min(count, MAX_ROUND_TOKENS)):
            self._metrics.inter_token.observe(max(0.0, now - self._last) / count)
        self._last = now


class SpecCollector(Collector):
    """Reads the engine once per scrape. Yields nothing while the model loads."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def describe(self) -> Iterable[Metric]:
        """Say nothing: registering must not ask an engine that is not there."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric from one reading."""
        if not self._model.is_attached:
            return
        info, telemetry = self._model.engine.info, self._model.engine.telemetry()
        yield _info(info)
        yield from round_metrics(info, telemetry)
        yield from _request_counters(telemetry.stats)
        yield from _depth_counters(telemetry)
        yield from _gauges(telemetry.stats)
        yield from _plan_gauges(telemetry.stats.plan, info)


def _info(info: SpecInfo) -> Metric:
    names = ("model", "drafter", "device", "dtype", "version")
    family = GaugeMetricFamily("spec_worker_info", "1; what this worker is, in its labels", labels=names)
    family.add_metric([getattr(info, name) for name in names], 1)
    return family


def _request_counters(stats: SpecStats) -> Iterator[Metric]:
    for name, help_text, value in (
        ("spec_generated_tokens", "Tokens handed out", stats.generated_tokens),
        ("spec_first_tokens", "Tokens drawn straight after a prefill", stats.first_tokens),
        ("spec_prompt_tokens", "Prompt tokens of requests that got a first token", stats.prompt_tokens),
    ):
        yield CounterMetricFamily(name, help_text, value=value)
    finished = CounterMetricFamily("spec_requests_finished", "Requests ended, by reason", labels=("reason",))
    for reason in get_args(FinishReason):
        finished.add_metric([reason], stats.requests_finished.get(reason, 0))
    yield finished


def _depth_counters(telemetry: Telemetry) -> Iterator[Metric]:
    changes = CounterMetricFamily(
        "spec_depth_changes",
        "Rounds asked for another depth than the round before, by what decided it",
        labels=("reason",),
    )
    for reason, count in telemetry.depth.changes.items():
        changes.add_metric([reason], count)
    yield changes
    for name, help_text, value in (
        ("spec_probes", "Probes begun: a few rounds at another depth to measure it", telemetry.depth.probes),
        ("spec_probe_rounds", "Rounds spent on probes", telemetry.depth.probe_rounds),
        (
            "spec_draft_failures",
            "Rounds at depth 0 because the drafter failed",
            telemetry.stats.draft_failures,
        ),
        (
            "spec_slow_path_rounds",
            "Rounds whose drafts were organised the long way, off the topk=1 fast path",
            telemetry.slow_path_rounds,
        ),
    ):
        yield CounterMetricFamily(name, help_text, value=value)


def _gauges(stats: SpecStats) -> Iterator[Metric]:
    queue = stats.queue
    for name, help_text, value in (
        ("spec_requests_running", "Requests that hold a slot", queue.running),
        ("spec_requests_waiting", "Requests in the queue", queue.waiting),
        ("spec_kv_tokens_free", "Free room in the KV cache, in tokens", queue.kv_tokens_free),
        ("spec_kv_tokens_capacity", "Room in the KV cache, in tokens", queue.kv_tokens_total),
        ("spec_num_steps", "Depth of the latest round", stats.plan.num_steps),
        ("spec_uptime_seconds", "Seconds since the engine started", stats.uptime_seconds),
    ):
        yield GaugeMetricFamily(name, help_text, value=value)


def _plan_gauges(plan: PlanStatus, info: SpecInfo) -> Iterator[Metric]:
    for name, help_text, value in (
        ("spec_plan_age_seconds", "Since a plan was received or renewed; absent before", plan.age_seconds),
        ("spec_plan_remaining_seconds", "Until the plan lapses; 0: none holds", plan.remaining_seconds),
        ("spec_pin_remaining_seconds", "Until the pin lapses; 0: none holds", plan.pin_remaining_seconds),
    ):
        if value is not None:
            yield GaugeMetricFamily(name, help_text, value=value)
    source = GaugeMetricFamily("spec_plan_source", "1 for what decides the depth now", labels=("source",))
    for name in get_args(PlanSource):
        source.add_metric([name], float(name == plan.source))
    yield source
    in_force = GaugeMetricFamily(
        "spec_num_steps_in_force", "Depth for batches up to batch_size_le", labels=("batch_size_le",)
    )
    for bucket in batch_size_buckets(info):
        in_force.add_metric([str(bucket)], _depth_in_force(plan, bucket))
    yield in_force


def _depth_in_force(status: PlanStatus, batch_size: int) -> int:
    """Return what a batch of this size runs at (a probe in flight and the dead band aside)."""
    plan = status.plan
    if plan is not None and plan.pin is not None and status.pin_remaining_seconds > 0:
        return plan.pin.num_steps
    if plan is None or status.remaining_seconds <= 0:
        return status.fallback_num_steps
    return plan.entries[find_entry(plan.entries, batch_size)].num_steps
