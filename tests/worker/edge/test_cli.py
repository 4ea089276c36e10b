"""`spec-worker` as a person runs it: messages, exit codes, and a real process from start to signal."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from worker.cli import main
from worker.config import load_config

CONFIGS = Path(__file__).parents[3] / "configs"
ENVIRONMENT = {
    "SPEC_WORKER_SERVER__PORT": "0", "SPEC_WORKER_SERVER__CONTROL_PORT": "0", "SPEC_WORKER_MODEL__THREADS": "1",
    "SPEC_WORKER_MODEL__DTYPE": "float64", "SPEC_WORKER_MODEL__DEVICE": "cpu", "SPEC_WORKER_MODEL__NAME": "tiny",
    "SPEC_WORKER_ENGINE__MAX_CONTEXT_TOKENS": "4096", "SPEC_WORKER_SPEC__CANDIDATE_STEPS": "[0, 2]",
}  # fmt: skip


class Worker:
    """A `spec-worker run` process; its log is read line by line."""

    def __init__(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from worker.cli import main; sys.exit(main())", "run"],
            env=os.environ | ENVIRONMENT | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = ""

    def read_until(self, pattern: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            found = re.search(pattern, line)
            if found:
                return found[1] if found.groups() else found[0]
        raise AssertionError(f"{pattern!r} never came:\n{self.log}")

    def wait(self) -> int:
        assert self.process.stderr is not None
        self.log += self.process.stderr.read()
        return self.process.wait()


@pytest.fixture
def start(tiny_model_dir: Callable[..., Path]) -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def make(**environment: str) -> Worker:
        model = {"SPEC_WORKER_MODEL__PATH": str(tiny_model_dir(max_positions=4096))}
        started.append(Worker(**(model | environment)))
        return started[-1]

    yield make
    for worker in started:
        worker.process.kill()
        worker.process.wait()
        assert worker.process.stderr is not None
        worker.process.stderr.close()


def test_serves_drains_and_leaves_with_0(start: Callable[..., Worker]) -> None:
    worker = start()
    url = worker.read_until(r"(http://\S+)/healthz answers already")
    assert httpx.get(f"{url}/healthz").status_code == 200
    assert worker.read_until(r"inference  (http://[\d.:]+)") == url
    control = worker.read_until(r"control    (http://[\d.:]+)")
    assert httpx.get(f"{url}/readyz").status_code == 200
    assert httpx.get(f"{control}/v1/spec/info").json()["model"] == "tiny"
    body = {
        "text": "abc",
        "stream": True,
        "sampling_params": {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True},
    }
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        worker.process.send_signal(signal.SIGTERM)
        worker.read_until("draining")
        last = [line for line in lines if line][-2:]
    # The running stream was finished, not cut.
    assert last[1] == "data: [DONE]"
    assert json.loads(last[0].removeprefix("data: "))["meta_info"]["completion_tokens"] == 60
    assert worker.wait() == 0
    assert "Traceback" not in worker.log
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/healthz")


def test_the_second_signal_leaves_at_once(start: Callable[..., Worker]) -> None:
    worker = start()
    url = worker.read_until(r"inference  (http://[\d.:]+)")
    control = worker.read_until(r"control    (http://[\d.:]+)")
    # Enough work to outlast the drain.
    body = {"text": ["abc"] * 16, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    content = json.dumps(body).encode()
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as busy, httpx.Client(timeout=20) as client:
        busy.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content
        )
        while client.get(f"{control}/v1/spec/stats").json()["queue"]["running"] < 8:
            pass
        worker.process.send_signal(signal.SIGINT)
        worker.read_until("draining")
        assert client.get(f"{url}/healthz").status_code == 200
        assert client.get(f"{url}/readyz").status_code == 503
        refused = client.post(f"{url}/generate", json={"text": "abc"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        worker.process.send_signal(signal.SIGINT)
        assert worker.wait() == 128 + signal.SIGINT


def test_when_the_grace_is_over_every_answer_ends_with_a_word(start: Callable[..., Worker]) -> None:
    worker = start(SPEC_WORKER_SERVER__SHUTDOWN_GRACE_SECONDS="0.2", SPEC_WORKER_LOG__FORMAT="json")
    url = worker.read_until(r"inference  (http://[\d.:]+)")
    control = worker.read_until(r"control    (http://[\d.:]+)")
    sampling = {"max_new_tokens": 4000, "temperature": 0, "ignore_eos": True}
    endings: list[tuple[int, Any]] = []

    def ask() -> None:
        body = {"text": ["abc"] * 8, "sampling_params": sampling}
        answer = httpx.post(f"{url}/generate", json=body, timeout=60)
        endings.append((answer.status_code, answer.json()))

    # Eight run and eight wait: none may be lost.
    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    while httpx.get(f"{control}/v1/spec/stats").json()["queue"]["waiting"] < 8:
        pass
    worker.process.send_signal(signal.SIGTERM)
    for thread in asking:
        thread.join()
    assert worker.wait() == 0
    reasons = [answer["meta_info"]["finish_reason"] for _, answers in endings for answer in answers]
    assert len(reasons) == 16
    assert {reason["type"] for reason in reasons} == {"abort"}
    assert {reason["message"] for reason in reasons} == {"the server is stopping; the answer ends early"}
    lines = [json.loads(line) for line in worker.log.splitlines()]
    assert {line["level"] for line in lines} == {"info"}
    assert lines[-1]["message"] == "stopped"


def test_a_signal_while_loading_leaves_with_0(start: Callable[..., Worker]) -> None:
    worker = start()
    worker.read_until("healthz answers already")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_model_that_cannot_be_loaded_is_one_line_and_1(
    start: Callable[..., Worker], tmp_path: Path
) -> None:
    worker = start(SPEC_WORKER_MODEL__PATH=str(tmp_path))
    assert worker.wait() == 1
    complaint = worker.log.strip().splitlines()[-1]
    assert complaint.startswith("spec-worker: cannot load the model:")
    assert str(tmp_path) in complaint
    assert "Traceback" not in worker.log


def test_an_address_that_is_taken_is_named(start: Callable[..., Worker]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        worker = start(SPEC_WORKER_SERVER__CONTROL_PORT=str(port))
        assert worker.wait() == 1
    assert f"server.control_port: cannot listen on 127.0.0.1:{port}" in worker.log


def check(text: str, tmp_path: Path) -> int:
    path = tmp_path / "worker.toml"
    path.write_text(text)
    return main(["config", "check", "--config", str(path)])


def test_config_check_prints_what_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEC_WORKER_SERVER__PORT", "9000")
    assert check("[server]\nport = 8500\ncontrol_port = 8501\n[spec]\nnum_steps = 3\n", tmp_path) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["server"]["port"] == 9000
    assert printed["server"]["control_port"] == 8501
    assert printed["spec"]["num_steps"] == 3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[server]\nport = 70000\n", "server.port: "), ("[server]\nprot = 1\n", "server.prot: "),
        ("[sever]\n", "sever: "),
        ("[spec]\nnum_steps = 4\n", "spec.num_steps: "), ("[spec]\ntopk = 2\n", "spec.topk: "),
        ("[spec]\ncandidate_steps = [1, 2]\n", "spec.candidate_steps: "),
        ("[spec]\nnum_draft_tokens = 7\n", "spec.num_draft_tokens: "), ('[model]\ndtype = "float8"\n', "model.dtype: "),
        ("[engine]\nmax_num_batched_tokens = 10\n", "engine.max_num_batched_tokens: "),
        ("[server]\ncontrol_host = '0.0.0.0'\n", "server.control_host: "), ("x = [", "--config: "),
        ("[server]\ncontrol_token_file = '/does/not/exist'\n", "server.control_token_file: "),
        ("[server]\napi_key_file = '/does/not/exist'\n", "server.api_key_file: "),
        ("[server]\ncontrol_read_token = 'r'\n", "server.control_read_token_file: "),
        ("[server]\nshutdown_grace_seconds = -1\n", "server.shutdown_grace_seconds: "),
        ("[server]\nshutdown_grace_seconds = inf\n", "server.shutdown_grace_seconds: "),
        ("[server]\nper_request_spec_decode_metrics = 'all'\n", "server.per_request_spec_decode_metrics: "),
        ("[log]\nformat = 'xml'\n", "log.format: "),
    ],
)  # fmt: skip
def test_bad_configuration_is_2_and_names_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    assert check(text, tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"spec-worker: {complaint}")


def test_an_unknown_variable_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEC_WORKER_SERVER__PROT", "1")
    assert check("", tmp_path) == 2
    assert "SPEC_WORKER_SERVER__PROT" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["config", "check"], ["run"]])
def test_a_missing_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main([*command, "--config", str(tmp_path / "missing.toml")]) == 2
    assert "missing.toml" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        load_config(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["config", "check", "--help"], ["--version"]]
)
def test_help_is_there(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0
    assert "spec-worker" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["walk"], ["run", "--port", "1"]])
def test_bad_arguments_are_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2


def flat(values: dict[str, Any]) -> set[str]:
    return {f"{section}.{name}" for section, fields in values.items() for name in fields}


def test_the_shipped_file_shows_every_field_with_its_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "check", "--config", str(CONFIGS / "worker.toml")]) == 0
    shipped = json.loads(capsys.readouterr().out)
    assert check("", tmp_path) == 0
    assert shipped == json.loads(capsys.readouterr().out)
    text = (CONFIGS / "worker.toml").read_text()
    missing = [
        name for name in flat(shipped) if not re.search(rf"^(# )?{name.split('.')[1]} = ", text, re.MULTILINE)
    ]
    assert missing == []
