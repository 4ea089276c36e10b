"""Schemathesis against real processes: every OpenAPI document, what it promises and what it forbids.

Run by `make check-api`, which installs schemathesis apart and names it in SCHEMATHESIS; skipped without.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

SCHEMATHESIS = os.environ.get("SCHEMATHESIS", "")
MAX_EXAMPLES = os.environ.get("MAX_EXAMPLES", "25")
CONFIG = Path(__file__).with_name("schemathesis.toml")
TOKEN, KEY = "a-token", "a-key"

pytestmark = [
    pytest.mark.skipif(not SCHEMATHESIS, reason="SCHEMATHESIS names no executable; see `make check-api`"),
    pytest.mark.timeout(1800),
]


class Worker:
    """A `spec-worker` process with a tiny model, its log in a file."""

    def __init__(self, log: Path, **settings: str) -> None:
        environment = {
            "MODEL__THREADS": "1", "MODEL__DTYPE": "float64", "MODEL__DEVICE": "cpu", "MODEL__NAME": "tiny",
            "ENGINE__MAX_CONTEXT_TOKENS": "2048", "ENGINE__PROFILE_SECONDS": "0",
            "SERVER__PORT": "0", "SERVER__CONTROL_PORT": "0", **settings,
        }  # fmt: skip
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "import sys; from worker.cli import main; sys.exit(main())", "run"],
                env=os.environ | {f"SPEC_WORKER_{name}": value for name, value in environment.items()},
                stderr=output,
            )
        self.inference, self.control = self._url("inference"), self._url("control")

    def _url(self, listener: str) -> str:
        give_up = time.monotonic() + 120
        while not (found := re.search(rf"{listener} +(http://[\d.:]+)", self.log.read_text())):
            assert self.process.poll() is None and time.monotonic() < give_up, self.log.read_text()
            time.sleep(0.1)
        return found[1]


Start = Callable[..., Worker]


@pytest.fixture
def start(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> Iterator[Start]:
    started: list[Worker] = []

    def make(**settings: str) -> Worker:
        model = {"MODEL__PATH": str(tiny_model_dir(max_positions=2048))}
        started.append(Worker(tmp_path / "worker.log", **model, **settings))
        return started[-1]

    yield make
    for worker in started:
        worker.process.terminate()
        assert worker.process.wait(60) == 0, worker.log.read_text()


def check(url: str, token: str | None = None) -> None:
    header = [] if token is None else ["-H", f"Authorization: Bearer {token}"]
    result = subprocess.run(
        [
            SCHEMATHESIS, "--config-file", str(CONFIG), "run", f"{url}/openapi.json", *header,
            "--phases", "examples,coverage,fuzzing,stateful", "--max-examples", MAX_EXAMPLES, "--seed", "1",
            "--continue-on-failure", "--request-timeout", "120",
            "--warnings", "off", "--generation-database", "none", "--no-color",
        ],
        capture_output=True,
        text=True,
    )  # fmt: skip
    # Findings can quote whole bodies: the ends of their lines are of no use.
    report = "\n".join(line[:2000] for line in result.stdout.splitlines())
    sys.stdout.write(report[-4000:])
    assert result.returncode == 0, report + result.stderr[-2000:]


@pytest.mark.parametrize("listener", ["inference", "control"])
def test_nothing_is_found(start: Start, listener: str) -> None:
    worker = start()
    check(getattr(worker, listener))
    health = httpx.get(f"{worker.inference}/readyz")
    assert health.status_code == 200, "still well after all that"
    queue = httpx.get(f"{worker.control}/v1/spec/stats").json()["queue"]
    assert (queue["running"], queue["waiting"]) == (0, 0), "and nothing is left over"
    assert "Traceback" not in worker.log.read_text()


@pytest.mark.parametrize("listener", ["inference", "control"])
def test_nothing_is_found_behind_a_token(start: Start, listener: str) -> None:
    worker = start(SERVER__API_KEY=KEY, SERVER__CONTROL_TOKEN=TOKEN)
    check(getattr(worker, listener), KEY if listener == "inference" else TOKEN)
