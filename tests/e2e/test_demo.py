"""The demo as a person runs it, with a tiny model in place of the default one: nothing it started survives it."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARK = "SLIPSTREAM_TEST_MARK"
"""An environment variable that all processes of one demo inherit; it has no other meaning."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


class Demo:
    """A running demo and the processes that it started."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.demo", *arguments],
            cwd=ROOT,
            env={**os.environ, **environment, MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"{text!r} was never printed:\n{self.output}")

    def finish(self) -> int:
        assert self.process.stdout is not None
        if not self.process.stdout.closed:
            with self.process.stdout as pipe:
                self.output += pipe.read()
        return self.process.wait()

    def processes(self, program: str = "") -> list[int]:
        """Return living processes of this demo whose command line contains `program`."""
        mark = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().decode()
                    found += [int(entry.name)] if program in command else []
            except OSError:
                continue  # It ended while we looked.
        return found

    def assert_nothing_survives(self) -> None:
        deadline = time.monotonic() + 20
        while left := self.processes():
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.05)


StartDemo = Callable[..., Demo]


@pytest.fixture
def start_demo(tiny_model_dir: Callable[..., Path]) -> Iterator[StartDemo]:
    environment = {
        "SPEC_WORKER_MODEL__PATH": str(tiny_model_dir(max_positions=2048)),
        "SPEC_WORKER_MODEL__DEVICE": "cpu",
        "SPEC_WORKER_MODEL__THREADS": "1",
        "SPEC_CONTROLLER_JOURNAL__PATH": ":memory:",
    }
    demos: list[Demo] = []

    def start(*arguments: str, **extra: str) -> Demo:
        demos.append(Demo({**environment, **extra}, *arguments))
        return demos[-1]

    yield start
    for demo in demos:
        demo.process.kill()
        demo.finish()
        for pid in demo.processes():
            os.kill(pid, signal.SIGKILL)


def test_a_short_demo_shows_every_phase_and_ends_by_itself(start_demo: StartDemo) -> None:
    demo = start_demo("--duration", "15")
    assert demo.finish() == 0, demo.output
    for label in ("predictable ×1", "chat ×4", "prose ×8"):
        assert f"phase: {label}" in demo.output
        assert demo.output.rindex(label) > demo.output.index("Summary"), demo.output
    assert "decision " in demo.output
    demo.assert_nothing_survives()


def test_ctrl_c_ends_everything_in_order(start_demo: StartDemo) -> None:
    demo = start_demo("--no-traffic")
    demo.read_until("Ctrl-C ends everything")
    assert len(demo.processes("spec-")) == 2
    demo.process.send_signal(signal.SIGINT)
    assert demo.finish() == 0, demo.output
    demo.assert_nothing_survives()


def test_a_dead_worker_ends_the_demo_with_status_1(start_demo: StartDemo) -> None:
    demo = start_demo("--duration", "60")
    demo.read_until("phase: ")
    (worker,) = demo.processes("spec-worker")
    os.kill(worker, signal.SIGKILL)
    assert demo.finish() == 1
    assert "the worker was killed by signal 9" in demo.output, demo.output
    assert "Logs are kept in" in demo.output
    demo.assert_nothing_survives()


def test_nothing_survives_a_killed_demo(start_demo: StartDemo) -> None:
    demo = start_demo("--no-traffic")
    demo.read_until("Ctrl-C ends everything")
    demo.process.kill()
    demo.assert_nothing_survives()


def test_a_worker_that_cannot_start_is_reported_with_its_reason(
    start_demo: StartDemo, tmp_path: Path
) -> None:
    demo = start_demo("--no-traffic", SPEC_WORKER_MODEL__PATH=str(tmp_path / "nothing-here"))
    assert demo.finish() == 1
    assert "the worker ended with status 1" in demo.output and "nothing-here" in demo.output
    demo.assert_nothing_survives()


def test_a_bad_configuration_names_the_field(start_demo: StartDemo) -> None:
    demo = start_demo("--no-traffic", SPEC_WORKER_ENGINE__MAX_RUNNING_REQUESTS="0")
    assert demo.finish() == 1
    assert "max_running_requests" in demo.output


@pytest.mark.parametrize("program", ["worker", "controller"])
def test_a_missing_configuration_is_not_taken_for_an_empty_one(start_demo: StartDemo, program: str) -> None:
    demo = start_demo("--no-traffic", f"--{program}-config", "nowhere.toml")
    assert demo.finish() == 1
    assert "nowhere.toml: not there" in demo.output


@pytest.mark.parametrize("duration", ["5", "soon", "inf", "nan"])
def test_a_bad_duration_is_refused(start_demo: StartDemo, duration: str) -> None:
    demo = start_demo("--duration", duration)
    assert demo.finish() == 2
    assert "must be" in demo.output
