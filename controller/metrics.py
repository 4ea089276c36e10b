"""The controller's metrics, on a registry that is handed in.

Ratios belong in PromQL, e.g. refusals: `sum(rate(spec_controller_decisions_total{outcome="held"}[5m])) by (worker)`.
Series of a worker exist while it is configured; `forget` removes them.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from controller.shadow import Wished
from controller.types import MODES, Decision, Depths, Mode

_TICK_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class ControllerMetrics:
    """All series of one controller."""

    def __init__(self, registry: CollectorRegistry) -> None:
        worker = ["worker"]
        self.registry = registry
        self._ticks = Counter(
            "spec_controller_ticks", "Turns of the control loop.", worker, registry=registry
        )
        self._tick_failures = Counter(
            "spec_controller_tick_failures",
            "Turns that ended in an unexpected error.",
            worker,
            registry=registry,
        )
        self._tick_seconds = Histogram(
            "spec_controller_tick_seconds",
            "Length of a turn, requests to the worker included.",
            worker,
            buckets=_TICK_BUCKETS,
            registry=registry,
        )
        self._decisions = Counter(
            "spec_controller_decisions",
            "Recorded decisions and events.",
            ["worker", "policy", "kind", "outcome", "reason"],
            registry=registry,
        )
        self._actuation_failures = Counter(
            "spec_controller_actuation_failures",
            "Plans that the worker did not confirm.",
            ["worker", "reason"],
            registry=registry,
        )
        self._define_state(registry)
        self._define_shadow(registry)
        self._define_journal(registry)

    def _define_state(self, registry: CollectorRegistry) -> None:
        worker = ["worker"]
        self._num_steps = Gauge(
            "spec_controller_desired_num_steps",
            "Depth decided for batches up to batch_size_le (the last slot: and beyond).",
            ["worker", "batch_size_le"],
            registry=registry,
        )
        self._age = Gauge(
            "spec_controller_observation_age_seconds",
            "Age of the newest reading of the worker's statistics; absent before the first.",
            worker,
            registry=registry,
        )
        self._up = Gauge(
            "spec_controller_worker_up", "1 while the worker answers, else 0.", worker, registry=registry
        )
        self._pinned = Gauge(
            "spec_controller_worker_pinned",
            "1 while an operator's pin is in force.",
            worker,
            registry=registry,
        )
        self._mode = Gauge(
            "spec_controller_mode",
            "1 for the worker's mode, 0 for the others.",
            ["worker", "mode"],
            registry=registry,
        )
        self._held = Gauge(
            "spec_controller_worker_held",
            "1 while an operator's rollback holds the policy.",
            worker,
            registry=registry,
        )

    def _define_shadow(self, registry: CollectorRegistry) -> None:
        self._shadow_num_steps = Gauge(
            "spec_controller_shadow_num_steps",
            "Depth that the shadow policy would have for batches up to batch_size_le.",
            ["worker", "batch_size_le"],
            registry=registry,
        )
        self._shadow_gain = Gauge(
            "spec_controller_shadow_gain_ratio",
            "Estimated relative gain of following the shadow policy there; absent while costs are unknown.",
            ["worker", "batch_size_le"],
            registry=registry,
        )
        self._shadowed: set[str] = set()

    def _define_journal(self, registry: CollectorRegistry) -> None:
        self._journal_failures = Counter(
            "spec_controller_journal_failures",
            "Batches that the journal could not write; they are tried again.",
            registry=registry,
        )
        self._journal_dropped = Counter(
            "spec_controller_journal_dropped",
            "Entries given up because the journal could not be written for too long.",
            registry=registry,
        )

    def journal_failed(self) -> None:
        """Count a batch that could not be written."""
        self._journal_failures.inc()

    def journal_dropped(self, count: int) -> None:
        """Count entries that were given up."""
        self._journal_dropped.inc(count)

    def shadow(self, worker: str, wished: Iterable[Wished]) -> None:
        """Set what a worker's shadow policy would have; nothing wished: no shadow looks on just now."""
        wished = list(wished)
        if not wished and worker in self._shadowed:
            self._shadowed.discard(worker)
            for gauge in (self._shadow_num_steps, self._shadow_gain):
                gauge.remove_by_labels({"worker": worker})
        for wish in wished:
            self._shadowed.add(worker)
            self._shadow_num_steps.labels(worker, str(wish.slot)).set(wish.num_steps)
            if wish.gain is None:
                self._shadow_gain.remove_by_labels({"worker": worker, "batch_size_le": str(wish.slot)})
            else:
                self._shadow_gain.labels(worker, str(wish.slot)).set(wish.gain)

    def ticked(self, worker: str, seconds: float) -> None:
        """Count one turn."""
        self._ticks.labels(worker).inc()
        self._tick_seconds.labels(worker).observe(seconds)

    def tick_failed(self, worker: str) -> None:
        """Count a turn that raised."""
        self._tick_failures.labels(worker).inc()

    def decided(self, decision: Decision) -> None:
        """Count a recorded decision."""
        self._decisions.labels(
            decision.worker, decision.policy, decision.kind, decision.outcome, decision.reason
        ).inc()

    def actuation_failed(self, worker: str, reason: str) -> None:
        """Count a plan that was not confirmed; `reason` is a `WorkerError.reason`."""
        self._actuation_failures.labels(worker, reason).inc()

    def state(
        self,
        worker: str,
        *,
        is_up: bool,
        is_pinned: bool,
        is_held: bool = False,
        mode: Mode,
        age_seconds: float | None,
        depths: Depths,
    ) -> None:
        """Set the gauges of a worker."""
        self._up.labels(worker).set(is_up)
        self._pinned.labels(worker).set(is_pinned)
        self._held.labels(worker).set(is_held)
        for name in MODES:
            self._mode.labels(worker, name).set(name == mode)
        if age_seconds is not None:
            self._age.labels(worker).set(age_seconds)
        for edge, num_steps in depths.items():
            self._num_steps.labels(worker, str(edge)).set(num_steps)

    def forget(self, worker: str) -> None:
        """Remove all series of a worker."""
        for metric in (
            self._ticks,
            self._tick_failures,
            self._tick_seconds,
            self._decisions,
            self._num_steps,
            self._age,
            self._actuation_failures,
            self._up,
            self._pinned,
            self._mode,
            self._held,
            self._shadow_num_steps,
            self._shadow_gain,
        ):
            metric.remove_by_labels({"worker": worker})
