"""Real processes killed without warning: streams go on, plans lapse, and the controller finds its worker again."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

TTL_SECONDS = 2.0
PROMPT = list(range(40, 60)) * 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(question: Callable[[], Any], seconds: float = 40.0) -> Any:
    """Ask until the answer is true; a refused connection counts as no."""
    ends = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.TransportError):
            if answer := question():
                return answer
        assert time.monotonic() < ends, "gave up waiting"
        time.sleep(0.05)


class Pair:
    """A worker and a controller as two processes on ports of their own."""

    def __init__(self, directory: Path, model: Path) -> None:
        self._directory = directory
        ports = [free_port() for _ in range(3)]
        self.worker_url, self.control_url, self.controller_url = (f"http://127.0.0.1:{p}" for p in ports)
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SPEC_WORKER_MODEL__PATH": str(model),
            "SPEC_WORKER_MODEL__DTYPE": "float64",
            "SPEC_WORKER_MODEL__THREADS": "1",
            "SPEC_WORKER_SPEC__CANDIDATE_STEPS": "[0, 1, 3]",
            "SPEC_WORKER_SPEC__NUM_STEPS": "1",
            "SPEC_WORKER_ENGINE__PROFILE_SECONDS": "0",
            "SPEC_WORKER_ENGINE__MAX_CONTEXT_TOKENS": "512",
            "SPEC_WORKER_SERVER__PORT": str(ports[0]),
            "SPEC_WORKER_SERVER__CONTROL_PORT": str(ports[1]),
            "SPEC_CONTROLLER_SERVER__PORT": str(ports[2]),
            "SPEC_CONTROLLER_LOOP__PLAN_TTL_SECONDS": str(TTL_SECONDS),
            "SPEC_CONTROLLER_WORKERS": json.dumps([{"id": "w", "url": self.control_url}]),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        program = Path(sys.executable).with_name(f"spec-{name}")
        log = (self._directory / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            [program, "run"], env=self.environment, cwd=self._directory, stdout=log, stderr=log
        )
        log.close()
        url = self.worker_url if name == "worker" else self.controller_url
        wait_for(lambda: self.processes[name].poll() is not None or httpx.get(f"{url}/readyz").is_success)
        assert self.processes[name].poll() is None, (self._directory / f"{name}.log").read_text()

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(10)

    def plan(self) -> dict[str, Any]:
        return httpx.get(f"{self.control_url}/v1/spec/plan").raise_for_status().json()

    def worker_entry(self) -> dict[str, Any]:
        (entry,) = httpx.get(f"{self.controller_url}/v1/workers").raise_for_status().json()["workers"]
        return entry

    def pin(self, num_steps: int) -> httpx.Response:
        return httpx.put(
            f"{self.controller_url}/v1/workers/w/depth", json={"num_steps": num_steps, "ttl_seconds": 60}
        )

    def generate(self, max_new_tokens: int) -> list[int]:
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True},
        }
        answer = httpx.post(f"{self.worker_url}/generate", json=body, timeout=60)
        return answer.raise_for_status().json()["output_ids"]

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(10)


@pytest.fixture
def pair(tmp_path: Path, tiny_model_dir: Callable[..., Path]) -> Iterator[Pair]:
    pair = Pair(tmp_path, tiny_model_dir())
    try:
        pair.start("worker")
        pair.start("controller")
        yield pair
    finally:
        pair.stop()


def test_the_controller_dies_and_the_plan_lapses(pair: Pair) -> None:
    plain = pair.generate(300)
    wait_for(lambda: pair.plan()["source"] == "plan")
    stream: list[str] = []
    body = {
        "input_ids": PROMPT,
        "stream": True,
        "sampling_params": {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True},
    }
    with httpx.stream("POST", f"{pair.worker_url}/generate", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for line in lines:
            stream.append(line)
            if len(stream) == 6:
                pair.kill("controller")
    assert stream[-2:] == ["data: [DONE]", ""] or stream[-1] == "data: [DONE]"
    last = json.loads([line for line in stream if line.startswith("data: {")][-1].removeprefix("data: "))
    assert last["meta_info"]["completion_tokens"] == 300
    wait_for(lambda: pair.plan()["source"] == "fallback", seconds=TTL_SECONDS + 10)
    assert pair.plan()["num_steps"] == 1
    assert pair.generate(300) == plain
    pair.start("controller")
    wait_for(lambda: pair.plan()["source"] == "plan")


def test_a_pin_outlives_the_controller(pair: Pair) -> None:
    assert wait_for(lambda: (r := pair.pin(3)).status_code == 200 and r.json()["source"] == "pin")
    pair.kill("controller")
    time.sleep(TTL_SECONDS + 0.5)
    status = pair.plan()
    assert (status["source"], status["num_steps"]) == ("pin", 3)
    assert status["remaining_seconds"] == 0
    assert 30 < status["pin_remaining_seconds"] < 60


def test_the_worker_dies_and_is_picked_up_again(pair: Pair) -> None:
    plain = pair.generate(40)
    entry = wait_for(lambda: (e := pair.worker_entry())["reachable"] and e)
    pair.kill("worker")
    wait_for(lambda: not pair.worker_entry()["reachable"])
    refused = pair.pin(3)
    assert refused.status_code == 503
    pair.start("worker")
    back = wait_for(lambda: (e := pair.worker_entry())["reachable"] and e)
    assert back["boot_id"] != entry["boot_id"]
    wait_for(lambda: pair.plan()["source"] == "pin")  # the operator's wish was kept, and sent
    for _ in range(3):
        assert pair.generate(40) == plain
    decisions = httpx.get(f"{pair.controller_url}/v1/decisions").json()["decisions"]
    reasons = [d["reason"] for d in decisions]
    assert "unreachable" in reasons and "restarted" in reasons, reasons
