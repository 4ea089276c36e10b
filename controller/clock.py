"""Time as a dependency: monotonic seconds for durations, wall seconds for people."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks that must not be mixed."""

    def monotonic(self) -> float:
        """Seconds that only grow; the only clock that decisions and time limits use."""
        ...

    def wall(self) -> float:
        """Seconds since 1970 (Unix time); for records and answers, never for durations."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    def wall(self) -> float:
        """Return `time.time()`."""
        return time.time()
