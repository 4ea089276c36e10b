"""Schemathesis against the controller's OpenAPI document, with a simulated worker behind it that really answers.

Run by `make check-api`; skipped without SCHEMATHESIS.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from controller.app import create_app
from controller.clock import SystemClock
from controller.config import ControllerConfig

SCHEMATHESIS = os.environ.get("SCHEMATHESIS", "")
MAX_EXAMPLES = os.environ.get("MAX_EXAMPLES", "25")
CONFIG = Path(__file__).with_name("schemathesis.controller.toml")
TOKEN = "a-token-for-this-check"

pytestmark = [
    pytest.mark.skipif(not SCHEMATHESIS, reason="SCHEMATHESIS names no executable; see `make check-api`"),
    pytest.mark.timeout(1800),
]


def simulated_worker() -> Any:
    """The simulated worker of the controller's own tests."""
    name = "simulated_worker"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "controller" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    module = sys.modules[name]
    return module.SimulatedWorker(module.VirtualClock())


@pytest.fixture(params=[{}, {"token": TOKEN}], ids=["open", "token"])
def controller(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, str], Any]]:
    config = ControllerConfig.model_validate(
        {
            "server": request.param,
            "loop": {"poll_interval_seconds": 0.05, "confirm_timeout_seconds": 0.05},
            "journal": {"path": str(tmp_path / "journal.sqlite3")},
            "workers": [{"id": "a", "url": "http://a:1"}],
        }
    )
    registry = CollectorRegistry()
    app = create_app(config, clock=SystemClock(), registry=registry, clients={"a": simulated_worker()})
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    give_up = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive() and time.monotonic() < give_up
        time.sleep(0.05)
    headers = {"Authorization": f"Bearer {TOKEN}"} if request.param else {}
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", headers, app
    server.should_exit = True
    thread.join(60)
    listener.close()
    assert not thread.is_alive()


def test_nothing_is_found(controller: tuple[str, dict[str, str], Any], caplog: Any) -> None:
    url, headers, app = controller
    options = [option for name, value in headers.items() for option in ("-H", f"{name}: {value}")]
    result = subprocess.run(
        [
            SCHEMATHESIS, "--config-file", str(CONFIG), "run", f"{url}/openapi.json", *options,
            "--phases", "examples,coverage,fuzzing,stateful", "--max-examples", MAX_EXAMPLES, "--seed", "1",
            "--continue-on-failure", "--request-timeout", "120",
            # An answer without an end cannot be waited for; tests/controller/test_feed.py has the stream.
            "--exclude-path", "/v1/events",
            "--warnings", "off", "--generation-database", "none", "--no-color",
        ],
        capture_output=True,
        text=True,
    )  # fmt: skip
    report = "\n".join(line[:2000] for line in result.stdout.splitlines())
    sys.stdout.write(report[-4000:])
    assert result.returncode == 0, report + result.stderr[-2000:]
    httpx.put(f"{url}/v1/mode", json={"mode": "active"}, headers=headers).raise_for_status()
    answer = httpx.put(f"{url}/v1/workers/a/depth", json={"num_steps": 3}, headers=headers)
    assert answer.status_code == 200, "still well after all that"
    assert "Traceback" not in caplog.text and app.state.journal.failure is None
