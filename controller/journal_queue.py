"""What waits to be written to the journal: bounded, in order. Not for several threads: the journal's lock guards it.

Entries are functions, so that whoever writes encodes them, not whoever appends. Knows nothing about files.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from controller.journal_store import Statement

Entry = Callable[[], Statement]


@dataclass(frozen=True)
class Batch:
    """Everything that waited at one moment."""

    states: dict[str, Statement]
    entries: Sequence[Entry]
    turns: Sequence[Entry]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.states or self.entries or self.turns)


class Waiting:
    """Decisions and lives, turns, and what is to be remembered. Beyond `limit` of a sort its oldest go."""

    def __init__(self, limit: int, dropped: Callable[[int], None]) -> None:
        """Begin empty; `dropped` is told how many entries were given up."""
        self._limit = limit
        self._dropped = dropped
        self._states: dict[str, Statement] = {}
        """By key, the newest wins. Never given up: a pin or mode is said only once, and there are few keys."""
        self._entries: deque[Entry] = deque()
        self._turns: deque[Entry] = deque()

    def __len__(self) -> int:
        return len(self._states) + len(self._entries) + len(self._turns)

    def remember(self, key: str, statement: Statement) -> None:
        """Add what replaces an earlier statement under the same key."""
        self._states[key] = statement

    def put(self, entry: Entry) -> None:
        """Add a decision or the beginning of a life."""
        self._entries.append(entry)
        self._trim(self._entries)

    def put_turn(self, entry: Entry) -> None:
        """Add a turn or a step between turns."""
        self._turns.append(entry)
        self._trim(self._turns)

    def take(self) -> Batch:
        """Take everything out."""
        batch = Batch(self._states, tuple(self._entries), tuple(self._turns))
        self._states = {}
        self._entries.clear()
        self._turns.clear()
        return batch

    def put_back(self, batch: Batch) -> None:
        """Let a batch that could not be written wait again, before what came meanwhile."""
        self._states = batch.states | self._states
        for queue, taken in ((self._entries, batch.entries), (self._turns, batch.turns)):
            queue.extendleft(reversed(taken))
            self._trim(queue)

    def _trim(self, queue: deque[Entry]) -> None:
        excess = len(queue) - self._limit
        for _ in range(excess):
            queue.popleft()
        if excess > 0:
            self._dropped(excess)
