"""Start here: the control loop. `ControlLoop.tick` is one turn for one worker.

Every worker has a loop of its own, so a slow or dead one delays nobody. The loop never dies: what a turn raises
is logged, counted and followed by a pause. It decides nothing itself (see `policies` and `guards`) and is never
on a request's path: when it stops, plans lapse and workers go back to their own depth.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence

from controller.actuate import BootChanged
from controller.clock import Clock
from controller.config import ControllerConfig
from controller.controlled import ControlledWorker
from controller.life import Life
from controller.metrics import ControllerMetrics
from controller.record import Recorder
from controller.types import Estimate, Kind, Mode, Observation, Outcome, Proposal, Verdict
from controller.worker_client import BadAnswer, Unreachable, WorkerClient, WorkerError
from worker.protocol import SpecStats

logger = logging.getLogger("controller.loop")


class ControlLoop:
    """Steers all configured workers."""

    def __init__(
        self,
        config: ControllerConfig,
        clients: Mapping[str, WorkerClient],
        *,
        clock: Clock,
        metrics: ControllerMetrics,
        recorder: Recorder,
        epoch: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        """Take everything as given.

        Args:
            config: the resolved configuration.
            clients: one per configured worker id.
            clock: times every decision.
            metrics: where turns are counted.
            recorder: where decisions go.
            epoch: the `controller_epoch` of this start; must be above those of earlier starts.
            sleep: waits between turns.
            rng: jitter of the pauses after failures (never of decisions).
        """
        rng = rng or random.Random()
        self.config = config
        self.clock = clock
        self.recorder = recorder
        self.mode: Mode = config.policy.mode
        self.workers = {
            worker.id: ControlledWorker(worker.id, worker.url, clients[worker.id], mode=self.mode, rng=rng)
            for worker in config.workers
        }
        self._metrics = metrics
        self._epoch = epoch
        self._sleep = sleep
        self._started: float | None = None

    async def tick(self, worker: ControlledWorker) -> None:
        """One turn for one worker: observe ▶ estimate ▶ decide ▶ guard ▶ actuate ▶ journal."""
        async with worker.lock:
            observation = await self.observe(worker)
            verdicts: list[Verdict] = []
            if observation is not None and worker.life is not None:
                estimate = worker.life.estimator.estimate(observation)
                proposals = self._decide(worker, estimate)
                verdicts = self._guard(worker, proposals)
            outcome = await self._actuate(worker, verdicts)
            self.recorder.verdicts(worker, self.mode_of(worker), verdicts, outcome)

    async def run(self) -> None:
        """Drive all workers until cancelled."""
        self._started = self.clock.monotonic()
        async with asyncio.TaskGroup() as group:
            for worker in self.workers.values():
                group.create_task(self._drive(worker), name=f"control {worker.id}")

    def mode_of(self, worker: ControlledWorker) -> Mode:
        """Return the mode in force for a worker: its own, else the controller's."""
        return worker.mode_override or self.mode

    def late(self) -> list[str]:
        """Return the workers whose turn is overdue; all of them while the loop does not run."""
        if self._started is None:
            return sorted(self.workers)
        limit = self.clock.monotonic() - self.config.loop.late_after_seconds
        return sorted(w.id for w in self.workers.values() if (w.turn_seconds or self._started) < limit)

    @property
    def is_running(self) -> bool:
        """Whether `run` has begun."""
        return self._started is not None

    # ---- the stages ----

    async def observe(self, worker: ControlledWorker, *, at_once: bool = False) -> Observation | None:
        """Read a worker's statistics; None without a fresh reading. Meets a new or returned worker."""
        now = self.clock.monotonic()
        self._expire_pin(worker, now)
        if not (at_once or worker.may_try(now)):
            self._check_age(worker, now)
            return None
        was_reachable, age = worker.is_reachable, worker.age_seconds(now)
        try:
            stats = await worker.client.stats()
            now = self.clock.monotonic()
            is_known = worker.life is not None and worker.life.info.boot_id == stats.boot_id
            is_known = is_known and (age is None or age <= self.config.loop.default_after_seconds)
            if not is_known:
                await self._meet(worker, stats, now)
        except WorkerError as error:
            self._lost(worker, error, was_reachable)
            return None
        worker.succeeded(stats, now)
        assert worker.life is not None
        if self.mode_of(worker) in ("advisory", "released"):
            worker.life.follow(stats.plan)
        observation = worker.life.observer.observe(stats, now)
        worker.life.recent.add(observation)
        if is_known and not was_reachable:
            self._event(worker, "worker", "reachable", "the worker answers again")
        return observation

    def _decide(self, worker: ControlledWorker, estimate: Estimate) -> list[Proposal]:
        assert worker.life is not None
        if self.mode_of(worker) not in ("active", "advisory") or worker.pin is not None:
            return []
        return worker.life.decide(estimate) if worker.life.info.adaptation else []

    def _guard(self, worker: ControlledWorker, proposals: Sequence[Proposal]) -> list[Verdict]:
        assert worker.life is not None
        now = self.clock.monotonic()
        verdicts = worker.life.guard(proposals, now=now, age_seconds=worker.age_seconds(now) or 0.0)
        if self.mode_of(worker) == "active":
            worker.life.accept(verdicts, now)
        return verdicts

    async def _actuate(self, worker: ControlledWorker, verdicts: Sequence[Verdict]) -> Outcome:
        reason = ", ".join(v.proposal.reason for v in verdicts if v.is_allowed)
        try:
            return "applied" if await self.send(worker, reason) else "unconfirmed"
        except (WorkerError, BootChanged):
            return "unconfirmed"

    async def send(self, worker: ControlledWorker, reason: str = "", *, at_once: bool = False) -> bool:
        """Send the wished plan if one is due; return whether the worker holds it.

        Args:
            worker: whose plan.
            reason: goes into a new plan, for people who look at the worker.
            at_once: try even if the worker did not answer a moment ago.

        Raises:
            WorkerError, BootChanged: not confirmed. Counted here; it is sent again with the next turn.
        """
        now = self.clock.monotonic()
        wish, life = worker.wish(self.mode_of(worker), self.config.policy.dead_band), worker.life
        age = worker.age_seconds(now)
        is_lapsing = age is None or age > self.config.loop.default_after_seconds
        if life is None:
            return False
        if wish is None or (is_lapsing and not at_once):
            life.actuator.forget()
            return False
        if not life.actuator.is_due(wish, now):
            return True
        if worker.is_silent and not at_once:
            return False
        try:
            status = await life.actuator.actuate(wish, reason or ("pin" if worker.pin else "adopted"), now)
        except (WorkerError, BootChanged) as error:
            self._not_sent(worker, error)
            raise
        worker.refusal = None
        worker.confirm(status, self.clock.monotonic())
        return True

    # ---- comings and goings ----

    async def _meet(self, worker: ControlledWorker, stats: SpecStats, now: float) -> None:
        """Begin a life: read what the worker is, adopt the depths that it follows, and its pin."""
        info = await worker.client.info()
        if info.boot_id != stats.boot_id:
            raise BadAnswer(f"the worker restarted between two answers ({stats.boot_id}, {info.boot_id})")
        before, worker.met_boot_id = worker.met_boot_id, info.boot_id
        worker.life = Life(
            worker.id, worker.client, self.config, epoch=self._epoch, info=info, status=stats.plan, now=now
        )
        worker.noted.clear()
        what = "met" if before is None else "returned" if before == info.boot_id else "restarted"
        table = ", ".join(f"batch<={edge}: {depth}" for edge, depth in worker.life.depths.items())
        message = f"{info.model} on {info.device}, tiers {info.candidate_steps}, adopted {table}"
        self._event(worker, "worker", what, message)
        if not info.adaptation:
            self._event(worker, "worker", "adaptation_off", info.adaptation_off_reason or "no reason given")
        if before != info.boot_id and worker.adopt_pin(stats.plan, now):
            self._event(worker, "pin", "adopted", "a pin of an earlier controller still runs")
        if worker.pin is not None and worker.pin.num_steps not in info.candidate_steps:
            self._event(
                worker, "pin", "no_tier", f"{worker.pin.num_steps} is not among {info.candidate_steps}"
            )
            worker.pin = None

    def _lost(self, worker: ControlledWorker, error: WorkerError, was_reachable: bool) -> None:
        now = self.clock.monotonic()
        is_first = worker.last_error is None
        worker.failed(error, now, self.config.loop)
        worker.is_silent = isinstance(error, Unreachable)
        if was_reachable != worker.is_reachable or (is_first and worker.seen_seconds is None):
            self._event(worker, "worker", error.reason, str(error))
        self._check_age(worker, now)

    def _check_age(self, worker: ControlledWorker, now: float) -> None:
        age = worker.age_seconds(now)
        if age is not None and age > self.config.loop.hold_after_seconds and not worker.is_held:
            worker.is_held = True
            message = f"no data for {age:.1f} s: depths stay as they are"
            self.recorder.event(
                worker, self.mode_of(worker), "guard", "stale", message, outcome="held", guard="stale"
            )

    def _expire_pin(self, worker: ControlledWorker, now: float) -> None:
        if worker.pin is not None and worker.pin.remaining(now) <= 0:
            self._event(worker, "pin", "expired", f"the pin at {worker.pin.num_steps} ran out")
            worker.pin = None

    def _not_sent(self, worker: ControlledWorker, error: WorkerError | BootChanged) -> None:
        reason = "boot_changed" if isinstance(error, BootChanged) else error.reason
        self._metrics.actuation_failed(worker.id, reason)
        if isinstance(error, BootChanged):
            worker.life = None
        elif not isinstance(error, Unreachable) and worker.refusal != str(error):
            worker.refusal = str(error)
            self._event(worker, "plan", reason, str(error))

    def _event(self, worker: ControlledWorker, kind: Kind, reason: str, message: str) -> None:
        self.recorder.event(worker, self.mode_of(worker), kind, reason, message)

    # ---- turning ----

    async def _drive(self, worker: ControlledWorker) -> None:
        failures = 0
        while True:
            began = self.clock.monotonic()
            try:
                await self.tick(worker)
                failures = 0
            except Exception:
                failures += 1
                logger.exception("worker=%s: a turn failed (%d in a row)", worker.id, failures)
                self._metrics.tick_failed(worker.id)
            ended = self.clock.monotonic()
            worker.turn_seconds = ended
            self._metrics.ticked(worker.id, ended - began)
            self.show(worker)
            interval = self.config.loop.poll_interval_seconds
            pause = min(
                interval * 2.0 ** min(failures, 16), max(interval, self.config.loop.backoff_max_seconds)
            )
            await self._sleep(max(0.0, pause - (ended - began)))

    def show(self, worker: ControlledWorker) -> None:
        """Set the worker's gauges."""
        self._metrics.state(
            worker.id,
            is_up=worker.is_reachable,
            is_pinned=worker.pin is not None,
            mode=self.mode_of(worker),
            age_seconds=worker.age_seconds(self.clock.monotonic()),
            depths=worker.life.depths if worker.life else {},
        )
