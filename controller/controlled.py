"""A worker as the controller holds it: how to reach it, its mode and pin, its present life.

Mutated only on the event loop and, where a request is involved, under `lock`. Decides nothing.
"""

import asyncio
import random

from controller.actuate import ActivePin, Wish
from controller.config import LoopConfig
from controller.life import Life
from controller.shadow import Shadow
from controller.types import Mode
from controller.undo import Hold, UndoStack
from controller.worker_client import WorkerClient
from worker.protocol import PlanStatus, SpecStats


class ControlledWorker:
    """State that outlives a worker's restarts."""

    def __init__(
        self, worker_id: str, url: str, client: WorkerClient, *, mode: Mode, rng: random.Random
    ) -> None:
        self.id = worker_id
        self.url = url
        self.client = client
        self.lock = asyncio.Lock()
        """Held for one turn of the loop, or one operator's command."""
        self.controller_mode = mode
        """The mode of all workers that have none of their own."""
        self.mode_override: Mode | None = None
        self.recorded_mode = mode
        """The mode in force when it was last recorded."""
        self.pin: ActivePin | None = None
        self.hold: Hold | None = None
        """After a rollback: how long the policy is held."""
        self.undo = UndoStack()
        self.life: Life | None = None
        self.life_number = 0
        """The life's number in the journal; 0 without a life."""
        self.checkpoint_seconds = 0.0
        """Monotonic time of the life's newest checkpoint in the journal."""
        self.shadow: Shadow | None = None
        self.met_boot_id: str | None = None
        self.known_epoch = 0
        """The newest epoch under which this worker's pin is known here; plans of later ones are somebody else's."""
        self.stats: SpecStats | None = None
        """Newest reading."""
        self.status: PlanStatus | None = None
        """What the worker follows, from the newest answer."""
        self.status_seconds = 0.0
        """Monotonic time of that answer."""
        self.seen_seconds: float | None = None
        """Monotonic time of the newest reading; None before the first."""
        self.turn_seconds: float | None = None
        """Monotonic time at which the newest turn of the loop ended."""
        self.is_reachable = False
        self.last_error: str | None = None
        self.is_silent = False
        """The latest attempt brought no answer at all."""
        self.refusal: str | None = None
        """The worker's latest refusal of a plan; recorded once."""
        self.contested_seconds: float | None = None
        """Monotonic time at which somebody else's plan was last gone past; a quarrel is recorded once."""
        self.is_held = False
        """Data older than the hold limit; recorded once."""
        self.noted: dict[str, tuple[object, ...]] = {}
        """Per slot (the shadow's apart), the last refusal or advice recorded: the same one is not recorded again."""
        self._failures = 0
        self._next_attempt = 0.0
        self._rng = rng

    @property
    def mode(self) -> Mode:
        """The mode in force: its own, else the controller's."""
        return self.mode_override or self.controller_mode

    def age_seconds(self, now: float) -> float | None:
        """Age of the newest reading; None before the first."""
        return None if self.seen_seconds is None else max(0.0, now - self.seen_seconds)

    def may_try(self, now: float) -> bool:
        """Whether the pause after failures is over."""
        return now >= self._next_attempt

    @property
    def has_missed(self) -> bool:
        """Whether the latest attempt failed and the one before did not: worth another look soon."""
        return self._failures == 1

    def succeeded(self, stats: SpecStats, now: float) -> None:
        """Take a reading in: the worker is there."""
        self.stats, self.seen_seconds = stats, now
        self.confirm(stats.plan, now)
        self._failures, self._next_attempt = 0, 0.0
        self.is_reachable, self.last_error = True, None
        self.is_silent = self.is_held = False

    def failed(self, error: Exception, now: float, config: LoopConfig) -> None:
        """Note a failed attempt and pause: twice as long each time, with jitter, up to the limit.

        Two failures in a row make the worker unreachable; one may be a slow moment, and the next turn tries again.
        """
        self._failures += 1
        pause = config.poll_interval_seconds * 2.0 ** min(self._failures - 1, 16)
        pause = min(pause, config.backoff_max_seconds) * self._rng.uniform(0.5, 1.0)
        self._next_attempt = now if self.has_missed else now + pause
        self.last_error = str(error)
        if self._failures >= 2:
            self.is_reachable = False

    def adopt_pin(self, status: PlanStatus, now: float) -> bool:
        """Take over a pin that the worker held before we met it; return whether there was one.

        Asked once per boot_id: later on the worker's pin is ours, or one that we have released.
        """
        held = status.plan.pin if status.plan else None
        if self.pin is not None or held is None or status.pin_remaining_seconds <= 0:
            return False
        self.pin = ActivePin(held.num_steps, now + status.pin_remaining_seconds, "adopted")
        return True

    def confirm(self, status: PlanStatus, now: float) -> None:
        """Take in what the worker says it follows."""
        self.status, self.status_seconds = status, now

    @property
    def _holds_pin(self) -> bool:
        """Whether the worker still has a pin, which only a plan without one removes."""
        status = self.status
        return (
            status is not None
            and status.plan is not None
            and status.plan.pin is not None
            and status.pin_remaining_seconds > 0
        )

    def wish(self, dead_band: float) -> Wish | None:
        """Return the plan that the worker should hold in its mode; None: send nothing."""
        mode = self.mode
        if self.life is None or mode == "released":
            return None
        if mode == "advisory" or not self.life.info.adaptation:
            if self.pin is None and not self._holds_pin:
                return None
            fallback = {slot.max_batch_size: self.life.info.fallback_num_steps for slot in self.life.slots}
            return Wish.of(fallback, dead_band=dead_band, probe=None, pin=self.pin)
        probe = self.life.probe if mode == "active" and self.pin is None else None
        return Wish.of(self.life.depths, dead_band=dead_band, probe=probe, pin=self.pin)
