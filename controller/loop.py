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
from controller.journal import Journal
from controller.life import depths_in_force
from controller.metrics import ControllerMetrics
from controller.presence import Presence
from controller.record import Recorder
from controller.remembered import Memory
from controller.turn import Turn, decide, estimate, guard
from controller.types import Depths, Estimate, Mode, Observation, Outcome, Proposal, Verdict
from controller.undo import TableChange
from controller.worker_client import WorkerClient, WorkerError
from controller.worth import gain_over_plain

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
        journal: Journal,
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
            journal: has begun; brings back what outlives a restart, and gives the `controller_epoch`.
            sleep: waits between turns.
            rng: jitter of the pauses after failures (never of decisions).
        """
        rng = rng or random.Random()
        self.config = config
        self.clock = clock
        self.recorder = recorder
        self.memory = Memory(journal, clock, configured=config.policy.mode)
        self.mode: Mode = self.memory.mode()
        self.workers = {
            worker.id: ControlledWorker(worker.id, worker.url, clients[worker.id], mode=self.mode, rng=rng)
            for worker in config.workers
        }
        for controlled in self.workers.values():
            self.memory.restore(controlled)
        self._presence = Presence(
            config, clock=clock, recorder=recorder, journal=journal, epoch=journal.epoch
        )
        self._metrics = metrics
        self._sleep = sleep
        self._started: float | None = None

    async def tick(self, worker: ControlledWorker) -> None:
        """One turn for one worker: observe ▶ estimate ▶ decide ▶ guard ▶ actuate ▶ journal."""
        async with worker.lock:
            observation = await self.observe(worker)
            if observation is None or worker.life is None:
                await self._actuate(worker, ())
            else:
                turn = self._turn(worker, observation)
                found = estimate(worker.life, turn)
                proposals = decide(worker.life, turn, found)
                verdicts = self._guard(worker, turn, proposals)
                outcome = await self._actuate(worker, verdicts)
                self._journal(worker, turn, found, verdicts, outcome)
            self.memory.keep(worker)

    async def run(self) -> None:
        """Drive all workers until cancelled."""
        self._started = self.clock.monotonic()
        async with asyncio.TaskGroup() as group:
            for worker in self.workers.values():
                group.create_task(self._drive(worker), name=f"control {worker.id}")

    def mode_of(self, worker: ControlledWorker) -> Mode:
        """Return the mode in force for a worker: its own, else the controller's."""
        return worker.mode

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
        self._presence.expire(worker, now)
        if not (at_once or worker.may_try(now)):
            self._presence.check_age(worker, now)
            return None
        was_reachable, age = worker.is_reachable, worker.age_seconds(now)
        try:
            stats = await worker.client.stats()
            now = self.clock.monotonic()
            is_known = worker.life is not None and worker.life.info.boot_id == stats.boot_id
            is_known = is_known and (age is None or age <= self.config.loop.default_after_seconds)
            if not is_known:
                await self._presence.meet(worker, stats, now)
        except WorkerError as error:
            self._presence.lost(worker, error, was_reachable)
            return None
        worker.succeeded(stats, now)
        assert worker.life is not None
        observation = worker.life.observer.observe(stats, now)
        worker.life.recent.add(observation)
        if is_known and not was_reachable:
            self._presence.found(worker)
        return observation

    def _turn(self, worker: ControlledWorker, observation: Observation) -> Turn:
        """Gather what this turn's decisions depend on."""
        assert worker.life is not None and worker.status is not None
        now = self.clock.monotonic()
        is_ours = worker.mode in ("active", "frozen")
        return Turn(
            observation=observation,
            now=now,
            age_seconds=worker.age_seconds(now) or 0.0,
            mode=worker.mode,
            is_pinned=worker.pin is not None,
            hold_seconds=worker.hold.remaining(now) if worker.hold else 0.0,
            adopted=None if is_ours else depths_in_force(worker.life.slots, worker.status),
        )

    def _guard(self, worker: ControlledWorker, turn: Turn, proposals: Sequence[Proposal]) -> list[Verdict]:
        assert worker.life is not None
        before = worker.life.depths
        verdicts = guard(worker.life, turn, proposals)
        if worker.life.depths != before and turn.adopted is None:
            made = [v for v in verdicts if v.is_allowed and v.num_steps != v.proposal.num_steps_before]
            what = ", ".join(
                f"{v.proposal.reason} {v.proposal.num_steps_before}->{v.num_steps} (batch<={v.proposal.slot})"
                for v in made
            )
            worker.undo.push(TableChange(what, before))
        return verdicts

    def _journal(
        self,
        worker: ControlledWorker,
        turn: Turn,
        found: Estimate,
        verdicts: Sequence[Verdict],
        outcome: Outcome,
    ) -> None:
        self.recorder.turn(worker, turn, found, verdicts, outcome)
        if worker.life is not None:
            depths, pin = worker.life.depths, worker.pin
            in_force = depths if pin is None else dict.fromkeys(depths, pin.num_steps)
            self._metrics.gain(worker.id, gain_over_plain(found, in_force))
        if worker.shadow is not None and worker.life is not None:
            self.recorder.shadow(worker, worker.shadow, worker.shadow.turn(turn))
            worker.shadow.follow(worker.life.depths)

    def adopt(self, worker: ControlledWorker, depths: Depths) -> None:
        """Put a worker's table back to an earlier one."""
        if worker.life is not None:
            worker.life.adopt(depths)
            self.recorder.step(worker, "adopt", [[edge, depth] for edge, depth in depths.items()])

    def end_probe(self, worker: ControlledWorker) -> None:
        """Drop a worker's probe in flight: a pin or a mode comes in between."""
        if worker.life is not None:
            worker.life.end_probe()
            self.recorder.step(worker, "end_probe")

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
        wish, life = worker.wish(self.config.policy.dead_band), worker.life
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
            self._metrics.actuation_failed(worker.id, self._presence.not_sent(worker, error))
            raise
        if life.actuator.conflict is not None:
            self._presence.contested(worker, life.actuator.conflict, now)
            self._metrics.actuation_failed(worker.id, "conflict")
        worker.refusal = None
        worker.confirm(status, self.clock.monotonic())
        return True

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
            await self._sleep(max(0.0, self._pause_seconds(worker, failures) - (ended - began)))

    def _pause_seconds(self, worker: ControlledWorker, failures: int) -> float:
        """From the beginning of a turn to that of the next: longer after failures, shorter while something happens."""
        interval = self.config.loop.poll_interval_seconds
        if failures:
            return min(
                interval * 2.0 ** min(failures, 16), max(interval, self.config.loop.backoff_max_seconds)
            )
        if worker.life is None or not worker.is_reachable:
            return interval
        return worker.life.pause_seconds(interval, has_missed=worker.has_missed)

    def show(self, worker: ControlledWorker) -> None:
        """Set the worker's gauges."""
        life, now = worker.life, self.clock.monotonic()
        self._metrics.state(
            worker.id,
            is_up=worker.is_reachable,
            is_pinned=worker.pin is not None,
            is_held=worker.hold is not None,
            mode=worker.mode,
            age_seconds=worker.age_seconds(now),
            is_breaker_open=life is not None and life.guards.breaker.is_open(now),
            depths=life.depths if life and worker.is_reachable else {},
        )
        if life is None or not worker.is_reachable:
            self._metrics.gain(worker.id, None)
        shadow = worker.shadow if worker.is_reachable else None
        self._metrics.shadow(worker.id, shadow.wished() if shadow else ())
