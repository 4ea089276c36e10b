"""Journal: the append-only record of decisions, read with a cursor.

In memory for now, bounded: the oldest records go when it is full, and a gap in the cursors tells a reader. A
journal on disk implements the same two methods. Knows nothing about how decisions come about.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from controller.types import Decision


@dataclass(frozen=True, kw_only=True)
class Record:
    """A decision with its place in the journal."""

    cursor: int
    """Rises by 1 with each record, from 1."""
    wall_seconds: float
    """Unix time."""
    decision: Decision


class Journal(Protocol):
    """Where decisions go. Append-only; cursors are never used twice."""

    def append(self, decision: Decision) -> Record:
        """Add a decision and return its record."""
        ...

    def read(self, after: int = 0, limit: int = 100, worker: str | None = None) -> list[Record]:
        """Return up to `limit` of the oldest kept records with a cursor above `after`, oldest first."""
        ...

    def latest(self, worker: str) -> Record | None:
        """Return the newest kept record of a worker."""
        ...


class MemoryJournal:
    """A ring of the last `capacity` records."""

    def __init__(self, *, wall: Callable[[], float], capacity: int = 10_000) -> None:
        self._wall = wall
        self._records: deque[Record] = deque(maxlen=capacity)
        self._latest: dict[str, Record] = {}
        self._cursor = 0

    def append(self, decision: Decision) -> Record:
        """See `Journal.append`."""
        self._cursor += 1
        record = Record(cursor=self._cursor, wall_seconds=self._wall(), decision=decision)
        self._records.append(record)
        self._latest[decision.worker] = record
        return record

    def read(self, after: int = 0, limit: int = 100, worker: str | None = None) -> list[Record]:
        """See `Journal.read`."""
        found: list[Record] = []
        for record in self._records:
            if len(found) == limit:
                break
            if record.cursor > after and worker in (None, record.decision.worker):
                found.append(record)
        return found

    def latest(self, worker: str) -> Record | None:
        """See `Journal.latest`."""
        return self._latest.get(worker)
