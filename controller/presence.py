"""Presence: comings and goings of one controller's workers, and what ends by itself (pins, holds).

Meets a new, restarted or returned worker and adopts what it runs; notes a lost one and data that grow old. Decides
no depth and sends no plan.
"""

from controller.actuate import BootChanged
from controller.clock import Clock
from controller.config import ControllerConfig
from controller.controlled import ControlledWorker
from controller.journal import Journal
from controller.life import Life
from controller.record import Recorder
from controller.shadow import Shadow
from controller.tape import life_body
from controller.worker_client import BadAnswer, Unreachable, WorkerError
from worker.protocol import PlanStatus, SpecStats

QUARREL_SECONDS = 60.0
"""Plans of another controller that follow each other within this time are one quarrel, recorded once."""


class Presence:
    """Keeps track of who is there."""

    def __init__(
        self, config: ControllerConfig, *, clock: Clock, recorder: Recorder, journal: Journal, epoch: int
    ) -> None:
        self._config = config
        self._clock = clock
        self._recorder = recorder
        self._journal = journal
        self._epoch = epoch

    async def meet(self, worker: ControlledWorker, stats: SpecStats, now: float) -> None:
        """Begin a life: read what the worker is, adopt the depths that it follows, and its pin.

        Raises:
            WorkerError: no answer, or one that belongs to another process.
        """
        info = await worker.client.info()
        if info.boot_id != stats.boot_id:
            raise BadAnswer(f"the worker restarted between two answers ({stats.boot_id}, {info.boot_id})")
        before, worker.met_boot_id = worker.met_boot_id, info.boot_id
        life = Life(
            worker.id, worker.client, self._config, epoch=self._epoch, info=info, status=stats.plan, now=now
        )
        self._begin(worker, life, stats.plan, now)
        what = "met" if before is None else "returned" if before == info.boot_id else "restarted"
        table = ", ".join(f"batch<={edge}: {depth}" for edge, depth in life.depths.items())
        message = f"{info.model} on {info.device}, tiers {info.candidate_steps}, adopted {table}"
        self._recorder.event(worker, "worker", what, message)
        if not info.adaptation:
            reason = info.adaptation_off_reason or "no reason given"
            self._recorder.event(worker, "worker", "adaptation_off", reason)
        if before != info.boot_id:
            worker.undo.drop_tables()
        if (before != info.boot_id or self._is_strange(worker, stats.plan)) and worker.adopt_pin(
            stats.plan, now
        ):
            self._recorder.event(worker, "pin", "adopted", "a pin of an earlier controller still runs")
        if worker.pin is not None and worker.pin.num_steps not in info.candidate_steps:
            message = f"{worker.pin.num_steps} is not among {info.candidate_steps}"
            self._recorder.event(worker, "pin", "no_tier", message)
            worker.pin = None

    def lost(self, worker: ControlledWorker, error: WorkerError, was_reachable: bool) -> None:
        """Note a failed attempt to read a worker."""
        now = self._clock.monotonic()
        is_first = worker.last_error is None
        worker.failed(error, now, self._config.loop)
        worker.is_silent = isinstance(error, Unreachable)
        if was_reachable != worker.is_reachable or (is_first and worker.seen_seconds is None):
            self._recorder.event(worker, "worker", error.reason, str(error))
        self.check_age(worker, now)

    def found(self, worker: ControlledWorker) -> None:
        """Note that a worker whose life goes on answers again."""
        self._recorder.event(worker, "worker", "reachable", "the worker answers again")

    def check_age(self, worker: ControlledWorker, now: float) -> None:
        """Note, once, that the newest data are too old to decide anything."""
        age = worker.age_seconds(now)
        if age is not None and age > self._config.loop.hold_after_seconds and not worker.is_held:
            worker.is_held = True
            message = f"no data for {age:.1f} s: depths stay as they are"
            self._recorder.event(worker, "guard", "stale", message, outcome="held", guard="stale")

    def expire(self, worker: ControlledWorker, now: float) -> None:
        """End what has run out: a pin, a hold."""
        if worker.pin is not None and worker.pin.remaining(now) <= 0:
            self._recorder.event(worker, "pin", "expired", f"the pin at {worker.pin.num_steps} ran out")
            worker.pin = None
            worker.undo.pin_expired()
        if worker.hold is not None and worker.hold.remaining(now) <= 0:
            self._recorder.event(worker, "rollback", "hold_expired", "the policy is free again")
            worker.hold = None

    def not_sent(self, worker: ControlledWorker, error: WorkerError | BootChanged) -> str:
        """Note a plan that was not confirmed; return the reason's code."""
        reason = "boot_changed" if isinstance(error, BootChanged) else error.reason
        if isinstance(error, BootChanged):
            self._end(worker)
        elif not isinstance(error, Unreachable) and worker.refusal != str(error):
            worker.refusal = str(error)
            self._recorder.event(worker, "plan", reason, str(error))
        return reason

    def contested(self, worker: ControlledWorker, message: str, now: float) -> None:
        """Note that somebody else steers this worker too; once, not with each plan that is gone past."""
        before, worker.contested_seconds = worker.contested_seconds, now
        if before is None or now - before > QUARREL_SECONDS:
            message += ": stop one of the two if this goes on"
            self._recorder.event(worker, "plan", "conflict", message)

    def _begin(self, worker: ControlledWorker, life: Life, status: PlanStatus, now: float) -> None:
        self._end(worker)
        worker.life = life
        worker.noted.clear()
        worker.checkpoint_seconds = now
        worker.life_number = self._journal.begin_life(worker.id, life_body(life.info, status, now))
        shadow = self._config.shadow_policy()
        worker.shadow = Shadow(worker.id, shadow, self._config, life=life, now=now) if shadow else None

    def _end(self, worker: ControlledWorker) -> None:
        if worker.life_number:
            self._journal.end_life(worker.life_number)
        worker.life, worker.life_number, worker.shadow = None, 0, None

    def _is_strange(self, worker: ControlledWorker, status: PlanStatus) -> bool:
        """Whether the worker's plan is from a controller whose orders we do not know."""
        held = status.plan.controller_epoch if status.plan else 0
        return held > worker.known_epoch and held != self._epoch
