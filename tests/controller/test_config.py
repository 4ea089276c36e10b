"""Configuration: files, environment, refusals by name; and the command line around it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from controller.cli import main
from controller.config import ControllerConfig, load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("SPEC_CONTROLLER_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ["controller.toml", "controller.compose.toml"])
def test_the_files_we_ship_say_what_the_defaults_are(name: str) -> None:
    config = load_config(CONFIGS / name)
    assert len(config.workers) == 1
    defaults = ControllerConfig()
    service = {name: getattr(defaults, name) for name in ("server", "journal", "log", "policy")}
    assert config.model_copy(update={**service, "workers": []}) == defaults, (
        "a value in the file that differs from the default should say why"
    )
    assert config.policy.policy_parameters() == defaults.policy.policy_parameters()
    assert config.policy.slots == defaults.policy.slots


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_CONTROLLER_LOOP__POLL_INTERVAL_SECONDS", "0.5")
    monkeypatch.setenv("SPEC_CONTROLLER_WORKERS", '[{"id": "x", "url": "http://[::1]:9/"}]')
    monkeypatch.setenv("SPEC_CONTROLLER_POLICY__PARAMETERS__DELTA", "0.05")
    monkeypatch.setenv("SPEC_CONTROLLER_POLICY__SLOTS", '[{"max_batch_size": 2, "candidate_steps": [0, 4]}]')
    config = load_config(CONFIGS / "controller.toml")
    assert config.loop.poll_interval_seconds == 0.5
    assert [(w.id, w.url) for w in config.workers] == [("x", "http://[::1]:9")]
    assert config.policy.policy_parameters().delta == 0.05
    assert [s.candidate_steps for s in config.policy.slots] == [[0, 4]]


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("[server]\nprot = 1", "server.prot"),
        ("[server]\nport = 70000", "server.port"),
        ("[loop]\npoll_interval_seconds = 0", "loop.poll_interval_seconds"),
        ("[loop]\npoll_interval_seconds = nan", "loop.poll_interval_seconds"),
        ("[loop]\ndefault_after_seconds = 1", "loop.default_after_seconds"),
        ("[loop]\nplan_ttl_seconds = 0.5", "loop.plan_ttl_seconds"),
        ("[loop]\npoll_interval_seconds = 1\nlate_after_seconds = 0.5", "loop.late_after_seconds 0.5"),
        ("[loop]\npoll_interval_seconds = 1\nhold_after_seconds = 1", "loop.hold_after_seconds 1"),
        (
            "[loop]\npoll_interval_seconds = 2\nhold_after_seconds = 2\ndefault_after_seconds = 2",
            "loop.poll_interval_seconds 2 must be below",
        ),
        ('[policy]\nname = "best"', "policy.name"),
        ("[policy.parameters]\nsight_seconds = 0", "sight_seconds must be above 0 and finite"),
        ("[policy.parameters]\nsight_seconds = nan", "sight_seconds must be above 0 and finite"),
        ("[policy.parameters]\nsight_seconds = -1", "sight_seconds must be above 0 and finite"),
        ("[policy.parameters]\nsight_seconds = inf", "sight_seconds must be above 0 and finite"),
        ("[policy.parameters]\nprobe_pause_max_seconds = inf", "probe_pause_max_seconds must be 0 or more"),
        ("[policy.parameters]\nslo_seconds = nan", "slo_seconds must be above 0"),
        ('[policy]\nname = "threshold"\nparameters.enter = inf', "enter must be a finite number"),
        ('[policy]\nname = "threshold"\nparameters.up_hysteresis = nan', "up_hysteresis must be"),
        ('[policy]\nmode = "on"', "policy.mode"),
        ("[policy.parameters]\nwarmpu = 3", "policy.parameters"),
        ("[policy.parameters]\nwarmup = 0", "warmup"),
        ('[policy.parameters]\nwarmup = "x"', "warmup"),
        ("[[policy.slots]]\nmax_batch_size = 3\ncandidate_steps = [0]", "max_batch_size"),
        ("[[policy.slots]]\nmax_batch_size = 4\ncandidate_steps = [1, 0]", "candidate_steps"),
        ("[[policy.slots]]\nmax_batch_size = 4\ncandidate_steps = []", "candidate_steps"),
        ("[guards]\nmin_num_steps = 3\nmax_num_steps = 1", "guards.min_num_steps"),
        ('[[workers]]\nid = "a b"\nurl = "http://a"', "workers.0.id"),
        ('[[workers]]\nid = "a"\nurl = "a:80"', "workers.0.url"),
        ('[[workers]]\nid = "a"\nurl = "http://u:p@a"', "workers.0.url"),
        ('[[workers]]\nid = "a"\nurl = "http://127.0.0.1:abc"', "workers.0.url"),
        ('[[workers]]\nid = "a"\nurl = "http://127.0.0.1:99999"', "workers.0.url"),
        ('[[workers]]\nid = "a"\nurl = "http://127.0.0.1:0"', "workers.0.url"),
        ('[[workers]]\nid = "a"\nurl = "http://a"\n[[workers]]\nid = "a"\nurl = "http://b"', "workers"),
        ('[log]\nformat = "xml"', "log.format"),
        ("[journal]\ndecision_days = 0", "journal.decision_days"),
        ('[shadow]\nname = "best"', "shadow"),
        ("[extra]\na = 1", "extra"),
        ("not toml", "controller.toml"),
    ],
)
def test_config_check_refuses_by_name(tmp_path: Path, capsys: Any, toml: str, named: str) -> None:
    file = tmp_path / "controller.toml"
    file.write_text(toml)
    assert main(["config", "check", "--config", str(file)]) == 2
    captured = capsys.readouterr()
    assert named in captured.err and ": " in captured.err and captured.out == ""


def test_a_variable_that_names_no_field_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("SPEC_CONTROLLER_LOOP__POLL_INTERVALL", "1")
    assert main(["config", "check"]) == 2
    assert "SPEC_CONTROLLER_LOOP__POLL_INTERVALL" in capsys.readouterr().err


def test_config_check_prints_what_was_resolved(capsys: Any) -> None:
    assert main(["config", "check", "--config", str(CONFIGS / "controller.toml")]) == 0
    resolved = json.loads(capsys.readouterr().out)
    assert resolved["workers"][0]["id"] == "local" and resolved["policy"]["parameters"]["delta"] == 0.03


@pytest.mark.parametrize("content", ["", "two words", "ümlaut"])
def test_a_bad_token_file_stops_the_start(tmp_path: Path, capsys: Any, content: str) -> None:
    token = tmp_path / "token"
    token.write_text(content, encoding="utf-8")
    file = tmp_path / "controller.toml"
    file.write_text(f'[[workers]]\nid = "a"\nurl = "http://a"\ntoken_file = "{token}"')
    assert main(["run", "--config", str(file)]) == 1
    assert "workers.a.token_file" in capsys.readouterr().err


@contextlib.contextmanager
def running(tmp_path: Path, toml: str = "") -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """A controller process of its own: process, address, log."""
    file = tmp_path / "controller.toml"
    file.write_text(f'[server]\nport = 0\n{toml}\n[[workers]]\nid = "a"\nurl = "http://127.0.0.1:9"')
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "controller.cli", "run", "--config", str(file)],
            stderr=stderr,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(CONFIGS.parent)},
        )
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"listening on (http://[\d.:]+)", log.read_text())):
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield process, found[1], log
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_run_and_stop(tmp_path: Path, stop: signal.Signals, capsys: Any) -> None:
    token = "a-token-for-this-test"
    with running(tmp_path, f'token = "{token}"\n[log]\nformat = "json"') as (process, url, log):
        assert httpx.get(url + "/readyz", trust_env=False).status_code == 200
        assert main(["explain", "--worker", "a", "--url", url]) == 4
        assert "a bearer token is needed" in capsys.readouterr().err
        (tmp_path / "token").write_text(token)
        question = ["explain", "--worker", "a", "--url", url, "--token-file", str(tmp_path / "token")]
        assert main(question) == 0 and "worker: unreachable" in capsys.readouterr().out
        process.send_signal(stop)
        assert process.wait(30) == 0, log.read_text()
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert {"level", "time", "message"} <= set(lines[0]) and token not in log.read_text()
        assert any(line.get("reason") == "unreachable" and line["worker"] == "a" for line in lines)
    assert main(["explain", "--worker", "a", "--journal", str(tmp_path / "data/controller.sqlite3")]) == 0
    assert "worker: unreachable" in capsys.readouterr().out


def test_orders_and_cursors_outlive_a_kill(tmp_path: Path) -> None:
    """kill -9 right after the answers: the next start knows the pin, the mode, and goes on with the cursor."""
    with running(tmp_path) as (process, url, _), httpx.Client(base_url=url, trust_env=False) as client:
        assert client.put("/v1/mode", json={"mode": "frozen"}).status_code == 200
        kept = client.put("/v1/workers/a/depth", json={"num_steps": 3, "ttl_seconds": 600})
        assert kept.status_code == 503 and kept.json()["depth"]["desired"] == 3, "nobody is there to tell"
        seen = client.get("/v1/decisions").json()
        process.kill()
        process.wait()
    with running(tmp_path) as (_, url, _), httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/v1/mode").json()["workers"] == {"a": "frozen"}
        assert client.get("/v1/workers/a/depth").json()["desired"] == 3
        again = client.get("/v1/decisions").json()["decisions"]
        assert again[: len(seen["decisions"])] == seen["decisions"]
        fresh = client.get("/v1/decisions", params={"after": seen["next"]}).json()["decisions"]
        assert all(record["cursor"] > seen["next"] for record in fresh)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "grace_seconds = 60") as (process, url, log):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as stalled:
            stalled.sendall(
                b"PUT /v1/mode HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n"
            )
            assert httpx.get(url + "/healthz", trust_env=False).status_code == 200
            process.terminate()
            while "SIGTERM: ending" not in log.read_text():
                time.sleep(0.05)
            time.sleep(0.3)
            assert process.poll() is None, "waits for the request"
            process.terminate()
            assert process.wait(10) == 1 and "a second signal" in log.read_text()


def test_an_open_listener_is_refused_before_it_opens(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "controller.toml"
    file.write_text('[server]\nhost = "0.0.0.0"\n[journal]\npath = ":memory:"')
    assert main(["run", "--config", str(file)]) == 1
    assert "server.allow_open" in capsys.readouterr().err


def test_a_journal_that_cannot_be_used_is_refused_by_name(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "controller.toml"
    file.write_text(f'[journal]\npath = "{file}"')
    assert main(["run", "--config", str(file)]) == 1
    assert f"journal.path: {file}: file is not a database" in capsys.readouterr().err


def test_an_address_that_is_taken_is_a_failure(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        file = tmp_path / "controller.toml"
        file.write_text(f'[server]\nport = {taken.getsockname()[1]}\n[journal]\npath = ":memory:"')
        done = subprocess.run(
            [sys.executable, "-m", "controller.cli", "run", "--config", str(file)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1 and "address already in use" in done.stderr
