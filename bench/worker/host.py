"""Arms in processes of their own, one per engine, asked one at a time.

Engines that share a process disturb each other even while they idle: each has a thread with OpenMP threads of its own,
and once there are more of these than cores, libgomp puts them to sleep between any two kernels. Rounds of the default
model then take twice as long. A worker that serves has one such thread.
"""

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from bench.worker.arms import Arm, Sample
from bench.worker.workloads import Workload

Build = Callable[..., Sequence[Arm]]
"""A module's function that builds arms; called in the process."""


class Host:
    """A process with the arms that `build(**settings)` returns."""

    def __init__(self, build: Build, **settings: Any) -> None:
        """Start it and wait until its arms stand.

        Raises:
            RuntimeError: they could not be built.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, settings), daemon=True)
        self._process.start()
        theirs.close()
        self.arms = [HostedArm(self, name) for name in self._read()]

    def ask(self, arm: str, workload: Workload) -> Any:
        """Run an arm there and return its sample."""
        self._pipe.send((arm, workload))
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()

    def _read(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"an arm's process ended with status {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise RuntimeError(f"an arm failed: {answer}") from answer
        return answer


class HostedArm:
    """See `Arm`; the work is done in its host's process."""

    def __init__(self, host: Host, name: str) -> None:
        self.name = name
        self._host = host

    def run(self, workload: Workload) -> Sample:
        """See `Arm`."""
        sample: Sample = self._host.ask(self.name, workload)
        return sample


def _serve(pipe: Connection, build: Build, settings: dict[str, Any]) -> None:
    """Build, say so, and run what is asked for until the other end closes."""
    arms: dict[str, Arm] = {}

    def work() -> None:
        try:
            arms.update((arm.name, arm) for arm in build(**settings))
        except Exception as error:
            pipe.send(error)

    # As a worker does, on a thread that ends: its OpenMP threads go with it.
    builder = threading.Thread(target=work)
    builder.start()
    builder.join()
    if not arms:
        return
    pipe.send(list(arms))
    while True:
        try:
            name, workload = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(arms[name].run(workload))
        except Exception as error:
            pipe.send(error)
