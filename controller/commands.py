"""What an operator may order: pin a worker's depth, release it, undo the last change, change a mode.

A pin is sent at once, inside a plan, with its own remaining time; the loop goes on renewing it. Knows nothing
about HTTP: the routes translate outcomes and exceptions into statuses.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from controller.actuate import ActivePin, BootChanged
from controller.controlled import ControlledWorker
from controller.loop import ControlLoop
from controller.types import Kind, Mode, Outcome
from controller.undo import Hold, PinChange, TableChange
from controller.worker_client import Conflict, Refused, Unreachable, WorkerError
from worker.protocol import PlanStatus

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


class NothingToUndo(Exception):
    """There is no change of depth that a rollback could take back."""


@dataclass(frozen=True)
class Confirmation:
    """Whether the worker was seen to follow within the time to confirm."""

    is_applied: bool


Followed = Callable[[PlanStatus], bool]


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
            worker.pin = ActivePin(num_steps, self._now() + ttl_seconds, reason)
            worker.undo.push(PinChange(f"pin at {num_steps}", before))
            message = f"pinned at {num_steps} for {ttl_seconds:g} s" + (f": {reason}" if reason else "")
            try:
                await self._tell(worker, "pin", "pinned", message, num_steps)
            except Refused as error:
                worker.pin = before
                worker.undo.drop_last()
                raise NotATier(num_steps, error.candidate_steps or []) from error
        return await self._confirm(worker, _pinned_at(num_steps))

    async def release(self, worker: ControlledWorker) -> Confirmation:
        """Give a worker back to the policy: end its pin and its hold; without either nothing happens.

        Raises:
            ModeForbids: nothing has changed.
            NotConfirmed, Superseded: ended here, not yet at the worker.
        """
        async with worker.lock:
            if worker.pin is not None:
                await self._prepare(worker)  # first: a refusal leaves the hold as it is
            if worker.hold is not None:
                worker.hold = None
                self._loop.recorder.event(worker, "rollback", "hold_released", "the policy is free again")
            if worker.pin is None:
                self._loop.memory.keep(worker)
                return Confirmation(True)
            worker.undo.push(PinChange(f"release of the pin at {worker.pin.num_steps}", worker.pin))
            worker.pin = None
            await self._tell(worker, "pin", "released", "the pin was released", None)
        return await self._confirm(worker, _not_pinned)

    async def roll_back(
        self, worker: ControlledWorker, *, ttl_seconds: float, reason: str = ""
    ) -> Confirmation:
        """Undo the newest change of a worker's depth, and hold the policy for `ttl_seconds`.

        Raises:
            NothingToUndo, ModeForbids: nothing has changed.
            NotConfirmed, Superseded: undone here, not yet at the worker.
        """
        async with worker.lock:
            await self._prepare(worker)
            if worker.life is None:
                raise NotConfirmed(worker.last_error or "never seen")
            now = self._now()
            change = worker.undo.newest(worker.life.depths, worker.pin, now)
            if change is None:
                raise NothingToUndo(f"worker {worker.id}: no change of depth to undo")
            worker.undo.drop_last()
            worker.hold = Hold(now + ttl_seconds, reason)
            if isinstance(change, TableChange):
                self._loop.adopt(worker, change.depths)
                table = ", ".join(f"batch<={edge}: {depth}" for edge, depth in sorted(change.depths.items()))
                back, num_steps = f"back to {table}", None
            else:
                worker.pin = change.pin
                num_steps = change.pin.num_steps if change.pin else None
                back = "no pin" if change.pin is None else f"back to the pin at {change.pin.num_steps}"
            message = f"undid {change.what}: {back}; the policy is held for {ttl_seconds:g} s"
            message += f": {reason}" if reason else ""
            await self._tell(worker, "rollback", "rolled_back", message, num_steps)
        return await self._confirm(worker, _not_pinned if num_steps is None else _pinned_at(num_steps))

    async def set_mode(self, mode: Mode) -> None:
        """Set the mode of all workers; modes of single workers end."""
        self._loop.mode = mode
        self._loop.memory.keep_mode(mode)
        for worker in self._loop.workers.values():
            worker.controller_mode = mode
            await self.set_worker_mode(worker, None)

    async def set_worker_mode(self, worker: ControlledWorker, mode: Mode | None) -> None:
        """Set a worker's own mode; None: the controller's holds again."""
        async with worker.lock:
            worker.mode_override = mode
            self._loop.memory.keep(worker)
            if worker.mode == worker.recorded_mode:
                return
            before, worker.recorded_mode = worker.recorded_mode, worker.mode
            worker.noted.clear()
            if worker.mode in ("advisory", "released"):
                worker.undo.drop_tables()  # the worker follows its own table from now on
            self._loop.end_probe(worker)
            self._loop.recorder.event(worker, "mode", worker.mode, f"{before} -> {worker.mode}")
            self._loop.memory.keep(worker)
            self._loop.show(worker)

    async def _prepare(self, worker: ControlledWorker) -> None:
        if worker.mode == "released":
            raise ModeForbids(
                f"worker {worker.id} is in mode released: nothing is sent to it; set another mode first"
            )
        if worker.life is None or not worker.is_reachable:
            await self._loop.observe(worker, at_once=True)

    async def _tell(
        self, worker: ControlledWorker, kind: Kind, reason: str, message: str, num_steps: int | None
    ) -> None:
        """Send the wish at once and record it; raise `Refused` unrecorded where a depth was asked for."""
        outcome: Outcome = "unconfirmed"
        failure: Exception | None = None
        try:
            if worker.life is None:
                raise Unreachable(worker.last_error or "never seen")
            self._loop.end_probe(worker)
            is_sent = await self._loop.send(worker, message, at_once=True)
            # Without a wish (advisory mode, no pin) there is nothing to send: the plan with the pin lapses.
            outcome = "applied" if is_sent else "noted"
        except Refused as error:
            if reason == "pinned":
                raise
            failure = Superseded(str(error))
        except Conflict as error:
            failure = Superseded(str(error))
        except (WorkerError, BootChanged) as error:
            failure = NotConfirmed(str(error))
        self._loop.recorder.event(worker, kind, reason, message, outcome=outcome, num_steps=num_steps)
        self._loop.memory.keep(worker)
        self._loop.show(worker)
        if failure is not None:
            raise failure

    async def _confirm(self, worker: ControlledWorker, followed: Followed) -> Confirmation:
        """Watch the worker until it follows, or the time is over."""
        deadline = self._now() + self._loop.config.loop.confirm_timeout_seconds
        while True:
            if worker.status is not None and followed(worker.status):
                return Confirmation(True)
            if self._now() >= deadline:
                return Confirmation(False)
            await asyncio.sleep(CONFIRM_POLL_SECONDS)
            try:
                worker.confirm(await worker.client.plan_status(), self._now())
            except WorkerError:
                continue

    def _now(self) -> float:
        return self._loop.clock.monotonic()


def _pinned_at(num_steps: int) -> Followed:
    return lambda status: (status.source, status.num_steps) == ("pin", num_steps)


def _not_pinned(status: PlanStatus) -> bool:
    return status.source != "pin"
