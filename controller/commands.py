"""What an operator may order: pin a worker's depth, release it, change a mode.

A pin is sent at once, inside a plan, with its own remaining time; the loop goes on renewing it. Knows nothing
about HTTP: the routes translate outcomes and exceptions into statuses.
"""

import asyncio
from dataclasses import dataclass

from controller.actuate import ActivePin, BootChanged
from controller.controlled import ControlledWorker
from controller.loop import ControlLoop
from controller.types import Mode, Outcome
from controller.worker_client import Conflict, Refused, Unreachable, WorkerError

CONFIRM_POLL_SECONDS = 0.05


class NotATier(Exception):
    """The worker has no prebuilt state for this depth."""

    def __init__(self, num_steps: int, tiers: list[int]) -> None:
        super().__init__(f"num_steps {num_steps} is not a tier of this worker; allowed: {tiers}")
        self.tiers = tiers


class ModeForbids(Exception):
    """In this mode nothing is sent to the worker."""


class NotConfirmed(Exception):
    """The worker could not be told; the wish is kept and sent as soon as it answers."""


class Superseded(Exception):
    """The worker follows another controller's newer plan; the wish is kept."""


@dataclass(frozen=True)
class Confirmation:
    """Whether the worker was seen to follow within the time to confirm."""

    is_applied: bool


class Operator:
    """Carries orders out on a running `ControlLoop`."""

    def __init__(self, loop: ControlLoop) -> None:
        self._loop = loop

    async def pin(
        self, worker: ControlledWorker, num_steps: int, *, ttl_seconds: float, reason: str = ""
    ) -> Confirmation:
        """Hold a worker at `num_steps` for `ttl_seconds`, whatever the policy thinks.

        Raises:
            NotATier, ModeForbids: nothing has changed.
            NotConfirmed, Superseded: kept, not confirmed.
        """
        async with worker.lock:
            await self._prepare(worker)
            if worker.life is not None and num_steps not in worker.life.info.candidate_steps:
                raise NotATier(num_steps, worker.life.info.candidate_steps)
            before = worker.pin
            worker.pin = ActivePin(num_steps, self._loop.clock.monotonic() + ttl_seconds, reason)
            message = f"pinned at {num_steps} for {ttl_seconds:g} s" + (f": {reason}" if reason else "")
            try:
                await self._tell(worker, "pinned", message, num_steps)
            except Refused as error:
                worker.pin = before
                raise NotATier(num_steps, error.candidate_steps or []) from error
        return await self._confirm(worker, num_steps)

    async def release(self, worker: ControlledWorker) -> Confirmation:
        """End a worker's pin; without one nothing happens.

        Raises:
            ModeForbids: nothing has changed.
            NotConfirmed, Superseded: ended here, not yet at the worker.
        """
        async with worker.lock:
            if worker.pin is None:
                return Confirmation(True)
            await self._prepare(worker)
            worker.pin = None
            await self._tell(worker, "released", "the pin was released", None)
        return await self._confirm(worker, None)

    async def set_mode(self, mode: Mode) -> None:
        """Set the mode of all workers; modes of single workers end."""
        self._loop.mode = mode
        for worker in self._loop.workers.values():
            await self.set_worker_mode(worker, None)

    async def set_worker_mode(self, worker: ControlledWorker, mode: Mode | None) -> None:
        """Set a worker's own mode; None: the controller's holds again."""
        async with worker.lock:
            worker.mode_override = mode
            now_in = self._loop.mode_of(worker)
            if now_in == worker.recorded_mode:
                return
            before, worker.recorded_mode = worker.recorded_mode, now_in
            worker.noted.clear()
            if worker.life is not None:
                worker.life.end_probe()
            self._loop.recorder.event(worker, now_in, "mode", now_in, f"{before} -> {now_in}")
            self._loop.show(worker)

    async def _prepare(self, worker: ControlledWorker) -> None:
        mode = self._loop.mode_of(worker)
        if mode == "released":
            raise ModeForbids(
                f"worker {worker.id} is in mode {mode}: nothing is sent to it; set another mode first"
            )
        if worker.life is None or not worker.is_reachable:
            await self._loop.observe(worker, at_once=True)

    async def _tell(self, worker: ControlledWorker, reason: str, message: str, num_steps: int | None) -> None:
        """Send the wish at once and record it; raise `Refused` unrecorded."""
        outcome: Outcome = "unconfirmed"
        failure: Exception | None = None
        try:
            if worker.life is None:
                raise Unreachable(worker.last_error or "never seen")
            worker.life.end_probe()
            is_sent = await self._loop.send(worker, message, at_once=True)
            # Without a wish (advisory mode, no pin) there is nothing to send: the plan with the pin lapses.
            outcome = "applied" if is_sent else "noted"
        except Refused:
            raise
        except Conflict as error:
            failure = Superseded(str(error))
        except (WorkerError, BootChanged) as error:
            failure = NotConfirmed(str(error))
        mode = self._loop.mode_of(worker)
        self._loop.recorder.event(worker, mode, "pin", reason, message, outcome=outcome, num_steps=num_steps)
        self._loop.show(worker)
        if failure is not None:
            raise failure

    async def _confirm(self, worker: ControlledWorker, num_steps: int | None) -> Confirmation:
        """Watch the worker until it follows (None: until no pin rules it), or the time is over."""
        deadline = self._loop.clock.monotonic() + self._loop.config.loop.confirm_timeout_seconds
        while True:
            status = worker.status
            if status is not None and (
                status.source != "pin"
                if num_steps is None
                else (status.source, status.num_steps) == ("pin", num_steps)
            ):
                return Confirmation(True)
            if self._loop.clock.monotonic() >= deadline:
                return Confirmation(False)
            await asyncio.sleep(CONFIRM_POLL_SECONDS)
            try:
                worker.confirm(await worker.client.plan_status(), self._loop.clock.monotonic())
            except WorkerError:
                continue
