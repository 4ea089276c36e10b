"""The controller's metrics, on a registry that is handed in; docs/metrics.md lists them with their PromQL.

Ratios belong in PromQL, e.g. refusals: `sum(rate(spec_controller_decisions_total{outcome="held"}[5m])) by (worker)`.
Counters of a worker exist while it is configured, what tells its present state while it answers; `forget` removes all.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from controller.shadow import Wished
from controller.types import MODES, Decision, Depths, Mode

_TICK_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_OF_WORKER = ("worker",)
_OF_SLOT = ("worker", "batch_size_le")


class ControllerMetrics:
    """All series of one controller."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._define_turns(registry)
        self._define_decisions(registry)
        self._define_state(registry)
        self._define_shadow(registry)
        self._define_journal(registry)

    def _define_turns(self, registry: CollectorRegistry) -> None:
        self._ticks = Counter(
            "spec_controller_ticks", "Turns of the control loop.", _OF_WORKER, registry=registry
        )
        self._tick_failures = Counter(
            "spec_controller_tick_failures",
            "Turns that ended in an unexpected error.",
            _OF_WORKER,
            registry=registry,
        )
        self._tick_seconds = Histogram(
            "spec_controller_tick_seconds",
            "Length of a turn, requests to the worker included.",
            _OF_WORKER,
            buckets=_TICK_BUCKETS,
            registry=registry,
        )
        self._actuation_failures = Counter(
            "spec_controller_actuation_failures",
            "Plans that the worker did not confirm.",
            ["worker", "reason"],
            registry=registry,
        )

    def _define_decisions(self, registry: CollectorRegistry) -> None:
        self._decisions = Counter(
            "spec_controller_decisions",
            "Recorded decisions and events.",
            ["worker", "policy", "kind", "outcome", "reason"],
            registry=registry,
        )
        self._changes = Counter(
            "spec_controller_depth_changes",
            "Changes of a slot's depth that were decided and sent, by reason and direction.",
            ["worker", "reason", "direction"],
            registry=registry,
        )
        self._latest = Gauge(
            "spec_controller_last_decision_timestamp_seconds",
            "Unix time of the newest record of this sort; for annotations.",
            ["worker", "kind", "outcome", "reason"],
            registry=registry,
        )

    def _define_state(self, registry: CollectorRegistry) -> None:
        self._num_steps = Gauge(
            "spec_controller_desired_num_steps",
            "Depth decided for batches up to batch_size_le (the last slot: and beyond); absent while the worker is "
            "unreachable.",
            _OF_SLOT,
            registry=registry,
        )
        self._edges: dict[str, set[int]] = {}
        self._mode = Gauge(
            "spec_controller_mode",
            "1 for the worker's mode, 0 for the others.",
            ["worker", "mode"],
            registry=registry,
        )
        self._age, self._up, self._pinned, self._held, self._breaker, self._gain = (
            Gauge(name, help_text, _OF_WORKER, registry=registry)
            for name, help_text in (
                (
                    "spec_controller_observation_age_seconds",
                    "Age of the newest reading of the worker's statistics; absent before the first.",
                ),
                ("spec_controller_worker_up", "1 while the worker answers, else 0."),
                ("spec_controller_worker_pinned", "1 while an operator's pin is in force."),
                ("spec_controller_worker_held", "1 while an operator's rollback holds the policy."),
                (
                    "spec_controller_breaker_open",
                    "1 while the worker is kept at its own depth because forecasts were wrong again and again.",
                ),
                (
                    "spec_controller_gain_over_plain_ratio",
                    "Estimated gain in tokens/s of the depths in force over plain decoding (-0.1: 10 % slower), on the "
                    "batch sizes of late; absent while costs are unknown.",
                ),
            )
        )

    def _define_shadow(self, registry: CollectorRegistry) -> None:
        self._shadow_num_steps = Gauge(
            "spec_controller_shadow_num_steps",
            "Depth that the shadow policy would have for batches up to batch_size_le.",
            _OF_SLOT,
            registry=registry,
        )
        self._shadow_gain = Gauge(
            "spec_controller_shadow_gain_ratio",
            "Estimated relative gain of following the shadow policy there; absent while costs are unknown.",
            _OF_SLOT,
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
        self._journal_bytes = Gauge(
            "spec_controller_journal_bytes",
            "Size of the journal, its write-ahead log included.",
            registry=registry,
        )
        self._journal_waiting = Gauge(
            "spec_controller_journal_waiting_entries",
            "Entries in memory that a failed write left behind.",
            registry=registry,
        )

    # ---- the journal's counts ----

    def journal_failed(self) -> None:
        """Count a batch that could not be written."""
        self._journal_failures.inc()

    def journal_dropped(self, count: int) -> None:
        """Count entries that were given up."""
        self._journal_dropped.inc(count)

    def journal_state(self, *, size_bytes: int, waiting: int) -> None:
        """Set what the journal takes on disk, and how many entries wait after the newest attempt to write."""
        self._journal_bytes.set(size_bytes)
        self._journal_waiting.set(waiting)

    # ---- the loop's ----

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

    def decided(self, decision: Decision, wall_seconds: float) -> None:
        """Count a recorded decision, made at `wall_seconds` (Unix time)."""
        worker, kind, outcome, reason = decision.worker, decision.kind, decision.outcome, decision.reason
        self._decisions.labels(worker, decision.policy, kind, outcome, reason).inc()
        self._latest.labels(worker, kind, outcome, reason).set(wall_seconds)
        before, after = decision.num_steps_before, decision.num_steps
        if (
            kind == "depth"
            and outcome in ("applied", "unconfirmed")
            and before is not None
            and after is not None
        ):
            self._changes.labels(worker, reason, "up" if after > before else "down").inc()

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
        is_breaker_open: bool = False,
        mode: Mode,
        age_seconds: float | None,
        depths: Depths,
    ) -> None:
        """Set the gauges of a worker. Depths of slots that are not among `depths` are known no more."""
        self._up.labels(worker).set(is_up)
        self._pinned.labels(worker).set(is_pinned)
        self._held.labels(worker).set(is_held)
        self._breaker.labels(worker).set(is_breaker_open)
        for name in MODES:
            self._mode.labels(worker, name).set(name == mode)
        if age_seconds is not None:
            self._age.labels(worker).set(age_seconds)
        for edge in self._edges.get(worker, set()) - set(depths):
            self._num_steps.remove(worker, str(edge))
        self._edges[worker] = set(depths)
        for edge, num_steps in depths.items():
            self._num_steps.labels(worker, str(edge)).set(num_steps)

    def gain(self, worker: str, ratio: float | None) -> None:
        """Set what the depths in force bring over plain decoding; None: not known."""
        if ratio is None:
            self._gain.remove_by_labels({"worker": worker})
        else:
            self._gain.labels(worker).set(ratio)

    def forget(self, worker: str) -> None:
        """Remove all series of a worker."""
        for metric in (
            self._ticks,
            self._tick_failures,
            self._tick_seconds,
            self._decisions,
            self._changes,
            self._latest,
            self._num_steps,
            self._age,
            self._actuation_failures,
            self._up,
            self._pinned,
            self._mode,
            self._held,
            self._breaker,
            self._gain,
            self._shadow_num_steps,
            self._shadow_gain,
        ):
            metric.remove_by_labels({"worker": worker})
        self._edges.pop(worker, None)
        self._shadowed.discard(worker)
