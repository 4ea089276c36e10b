"""Child processes that never outlive the demo, free ports, and the terminal's Ctrl-C.

Each child is the leader of its own process group (a Ctrl-C at the terminal reaches only the demo, which then
stops them in order) and on Linux asks the kernel to be killed when its parent dies, however that happens.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

PR_SET_PDEATHSIG = 1
STOP_SECONDS = 10.0
"""Time that children get between SIGTERM and SIGKILL."""


class DemoError(Exception):
    """The demo cannot go on; the message is for the person who started it."""


@dataclass
class Child:
    """A running child and the file that takes its output."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise DemoError if the process has ended."""
        status = self.process.poll()
        if status is not None:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise DemoError(f"the {self.name} {how}; the end of {self.log}:\n{self.tail()}")

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of the log, indented."""
        text = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in text[-lines:]) or "  (empty)"


@dataclass
class Children:
    """All children; leaving the context stops every one of them."""

    log_directory: Path
    running: list[Child] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start a process in its own session, with stdout and stderr in `<log_directory>/<name>.log`."""
        log = self.log_directory / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        child = Child(name, process, log)
        self.running.append(child)
        return child

    def check(self) -> None:
        """Raise DemoError if a child has ended."""
        for child in self.running:
            child.check()

    def stop(self) -> None:
        """Ask every process group to end, newest first; kill what is left after `STOP_SECONDS`."""
        for child in reversed(self.running):
            _signal_group(child.process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for child in self.running:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            _signal_group(child.process, signal.SIGKILL)
            child.process.wait()
        self.running.clear()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # Nobody is left in the group (EPERM: on macOS).
        os.killpg(process.pid, number)


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """Return what the child runs before exec: SIGKILL me when my parent dies. None where it cannot be asked."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # It died before we asked.
            os._exit(1)

    return ask


def port_or_free(host: str, wanted: int, taken: set[int]) -> int:
    """Return `wanted` if it can be bound on `host`, else a free port; never one of `taken`, to which it is added."""
    for candidate in (wanted, *([0] * 20)):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, candidate))
            except OSError:
                continue
            port: int = probe.getsockname()[1]
        if port not in taken:
            taken.add(port)
            return port
    raise DemoError(f"no free port on {host}")


@contextmanager
def own_foreground() -> Iterator[None]:
    """Take the terminal's Ctrl-C for this process alone while the context lasts.

    `make` would see it too, and report an interrupted target with a status of its own although the demo ended in
    order. So where a terminal is there and ours, this process becomes a process group in its foreground. Ctrl-Z
    is switched off meanwhile: it would stop us and leave make waiting.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDWR)
    except OSError:
        yield
        return
    try:
        before = os.tcgetpgrp(terminal)
        if before != os.getpgrp() or os.getpgrp() == os.getpid():
            yield  # In the background, or a group of our own already.
            return
        handlers = {
            number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTTOU, signal.SIGTSTP)
        }
        os.setpgid(0, 0)
        os.tcsetpgrp(terminal, os.getpgrp())
        try:
            yield
        finally:
            os.tcsetpgrp(terminal, before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
    finally:
        os.close(terminal)
