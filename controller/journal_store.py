"""Journal store: the SQLite file behind the journal. Rows in by batches, rows out; no queue, no thread of its own.

One connection, one lock, write-ahead logging: a killed process loses no committed batch. A lock file keeps a second
controller off. Opened read-only for people who look into the journal of a running controller. Knows nothing about
what the JSON bodies mean.
"""

import fcntl
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

SCHEMA_VERSION = 1
BUSY_SECONDS = 0.25
"""How long to wait for somebody else's lock before the batch is put off."""

Statement = tuple[str, tuple[Any, ...]]
Row = tuple[Any, ...]

_SCHEMA = """
CREATE TABLE starts (epoch INTEGER PRIMARY KEY, wall REAL NOT NULL, code_version TEXT NOT NULL, config TEXT NOT NULL);
CREATE TABLE decisions (
    cursor INTEGER PRIMARY KEY AUTOINCREMENT, wall REAL NOT NULL, worker TEXT NOT NULL, kind TEXT NOT NULL,
    slot INTEGER, body TEXT NOT NULL
);
CREATE INDEX decisions_of_worker ON decisions (worker, cursor);
CREATE INDEX decisions_by_time ON decisions (wall);
CREATE TABLE state (key TEXT PRIMARY KEY, wall REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE lives (
    life INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, worker TEXT NOT NULL, wall REAL NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE turns (
    place INTEGER PRIMARY KEY AUTOINCREMENT, life INTEGER NOT NULL, number INTEGER NOT NULL, wall REAL NOT NULL,
    kind TEXT NOT NULL, body TEXT NOT NULL
);
CREATE INDEX turns_of_life ON turns (life, place);
CREATE INDEX turns_by_time ON turns (wall);
"""


class JournalError(Exception):
    """The journal's file cannot be used; the message names it."""


class Store:
    """One open journal file (or memory, for `:memory:`). Safe to use from several threads."""

    def __init__(self, path: str) -> None:
        """Open for writing, creating the file and its tables if need be.

        Raises:
            JournalError: not a journal, of a newer version, in use by another controller, or not writable.
        """
        self.path = path
        self._lock = threading.Lock()
        self._lock_file: IO[str] | None = None
        try:
            if path != ":memory:":
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._keep_others_off()
            self._connection = _connect(path)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._prepare()
        except JournalError:
            self.close()
            raise
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise JournalError(f"journal.path: {path}: {error}") from error

    @classmethod
    def read_only(cls, path: str) -> "Store":
        """Open an existing journal for reading, also while a controller writes to it.

        Raises:
            JournalError: not there, not a journal, or of another version.
        """
        store = cls.__new__(cls)
        store.path, store._lock, store._lock_file = path, threading.Lock(), None
        if not Path(path).is_file():
            raise JournalError(f"{path}: not there, or no file")
        try:
            uri = Path(path).absolute().as_uri()
            store._connection = _connect(f"{uri}?mode=ro", is_uri=True)
            version = store._version()
        except sqlite3.Error as error:
            store.close()
            raise JournalError(f"{path}: {error}") from error
        if version != SCHEMA_VERSION:
            store.close()
            raise JournalError(f"{path}: journal version {version}, this program reads {SCHEMA_VERSION}")
        return store

    def write(self, statements: Iterable[Statement]) -> None:
        """Carry out all statements in one transaction, or none of them.

        Raises:
            sqlite3.Error: nothing was written.
        """
        with self._lock, self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for sql, values in statements:
                self._connection.execute(sql, values)

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """Return the rows of a query.

        Raises:
            sqlite3.Error: the file cannot be read.
        """
        with self._lock:
            return self._connection.execute(sql, values).fetchall()

    def begin(self, wall: float, code_version: str, config: str) -> int:
        """Note a start of the controller and return its epoch: above all earlier ones, whatever the clock says.

        Raises:
            JournalError: it could not be written down.
        """
        try:
            ((newest,),) = self.read("SELECT MAX(epoch) FROM starts")
            epoch = max(int(wall * 1000), 1 + (newest or 0))
            self.write([("INSERT INTO starts VALUES (?, ?, ?, ?)", (epoch, wall, code_version, config))])
        except sqlite3.Error as error:
            raise JournalError(f"journal.path: {self.path}: {error}") from error
        return epoch

    def highest(self, table: str) -> int:
        """Return the highest number ever given out in a table (also if its rows are gone); 0 at first."""
        rows = self.read("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,))
        return int(rows[0][0]) if rows else 0

    def prune(self, *, turns_before: float, decisions_before: float, limit: int = 2000) -> int:
        """Delete up to `limit` rows of each kind that are too old; return how many there were.

        Raises:
            sqlite3.Error: nothing was deleted.
        """
        with self._lock, self._connection:
            old = "DELETE FROM {0} WHERE {1} IN (SELECT {1} FROM {0} WHERE wall < ? LIMIT ?)"
            self._connection.execute("BEGIN IMMEDIATE")
            gone = self._connection.execute(old.format("turns", "place"), (turns_before, limit)).rowcount
            gone += self._connection.execute(
                old.format("decisions", "cursor"), (decisions_before, limit)
            ).rowcount
            if gone:
                self._connection.execute(
                    "DELETE FROM lives WHERE wall < ? AND life NOT IN (SELECT life FROM turns)",
                    (turns_before,),
                )
                self._connection.execute(
                    "DELETE FROM starts WHERE wall < ? AND epoch NOT IN (SELECT epoch FROM lives)"
                    " AND epoch < (SELECT MAX(epoch) FROM starts)",
                    (decisions_before,),
                )
        return gone

    def size_bytes(self) -> int:
        """Return the size of the file and its write-ahead log; of a journal in memory, its pages. 0 if it is gone."""
        if self.path == ":memory:":
            ((pages,), (page_size,)) = self.read("PRAGMA page_count") + self.read("PRAGMA page_size")
            return int(pages) * int(page_size)
        return _size(Path(self.path)) + _size(Path(f"{self.path}-wal"))

    def close(self) -> None:
        """Close the file; the lock goes with it."""
        with self._lock:
            if hasattr(self, "_connection"):
                self._connection.close()
        if self._lock_file is not None:
            self._lock_file.close()

    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    def _prepare(self) -> None:
        version = self._version()
        if version > SCHEMA_VERSION:
            raise JournalError(
                f"journal.path: {self.path} has version {version}, written by a newer program; "
                f"this one knows {SCHEMA_VERSION}"
            )
        if version == 0:
            tables = self._connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0]
            if tables:
                raise JournalError(f"journal.path: {self.path} is a database, but no journal")
            self._connection.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )

    def _keep_others_off(self) -> None:
        # SQLite would let a second controller write too; both would give out the same cursors.
        lock_file = open(f"{self.path}.lock", "w")  # noqa: SIM115 - held until close
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock_file.close()
            raise JournalError(f"journal.path: {self.path} is in use by another controller") from error
        self._lock_file = lock_file


def _connect(target: str, *, is_uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(
        target, uri=is_uri, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )


def _size(file: Path) -> int:
    """A disk that is in trouble must not end the thread that writes the journal."""
    try:
        return file.stat().st_size
    except OSError:
        return 0
