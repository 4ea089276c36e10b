from controller.journal import MemoryJournal
from controller.types import Decision


def decision(worker: str) -> Decision:
    return Decision(worker=worker, kind="worker", reason="met", message="", outcome="noted", mode="active")


def test_reading_with_a_cursor_sees_everything_once() -> None:
    journal = MemoryJournal(wall=lambda: 5.0)
    for name in "abab":
        journal.append(decision(name))
    first = journal.read(limit=3)
    assert [r.cursor for r in first] == [1, 2, 3] and first[0].wall_seconds == 5.0
    assert [r.cursor for r in journal.read(after=3, limit=3)] == [4]
    assert journal.read(after=4) == []
    assert [r.cursor for r in journal.read(worker="b")] == [2, 4]
    latest = journal.latest("a")
    assert latest is not None and latest.cursor == 3 and journal.latest("c") is None


def test_the_oldest_go_and_the_cursor_goes_on() -> None:
    journal = MemoryJournal(wall=lambda: 0.0, capacity=2)
    for _ in range(5):
        journal.append(decision("a"))
    assert [r.cursor for r in journal.read()] == [4, 5]
