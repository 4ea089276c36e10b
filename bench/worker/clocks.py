"""What a second is: wall time, or on a busy machine the CPU time of the threads that do an arm's work."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

Clock = Callable[[], float]
"""Seconds that only grow."""


def of_threads(*threads: Thread) -> Clock:
    """Return the CPU time that running threads of this process have used together."""

    def now() -> float:
        return sum(
            time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads if thread.ident
        )

    return now


def of_process(pid: int) -> Clock:
    """Return the CPU time of another process with all its threads, in steps of a scheduler tick."""
    ticks = os.sysconf("SC_CLK_TCK")

    def now() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / ticks

    return now
