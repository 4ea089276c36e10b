"""Journal: decisions, what outlives a restart, and the inputs of every turn, kept in SQLite.

Appending only puts an entry into memory; a thread of its own writes batches, so no turn waits for the disk. When
the file cannot be written (full, locked) that is counted and logged once, entries wait up to a bound, and everything
else goes on. Reading writes first what is waiting: a cursor that a reader has seen survives a restart.

A life's turns are numbered; a gap in them tells a replay that some were dropped. Knows nothing about how decisions
come about.
"""

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from controller.journal_counts import JournalCounts
from controller.journal_queue import Entry, Waiting
from controller.journal_read import Record, newest_of_each, remembered, select, standing
from controller.journal_rows import decision_body, dump, turn_body
from controller.journal_store import JournalError, Statement, Store
from controller.turn import Turn
from controller.types import Decision, Verdict

__all__ = ["Journal", "JournalCounts", "JournalError", "Record"]

logger = logging.getLogger("controller.journal")

FLUSH_SECONDS = 0.25
"""Entries wait at most about this long before they are written."""
PRUNE_SECONDS = 60.0
MAX_WAITING = 20_000
"""Entries of each sort kept in memory while the file cannot be written; beyond it the oldest go."""
CLOSE_SECONDS = 5.0

_DECISION = "INSERT INTO decisions VALUES (?, ?, ?, ?, ?, ?)"
_STATE = "INSERT INTO state VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET wall = excluded.wall, body = excluded.body"
_LIFE = "INSERT INTO lives VALUES (?, ?, ?, ?, ?)"
_TURN = "INSERT INTO turns (life, number, wall, kind, body) VALUES (?, ?, ?, ?, ?)"


