"""The thread that owns the engine, and the door to it: submit, abort, plans, statistics, health, shutdown.

Everything here may be called from any thread; nothing here touches tensors. Knows nothing about HTTP.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from worker.engine import Engine
from worker.protocol import PlanStatus, QueueStats, SpecInfo, SpecPlan, SpecStats
from worker.request import EngineStopped, Request, TokenChunk
from worker.scheduler import Scheduler
from worker.spec.plan import PlanTable
from worker.spec.stats import StatsRecorder
from worker.telemetry import Telemetry

logger = logging.getLogger(__name__)

IDLE_WAIT_SECONDS = 0.2
"""An idle loop still ticks this often, so that a hang can be told from idleness."""


class Health(NamedTuple):
    """Whether the engine thread lives, and whether it answers."""

    alive: bool
    ready: bool
    detail: str


class EngineThread:
    """Runs `Engine.step` while there is work, sleeps while there is none."""

    def __init__(
        self,
        engine: Engine,
        *,
        scheduler: Scheduler,
        plans: PlanTable,
        recorder: StatsRecorder,
        max_kv_tokens: int,
        hang_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._scheduler = scheduler
        self._plans = plans
        self._recorder = recorder
        self._max_kv_tokens = max_kv_tokens
        self._hang_seconds = hang_seconds
        self._clock = clock
        self._started = self._last_tick = clock()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._stop_at = float("inf")
        self._died: str | None = None
        self._slow_path_rounds_before = self._slow_path_rounds()
        """Of the self-check and the profile."""
        self._eager_rounds_before = engine.eager_rounds
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def info(self) -> SpecInfo:
        """What this worker is; constant."""
        return self.engine.info

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFull, PromptTooLong: see `Scheduler.submit`.
            EngineStopped: draining, or the engine thread is gone.
        """
        request.arrival_seconds = self._clock()
        with self._wake:  # also held while stopping begins: no request slips in behind the last step
            if self._is_stopping or self._died:
                raise EngineStopped(
                    "the worker is shutting down" if self._is_stopping else "the engine has stopped"
                )
            self._scheduler.submit(request)
            self._wake.notify_all()

    def abort(self, request_id: str) -> bool:
        """End a request by its exact id before the next round; False if there is none."""
        for request in self._scheduler.requests():
            if request.id == request_id:
                request.aborted.set()
                with self._wake:
                    self._wake.notify_all()
                return True
        return False

    def put_plan(self, plan: SpecPlan) -> PlanStatus:
        """Take or renew a plan; it holds from the next round on. Raises PlanConflict, UnknownTier."""
        held = self._plans.status(self._clock()).plan
        status = self._plans.put(plan, self._clock())
        if held is None or (held.controller_epoch, held.version) != (plan.controller_epoch, plan.version):
            table = ", ".join(f"≤{entry.max_batch_size}: {entry.num_steps}" for entry in plan.entries)
            pin = f", pin {plan.pin.num_steps}" if plan.pin else ""
            logger.info(
                "plan %d.%d: {%s}%s (%s)", plan.controller_epoch, plan.version, table, pin, plan.reason
            )
        return status

    def plan_status(self) -> PlanStatus:
        """Return what is followed right now."""
        return self._plans.status(self._clock())

    def stats(self) -> SpecStats:
        """Return all counters."""
        now = self._clock()
        return SpecStats(
            boot_id=self.info.boot_id,
            uptime_seconds=max(0.0, now - self._started),
            plan=self._plans.status(now),
            queue=QueueStats(
                running=self._scheduler.num_running,
                waiting=self._scheduler.num_waiting,
                kv_tokens_free=max(0, self._max_kv_tokens - self._scheduler.kv_tokens_used()),
                kv_tokens_total=self._max_kv_tokens,
            ),
            **self._recorder.snapshot()._asdict(),
        )

    def telemetry(self) -> Telemetry:
        """Return all counters, and what only metrics show."""
        stats = self.stats()
        return Telemetry(
            stats=stats,
            durations=self._recorder.durations(),
            depth=self._plans.counts(),
            slow_path_rounds=max(0, self._slow_path_rounds() - self._slow_path_rounds_before),
            eager_rounds=self.engine.eager_rounds - self._eager_rounds_before,
        )

    def health(self) -> Health:
        """Tell whether the loop ticks; a step that takes longer than `hang_seconds` counts as hung."""
        if self._died:
            return Health(False, False, self._died)
        if not self._thread.is_alive():
            return Health(False, False, "the engine thread is not running")
        silent_seconds = self._clock() - self._last_tick
        if silent_seconds > self._hang_seconds:
            return Health(True, False, f"the engine loop has not ticked for {silent_seconds:.1f} s")
        if self._is_stopping:
            return Health(True, False, "the worker is shutting down")
        return Health(True, True, "ok")

    def run_until_idle(self) -> None:
        """Step in the caller's thread until nothing is left to do: for use instead of `start`."""
        while self._scheduler.has_work():
            self.engine.step()

    def shutdown(self, grace_seconds: float) -> None:
        """Refuse new requests, let running ones finish for `grace_seconds`, end the rest, join the thread."""
        with self._wake:
            self._stop_at = self._clock() + grace_seconds
            self._is_stopping = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _slow_path_rounds(self) -> int:
        # Only drafters that organise drafts have a slow path.
        return int(getattr(self.engine.drafter, "slow_path_rounds", 0))

    def _run(self) -> None:
        try:
            while not (self._is_stopping and not self._scheduler.has_work()):
                self._last_tick = self._clock()
                if self._clock() >= self._stop_at:
                    self._abort_all()
                self.engine.step()
                self._wait_for_work()
        except Exception as error:  # a bug: say so in health, and let no client wait for ever
            logger.exception("the engine loop died")
            with self._wake:
                self._died = f"the engine loop died: {error}"
            for request in self._scheduler.requests():
                try:
                    self.engine.fail([request], self._died)
                except Exception:
                    logger.exception("request %s could not be ended in order", request.id)
                    request.sink(TokenChunk((), "error", error=self._died))

    def _abort_all(self) -> None:
        for request in self._scheduler.requests():
            request.aborted.set()

    def _wait_for_work(self) -> None:
        with self._wake:
            if not self._scheduler.has_work() and not self._is_stopping:
                self._wake.wait(IDLE_WAIT_SECONDS)
