"""Remembered: modes, pins, holds and undoable changes as the journal keeps them over a restart of the controller.

Times are kept as wall-clock ends, since monotonic clocks begin anew: a pin goes on with what is left of it, and with
no more than was left when it was last written (every `REWRITE_SECONDS`, and at the end) if the clock was set back. A
depth that the policy chose is not restored from here: the controller adopts what the worker runs.
"""

from typing import Any

from controller.actuate import ActivePin
from controller.clock import Clock
from controller.controlled import ControlledWorker
from controller.journal import Journal
from controller.types import MODES, Mode
from controller.undo import Change, Hold, PinChange, TableChange, UndoStack

CONTROLLER_KEY = "controller"
REWRITE_SECONDS = 10.0
"""While a pin or a hold runs, what is left of it is written anew this often."""


def worker_key(worker_id: str) -> str:
    """Return the journal's key for a worker."""
    return f"worker:{worker_id}"


class Memory:
    """Writes down what must outlive a restart, when it has changed, and brings it back."""

    def __init__(self, journal: Journal, clock: Clock, *, configured: Mode) -> None:
        """Read what there is; `configured` is the mode in the configuration."""
        self._journal = journal
        self._clock = clock
        self._configured = configured
        self._kept: dict[str, object] = {}
        self._written: dict[str, float] = {}
        """Monotonic time at which a worker's state was last written."""
        self._found = journal.recall()

    def mode(self) -> Mode:
        """Return the controller's mode to start in: an operator's, unless the configuration was changed since."""
        return self._ordered_mode(self._found.get(CONTROLLER_KEY, {})) or self._configured

    def keep_mode(self, mode: Mode) -> None:
        """Write an operator's mode down."""
        self._journal.remember(CONTROLLER_KEY, {"mode": mode, "configured": self._configured})

    def keep(self, worker: ControlledWorker, *, at_end: bool = False) -> None:
        """Write a worker's state down if it has changed, or if less is left of a pin or a hold.

        Args:
            worker: whose state.
            at_end: the controller ends: what is left is written exactly.
        """
        state = (worker.met_boot_id, worker.mode_override, worker.pin, worker.hold, worker.undo.changes)
        now = self._clock.monotonic()
        is_old = at_end or now - self._written.get(worker.id, now) >= REWRITE_SECONDS
        if self._kept.get(worker.id) == state and not (is_old and self._has_times(worker)):
            return
        self._kept[worker.id], self._written[worker.id] = state, now
        body = {
            "boot_id": worker.met_boot_id,
            "epoch": self._journal.epoch,
            "mode": worker.mode_override,
            "configured": self._configured,
            "pin": self._pin_body(worker.pin),
            "hold": None
            if worker.hold is None
            else self._ends(worker.hold.until_seconds) | {"reason": worker.hold.reason},
            "undo": [self._change_body(change) for change in worker.undo.changes],
        }
        self._journal.remember(worker_key(worker.id), body)

    def restore(self, worker: ControlledWorker) -> None:
        """Give a worker back what an earlier start knew of it; a damaged entry is as good as none."""
        found = self._found.get(worker_key(worker.id))
        if found is None:
            return
        try:
            worker.mode_override = self._ordered_mode(found)
            worker.recorded_mode = worker.mode
            worker.met_boot_id = found["boot_id"]
            worker.known_epoch = int(found["epoch"])
            worker.pin = self._live(self._pin(found["pin"]))
            hold = found["hold"]
            if hold is not None and (until := self._until(hold)) > self._clock.monotonic():
                worker.hold = Hold(until, str(hold["reason"]))
            worker.undo = UndoStack(tuple(self._change(change) for change in found["undo"]))
        except (LookupError, TypeError, ValueError):
            worker.pin = worker.hold = None
            worker.undo = UndoStack()
        self._kept[worker.id] = None

    def _ordered_mode(self, found: dict[str, Any]) -> Mode | None:
        """Return an operator's mode; None: there is none, or the configuration was changed since."""
        # Earlier versions kept no `configured` with a worker's mode: it is taken for unchanged.
        is_valid = (
            found.get("mode") in MODES and found.get("configured", self._configured) == self._configured
        )
        mode: Mode | None = found["mode"] if is_valid else None
        return mode

    # ---- times ----

    def _has_times(self, worker: ControlledWorker) -> bool:
        """Whether something runs of which less is left now than when it was written."""
        now = self._clock.monotonic()
        pins = [change.pin for change in worker.undo.changes if isinstance(change, PinChange)]
        return worker.hold is not None or any(pin and pin.remaining(now) > 0 for pin in (worker.pin, *pins))

    def _ends(self, seconds: float) -> dict[str, float]:
        remaining = seconds - self._clock.monotonic()
        return {"ends": self._clock.wall() + remaining, "remaining": remaining}

    def _until(self, body: dict[str, Any]) -> float:
        remaining = min(float(body["ends"]) - self._clock.wall(), float(body["remaining"]))
        return self._clock.monotonic() + remaining

    # ---- pins and changes ----

    def _live(self, pin: ActivePin | None) -> ActivePin | None:
        return pin if pin is not None and pin.remaining(self._clock.monotonic()) > 0 else None

    def _pin_body(self, pin: ActivePin | None) -> dict[str, Any] | None:
        if pin is None:
            return None
        return {"num_steps": pin.num_steps, "reason": pin.reason, **self._ends(pin.expires_seconds)}

    def _pin(self, body: dict[str, Any] | None) -> ActivePin | None:
        if body is None:
            return None
        return ActivePin(int(body["num_steps"]), self._until(body), str(body["reason"]))

    def _change_body(self, change: Change) -> dict[str, Any]:
        if isinstance(change, PinChange):
            return {"what": change.what, "pin": self._pin_body(change.pin)}
        return {"what": change.what, "depths": sorted(change.depths.items())}

    def _change(self, body: dict[str, Any]) -> Change:
        if "depths" in body:
            return TableChange(str(body["what"]), {int(edge): int(depth) for edge, depth in body["depths"]})
        return PinChange(str(body["what"]), self._pin(body["pin"]))
