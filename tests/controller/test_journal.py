"""The journal's file: cursors, retention, failures that stop nobody, starts."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.journal import Journal, JournalError
from controller.journal_store import Store
from controller.types import Decision, TierScore


def decision(worker: str, **fields: Any) -> Decision:
    defaults: dict[str, Any] = {
        "kind": "worker", "reason": "met", "message": "", "outcome": "noted", "mode": "active",
    }  # fmt: skip
    return Decision(worker=worker, **{**defaults, **fields})


class Counts:
    """What the journal counted."""

    def __init__(self) -> None:
        self.failed = self.dropped = 0

    def journal_failed(self) -> None:
        self.failed += 1

    def journal_dropped(self, count: int) -> None:
        self.dropped += count

    def journal_state(self, *, size_bytes: int, waiting: int) -> None:
        self.size_bytes, self.waiting = size_bytes, waiting


class Desk:
    """Opens journals on one file, at a time that moves when told to."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.wall = 1_790_000_000.0
        self.counts = Counts()
        self.opened: list[Journal] = []

    def open(self, **keep: float) -> Journal:
        journal = Journal(Store(self.path), wall=lambda: self.wall, counts=self.counts, **keep)
        journal.begin("test", {})
        self.opened.append(journal)
        return journal

    def rows(self, sql: str) -> list[Any]:
        database = sqlite3.connect(self.path)
        try:
            return database.execute(sql).fetchall()
        finally:
            database.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "data" / "journal.sqlite3")
    yield desk
    for journal in desk.opened:
        journal.close()


def cursors(journal: Journal, *arguments: Any, **named: Any) -> list[int]:
    return [record.cursor for record in journal.read(*arguments, **named)]


def test_reading_with_a_cursor_sees_everything_once(desk: Desk) -> None:
    journal = desk.open()
    for name in "abab":
        journal.append(decision(name))
    assert cursors(journal, limit=3) == [1, 2, 3]
    assert desk.rows("SELECT COUNT(*) FROM decisions") == [(4,)], "what was shown is on disk"
    assert cursors(journal, 3, 3) == [4] and cursors(journal, 4) == []
    assert cursors(journal, worker="b") == [2, 4]
    latest = journal.latest("a")
    assert latest is not None and latest.cursor == 3 and latest.wall_seconds == desk.wall
    assert journal.latest("c") is None


def test_a_record_comes_back_as_it_was(desk: Desk) -> None:
    journal = desk.open()
    whole = decision(
        "a",
        kind="depth",
        max_batch_size=4,
        num_steps_before=3,
        num_steps=0,
        scores=(TierScore(num_steps=0, score=0.1 + 0.2, sd=None), TierScore(num_steps=1, score=None)),
        inputs={"mean": 1 / 3},
        observed={"seconds": 5.0, "cells": [{"num_steps": 3, "correct": [1, 2]}]},
        estimate={"rounds": 7},
        message="ü \ud800",
    )
    journal.append(whole)
    assert journal.read()[0].decision == whole


def test_cursors_go_on_after_a_restart_also_when_the_records_are_gone(desk: Desk) -> None:
    journal = desk.open()
    for _ in range(3):
        journal.append(decision("a"))
    journal.close()
    journal = desk.open()
    assert cursors(journal) == [1, 2, 3] and journal.latest("a") == journal.read()[-1]
    assert journal.append(decision("a")).cursor == 4
    journal.close()
    database = sqlite3.connect(desk.path)
    with database:
        database.execute("DELETE FROM decisions")
    database.close()
    assert desk.open().append(decision("a")).cursor == 5


def test_epochs_grow_with_each_start_also_when_the_clock_goes_back(desk: Desk) -> None:
    epochs = []
    for step in (0.0, 10.0, -86_400.0, 0.0):
        desk.wall += step
        journal = desk.open()
        epochs.append(journal.epoch)
        journal.close()
    assert epochs == sorted(set(epochs)) and epochs[0] == 1_790_000_000_000


def test_old_rows_go_and_new_ones_stay(desk: Desk, turn_of: Callable[..., Any]) -> None:
    journal = desk.open(turn_seconds=100, decision_seconds=1000)
    first = journal.begin_life("a", {})
    for _ in range(5000):
        journal.turn(first, turn_of(), ())
    journal.append(decision("a"))
    journal.flush()
    desk.wall += 200
    second = journal.begin_life("a", {})
    journal.turn(second, turn_of(), ())
    journal.flush()
    journal._prune()
    assert desk.rows("SELECT DISTINCT life FROM turns") == [(second,)]
    assert desk.rows("SELECT life FROM lives") == [(second,)] and cursors(journal) == [1]
    desk.wall += 900
    journal._prune()
    assert cursors(journal) == []


def test_what_is_remembered_comes_back(desk: Desk) -> None:
    journal = desk.open()
    journal.remember("x", {"a": 1})
    journal.remember("x", {"a": 2})
    journal.close()
    assert desk.open().recall() == {"x": {"a": 2}}


# ---- failures ----


def fill(journal: Journal, pages: int) -> None:
    """Leave the file no room to grow, as a full disk does."""
    connection = journal._store._connection
    used = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {used + pages}")


