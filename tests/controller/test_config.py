"""Configuration: files, environment, refusals by name; and the command line around it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
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
    assert (
        config.model_copy(update={"server": defaults.server, "workers": [], "policy": defaults.policy})
        == defaults
    ), "a value in the file that differs from the default should say why"
    assert config.policy.policy_parameters() == defaults.policy.policy_parameters()
    assert config.policy.slots == defaults.policy.slots


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_CONTROLLER_LOOP__POLL_INTERVAL_SECONDS", "0.5")
    monkeypatch.setenv("SPEC_CONTROLLER_WORKERS", '[{"id": "x", "url": "http://[::1]:9/"}]')
    monkeypatch.setenv("SPEC_CONTROLLER_POLICY__PARAMETERS__WARMUP", "5")
    monkeypatch.setenv("SPEC_CONTROLLER_POLICY__SLOTS", '[{"max_batch_size": 2, "candidate_steps": [0, 4]}]')
    config = load_config(CONFIGS / "controller.toml")
    assert config.loop.poll_interval_seconds == 0.5
    assert [(w.id, w.url) for w in config.workers] == [("x", "http://[::1]:9")]
    assert config.policy.policy_parameters().warmup == 5
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
        ('[policy]\nname = "best"', "policy.name"),
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
        ('[[workers]]\nid = "a"\nurl = "http://a"\n[[workers]]\nid = "a"\nurl = "http://b"', "workers"),
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
    assert resolved["workers"][0]["id"] == "local" and resolved["policy"]["parameters"]["urgent"] == 0.1


@pytest.mark.parametrize("content", ["", "two words", "ümlaut"])
def test_a_bad_token_file_stops_the_start(tmp_path: Path, capsys: Any, content: str) -> None:
    token = tmp_path / "token"
    token.write_text(content, encoding="utf-8")
    file = tmp_path / "controller.toml"
    file.write_text(f'[[workers]]\nid = "a"\nurl = "http://a"\ntoken_file = "{token}"')
    assert main(["run", "--config", str(file)]) == 1
    assert "workers.a.token_file" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_run_and_stop(tmp_path: Path, stop: signal.Signals) -> None:
    file = tmp_path / "controller.toml"
    file.write_text('[server]\nport = 0\n[[workers]]\nid = "a"\nurl = "http://127.0.0.1:9"')
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "controller.cli", "run", "--config", str(file)], stderr=stderr
        )
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"listening on (http://\S+)", log.read_text())):
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.05)
        answer = httpx.get(found[1] + "/readyz", trust_env=False)
        assert answer.status_code == 200
        process.send_signal(stop)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_an_address_that_is_taken_is_a_failure(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        file = tmp_path / "controller.toml"
        file.write_text(f"[server]\nport = {taken.getsockname()[1]}")
        done = subprocess.run(
            [sys.executable, "-m", "controller.cli", "run", "--config", str(file)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1 and "address already in use" in done.stderr
