"""Reading the journal: records out of the store, of a running controller or of a file. Writes nothing."""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from controller.journal_rows import decision_from
from controller.journal_store import JournalError, Store
from controller.types import Decision


@dataclass(frozen=True, kw_only=True)
class Record:
    """A decision with its place in the journal."""

    cursor: int
    """Rises with each record; never used twice."""
    wall_seconds: float
    """Unix time."""
    decision: Decision


def select(store: Store, sql: str, values: Sequence[Any]) -> list[Record]:
    """Return the records of a query for cursor, wall and body.

    Raises:
        JournalError: the file cannot be read.
    """
    try:
        rows = store.read(sql, values)
        return [Record(cursor=c, wall_seconds=wall, decision=decision_from(body)) for c, wall, body in rows]
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise JournalError(f"{store.path}: {error}") from error


def standing(store: Store, worker: str, wall_seconds: float) -> list[Record]:
    """Return what stood at a time: of every kind of record (and slot) of a worker the newest until then.

    Raises:
        JournalError: the file cannot be read.
    """
    newest = "SELECT MAX(cursor) FROM decisions WHERE worker = ? AND wall <= ? GROUP BY kind, slot"
    sql = f"SELECT cursor, wall, body FROM decisions WHERE cursor IN ({newest}) ORDER BY cursor"
    return select(store, sql, (worker, wall_seconds))


def newest_of_each(store: Store) -> list[Record]:
    """Return every worker's newest record.

    Raises:
        JournalError: the file cannot be read.
    """
    newest = "SELECT MAX(cursor) FROM decisions GROUP BY worker"
    return select(store, f"SELECT cursor, wall, body FROM decisions WHERE cursor IN ({newest})", ())


def remembered(store: Store) -> dict[str, dict[str, Any]]:
    """Return what is to outlive a restart, by key.

    Raises:
        JournalError: the file cannot be read.
    """
    try:
        return {key: json.loads(body) for key, body in store.read("SELECT key, body FROM state")}
    except (sqlite3.Error, ValueError) as error:
        raise JournalError(f"journal.path: {store.path}: {error}") from error