def test_a_file_whose_size_cannot_be_told_is_written_all_the_same(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = desk.open()
    journal.append(decision("a"))

    def trouble(self: Path, **_: Any) -> Any:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", trouble)
        assert journal.flush() and desk.counts.size_bytes == 0
    assert desk.rows("SELECT COUNT(*) FROM decisions") == [(1,)]


def test_a_full_disk_is_counted_said_once_and_stops_nobody(desk: Desk, caplog: Any) -> None:
    journal = desk.open()
    fill(journal, 0)
    for _ in range(300):
        journal.append(decision("a", message="x" * 500))
    assert not journal.flush() and not journal.flush()
    assert desk.counts.failed >= 2 and "full" in str(journal.failure)
    assert caplog.text.count("cannot be written") == 1
    assert desk.counts.waiting == 300
    assert cursors(journal, 0, 1000) == list(range(1, 301)), "read from memory"
    fill(journal, 10_000)
    before = desk.counts.size_bytes
    assert journal.flush() and journal.failure is None and "written again" in caplog.text
    assert desk.counts.waiting == 0
    assert desk.counts.size_bytes > before and desk.counts.size_bytes > 300 * 500
    assert desk.rows("SELECT COUNT(*) FROM decisions") == [(300,)]
    assert cursors(journal, 0, 1000) == list(range(1, 301))


def test_a_locked_file_puts_the_batch_off(desk: Desk) -> None:
    journal = desk.open()
    other = sqlite3.connect(desk.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal.append(decision("a"))
    assert not journal.flush() and cursors(journal) == [1]
    other.execute("ROLLBACK")
    other.close()
    assert journal.flush() and desk.rows("SELECT cursor FROM decisions") == [(1,)]


def test_what_waits_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.journal.MAX_WAITING", 10)
    journal = desk.open()
    with journal._writing:
        for _ in range(25):
            journal.append(decision("a"))
    assert desk.counts.dropped == 15
    assert cursors(journal) == list(range(16, 26))


def test_what_a_failed_write_puts_back_is_bounded_too(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.journal.MAX_WAITING", 10)
    journal = desk.open()
    life = journal.begin_life("a", {})
    assert journal.flush()
    write = journal._store.write

    def fail(statements: Any) -> None:
        for _ in range(8):  # more come while the disk is waited for
            journal.append(decision("b"))
            journal.step(life, "end_probe", None)
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr(journal._store, "write", fail)
    journal.append(decision("a"))
    for _ in range(5):
        assert not journal.flush()
        assert len(journal._waiting) <= 20, "ten of each sort"
    monkeypatch.setattr(journal._store, "write", write)
    assert journal.flush() and desk.counts.dropped == 41 - 10 + 40 - 10
    assert cursors(journal) == list(range(32, 42)), "the newest stay"


def test_what_is_remembered_is_never_given_up(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.journal.MAX_WAITING", 10)
    journal = desk.open()
    fill(journal, 0)
    with journal._writing:
        for number in range(3):
            journal.remember("x", {"a": number, "long": "x" * 5000})
        for _ in range(25):
            journal.append(decision("a", message="x" * 500))
    assert not journal.flush() and desk.counts.waiting == 11
    journal.remember("x", {"a": 3})
    assert not journal.flush() and desk.counts.waiting == 11
    fill(journal, 10_000)
    assert journal.flush() and journal.recall() == {"x": {"a": 3}}


def test_an_entry_that_cannot_be_written_takes_no_other_with_it(desk: Desk, caplog: Any) -> None:
    journal = desk.open()
    journal.append(decision("a", inputs={"bad": object()}))
    journal.append(decision("b"))
    assert journal.flush() and desk.counts.dropped == 1 and "cannot be written down" in caplog.text
    assert cursors(journal) == [2]


def test_appending_waits_for_nothing(desk: Desk) -> None:
    journal = desk.open()
    with journal._writing, journal._store._lock:  # the disk hangs
        done = threading.Thread(target=lambda: [journal.append(decision("a")) for _ in range(100)])
        done.start()
        done.join(20)
        assert not done.is_alive() and journal.latest("a") is not None


def test_a_second_controller_is_kept_off(desk: Desk) -> None:
    desk.open()
    with pytest.raises(JournalError, match=r"journal.path: .* in use by another controller"):
        Store(desk.path)


def test_a_reader_is_not(desk: Desk) -> None:
    journal = desk.open()
    journal.append(decision("a"))
    journal.flush()
    reader = Store.read_only(desk.path)
    assert reader.read("SELECT cursor FROM decisions") == [(1,)]
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.write([("DELETE FROM decisions", ())])
    reader.close()


def test_other_files_are_refused_by_name(tmp_path: Path, desk: Desk) -> None:
    desk.open().close()
    database = sqlite3.connect(desk.path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    foreign = tmp_path / "foreign"
    database = sqlite3.connect(foreign)
    database.execute("CREATE TABLE t (x)")
    database.close()
    junk = tmp_path / "junk"
    junk.write_bytes(b"junk" * 1000)
    for path, said in ((desk.path, "version 99"), (foreign, "no journal"), (junk, "not a database")):
        with pytest.raises(JournalError, match=said):
            Store(str(path))
    with pytest.raises(JournalError, match=r"journal\.path"):
        Store(str(junk / "below"))