class Journal:
    """One controller's journal. `append` and its like never block; `read` and its like may (call from a thread)."""

    def __init__(
        self,
        store: Store,
        *,
        wall: Callable[[], float],
        counts: JournalCounts,
        turn_seconds: float = 86_400.0,
        decision_seconds: float = 30 * 86_400.0,
    ) -> None:
        """Take an open store; `begin` must be called before anything else.

        Args:
            store: the file.
            wall: Unix time.
            counts: where failures are counted.
            turn_seconds: how long turns are kept.
            decision_seconds: how long decisions are kept.
        """
        self._store = store
        self._wall = wall
        self._counts = counts
        self._keep = turn_seconds, decision_seconds
        self._cursor = store.highest("decisions")
        self._life = store.highest("lives")
        self._numbers: dict[int, int] = {}
        self._latest = {r.decision.worker: r for r in newest_of_each(store)}
        self._waiting = Waiting(MAX_WAITING, counts.journal_dropped)
        self._records: deque[Record] = deque(maxlen=MAX_WAITING)
        """Decisions that wait to be written."""
        self._pending = threading.Lock()
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self.listeners: list[Callable[[Record], None]] = []
        """Called with each new record, where it was appended."""
        self.failure: str | None = None
        """Why the newest batch could not be written; None: it was."""
        self.epoch = 0
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def begin(self, code_version: str, config: dict[str, Any]) -> int:
        """Note a start with its configuration and start writing; returns the new `controller_epoch`.

        Raises:
            JournalError: the start could not be written down.
        """
        self.epoch = self._store.begin(self._wall(), code_version, dump(config))
        self._counts.journal_state(size_bytes=self._store.size_bytes(), waiting=0)
        self._thread.start()
        return self.epoch

    # ---- appending ----

    def append(self, decision: Decision) -> Record:
        """Add a decision and return its record."""
        with self._pending:
            self._cursor += 1
            record = Record(cursor=self._cursor, wall_seconds=self._wall(), decision=decision)
            self._latest[decision.worker] = record
            self._records.append(record)
            self._waiting.put(lambda: _decision_row(record))
            self._wake.set()
        for listener in self.listeners:
            listener(record)
        return record

    def remember(self, key: str, body: dict[str, Any]) -> None:
        """Keep something over a restart, instead of what was kept under this key."""
        values = key, self._wall(), dump(body)
        with self._pending:
            self._waiting.remember(key, (_STATE, values))
            self._wake.set()

    def begin_life(self, worker: str, body: dict[str, Any]) -> int:
        """Note that a worker was met; returns the number for its turns."""
        with self._pending:
            self._life += 1
            life, values = self._life, (self._life, self.epoch, worker, self._wall(), dump(body))
            self._numbers[life] = 0
            self._waiting.put(lambda: (_LIFE, values))
            self._wake.set()
        return life

    def end_life(self, life: int) -> None:
        """No more turns of this life will come."""
        self._numbers.pop(life, None)

    def turn(self, life: int, turn: Turn, verdicts: Sequence[Verdict]) -> None:
        """Add a turn and what came out of it."""
        kept = tuple(verdicts)
        self._add(life, "turn", lambda: turn_body(turn, kept))

    def step(self, life: int, kind: str, body: Any) -> None:
        """Add something that happened to a life between its turns: `checkpoint`, `end_probe` or `adopt`."""
        text = dump(body)
        self._add(life, kind, lambda: text)

    def _add(self, life: int, kind: str, body: Callable[[], str]) -> None:
        with self._pending:
            self._numbers[life] = number = self._numbers.get(life, 0) + 1
            wall = self._wall()
            self._waiting.put_turn(lambda: (_TURN, (life, number, wall, kind, body())))
            self._wake.set()

    # ---- reading ----

    @property
    def newest(self) -> int:
        """Cursor of the newest decision; 0 before the first."""
        return self._cursor

    def read(self, after: int = 0, limit: int = 100, worker: str | None = None) -> list[Record]:
        """Return up to `limit` of the oldest kept records with a cursor above `after`, oldest first.

        Raises:
            JournalError: the file cannot be read.
        """
        self.flush()
        where, values = ("", [after]) if worker is None else (" AND worker = ?", [after, worker])
        sql = f"SELECT cursor, wall, body FROM decisions WHERE cursor > ?{where} ORDER BY cursor LIMIT ?"
        found = select(self._store, sql, [*values, limit])
        with self._pending:  # what could not be written comes from memory
            newest = found[-1].cursor if found else after
            waiting = [r for r in self._records if r.cursor > newest and worker in (None, r.decision.worker)]
        return (found + waiting)[:limit]

    def latest(self, worker: str) -> Record | None:
        """Return the newest record of a worker, from memory."""
        return self._latest.get(worker)

    def standing(self, worker: str, wall_seconds: float) -> list[Record]:
        """Return what stood at a time: of every kind of record (and slot) of a worker the newest until then.

        Raises:
            JournalError: the file cannot be read.
        """
        self.flush()
        return standing(self._store, worker, wall_seconds)

    def recall(self) -> dict[str, dict[str, Any]]:
        """Return everything remembered, by key.

        Raises:
            JournalError: the file cannot be read.
        """
        return remembered(self._store)

    # ---- writing ----

    def flush(self) -> bool:
        """Write what waits; return whether everything is written. Called from any thread but the event loop's."""
        with self._writing:
            with self._pending:
                batch, newest = self._waiting.take(), self._cursor
            if batch.is_empty:
                return self.failure is None
            try:
                self._store.write([*batch.states.values(), *self._statements([*batch.entries, *batch.turns])])
            except sqlite3.Error as error:
                with self._pending:
                    self._waiting.put_back(batch)
                    waiting = len(self._waiting)
                self._counts.journal_state(size_bytes=self._store.size_bytes(), waiting=waiting)
                self._failed(error)
                return False
            with self._pending:
                while self._records and self._records[0].cursor <= newest:
                    self._records.popleft()
            self._counts.journal_state(size_bytes=self._store.size_bytes(), waiting=0)
            if self.failure is not None:
                self.failure = None
                logger.warning("the journal is written again")
            return True

    def _statements(self, entries: Sequence[Entry]) -> list[Statement]:
        """Encode entries; one that cannot be encoded is a bug of ours and must not stop the others."""
        statements = []
        for entry in entries:
            try:
                statements.append(entry())
            except Exception:
                logger.exception("an entry cannot be written down")
                self._counts.journal_dropped(1)
        return statements

    def _failed(self, error: Exception) -> None:
        self._counts.journal_failed()
        if self.failure is None:
            logger.error("the journal cannot be written, entries wait in memory: %s", error)
        self.failure = f"{type(error).__name__}: {error}"

    def _run(self) -> None:
        next_prune = 0.0
        while not self._ended.is_set():
            self._wake.wait()
            self._ended.wait(FLUSH_SECONDS)  # let a batch come together
            self._wake.clear()
            if not self.flush():
                self._ended.wait(1.0)
                self._wake.set()
            elif self._wall() >= next_prune or self._wall() < next_prune - PRUNE_SECONDS:
                next_prune = self._wall() + PRUNE_SECONDS
                self._prune()

    def _prune(self) -> None:
        turns, decisions = self._keep
        try:
            while not self._ended.is_set():
                now = self._wall()
                if not self._store.prune(turns_before=now - turns, decisions_before=now - decisions):
                    return
        except sqlite3.Error as error:
            self._failed(error)

    def close(self) -> None:
        """Write what waits, as far as that is possible, and close the file."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        self.flush()
        self._store.close()


def _decision_row(record: Record) -> Statement:
    found = record.decision
    body = decision_body(found)
    return _DECISION, (
        record.cursor,
        record.wall_seconds,
        found.worker,
        found.kind,
        found.max_batch_size,
        body,
    )
