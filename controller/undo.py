"""Undo: what the last changes of a worker's depth replaced, so that an operator can go back.

A stack per worker life: a rollback takes the newest change off, so a second one goes one change further back. Moot
entries (a pin that has run out meanwhile, a table that is in force already) are passed over. Pure.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from controller.actuate import ActivePin
from controller.types import Depths

MAX_CHANGES = 16


@dataclass(frozen=True)
class TableChange:
    """The policy's (or a rollback's) change of the table; `depths` is the table before."""

    what: str
    depths: Depths


@dataclass(frozen=True)
class PinChange:
    """An operator's pin or its release; `pin` is the pin before, None where there was none."""

    what: str
    pin: ActivePin | None


Change = TableChange | PinChange


@dataclass(frozen=True)
class Hold:
    """After a rollback the policy changes nothing until `until_seconds` (monotonic)."""

    until_seconds: float
    reason: str = ""

    def remaining(self, now: float) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.until_seconds - now)


class UndoStack:
    """The last changes of one worker, newest last."""

    def __init__(self, changes: tuple[Change, ...] = ()) -> None:
        self._changes: deque[Change] = deque(changes, maxlen=MAX_CHANGES)

    @property
    def changes(self) -> tuple[Change, ...]:
        """All that can be undone, oldest first."""
        return tuple(self._changes)

    def push(self, change: Change) -> None:
        """Note a change that was made."""
        self._changes.append(change)

    def drop_last(self) -> None:
        """Forget the newest change: it did not come about, or was undone."""
        if self._changes:
            self._changes.pop()

    def drop_tables(self) -> None:
        """Forget the changes of the table: it is not ours any more."""
        kept = [change for change in self._changes if isinstance(change, PinChange)]
        self._changes = deque(kept, maxlen=MAX_CHANGES)

    def pin_expired(self) -> None:
        """A pin ended by itself: going back to before it was set would change nothing."""
        while self._changes and isinstance(self._changes[-1], PinChange):
            self._changes.pop()

    def newest(self, depths: Mapping[int, int], pin: ActivePin | None, now: float) -> Change | None:
        """Return the newest change whose undoing would change something; moot ones above it are forgotten.

        Args:
            depths: the table in force.
            pin: the pin in force.
            now: monotonic seconds.
        """
        while self._changes:
            change = self._changes[-1]
            if isinstance(change, TableChange):
                if dict(change.depths) != dict(depths) and set(change.depths) == set(depths):
                    return change
            elif change.pin != pin and (pin is not None or (change.pin and change.pin.remaining(now) > 0)):
                return change
            self._changes.pop()
        return None
