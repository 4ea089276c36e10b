"""What the journal reports about itself, and to whom: counters of failures and its size. An interface only."""

from typing import Protocol


class JournalCounts(Protocol):
    """Where failures are counted (see `ControllerMetrics`). Called from any thread."""

    def journal_failed(self) -> None:
        """Count a batch that could not be written."""
        ...

    def journal_dropped(self, count: int) -> None:
        """Count entries that were given up."""
        ...

    def journal_state(self, *, size_bytes: int, waiting: int) -> None:
        """Set what the journal takes on disk, and how many entries wait after the newest attempt to write."""
        ...
