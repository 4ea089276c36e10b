"""The demo's own parts: the schedule, the texts, the arithmetic, and children that never outlive it."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from worker.config import WorkerConfig
from worker.protocol import PlanStatus, QueueStats, SpecStats, StatsBucket

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `bench` is run from the checkout, not installed.

from bench.demo.counters import Interval, add, between  # noqa: E402
from bench.demo.phases import CHAT, PREDICTABLE, PROSE, schedule  # noqa: E402
from bench.demo.processes import Children, DemoError, port_or_free  # noqa: E402
from bench.demo.session import choose_addresses, head_of_the_default_model  # noqa: E402

# ---- schedule and texts ----


@pytest.mark.parametrize(("duration", "phases"), [(15, 3), (45, 3), (89, 3), (90, 6), (120, 6), (300, 18)])
def test_phases_share_the_duration(duration: float, phases: int) -> None:
    plan = list(schedule(duration))
    assert len(plan) == phases
    assert sum(phase.seconds for phase in plan) == pytest.approx(duration)
    assert {phase.kind.name for phase in plan[:3]} == {"predictable", "chat", "prose"}


def test_without_a_duration_the_phases_go_on() -> None:
    plan = list(itertools.islice(schedule(None), 12))
    assert [phase.label for phase in plan[:6]] == [phase.label for phase in plan[6:]]
    assert len({phase.concurrency for phase in plan}) >= 3


@pytest.mark.parametrize("kind", [PREDICTABLE, CHAT, PROSE], ids=lambda kind: kind.name)
def test_texts_are_many_and_different(kind) -> None:  # type: ignore[no-untyped-def]
    prompts = kind.prompts()
    assert len(prompts) >= 12 and len(set(prompts)) == len(prompts)
    assert all(prompt.strip() == prompt and prompt for prompt in prompts)


# ---- counters ----


def stats(*buckets: StatsBucket, generated: int = 0, boot_id: str = "a") -> SpecStats:
    return SpecStats(
        boot_id=boot_id,
        uptime_seconds=1.0,
        plan=PlanStatus(
            source="fallback",
            plan=None,
            age_seconds=None,
            remaining_seconds=0.0,
            pin_remaining_seconds=0.0,
            fallback_num_steps=2,
            num_steps=2,
        ),
        queue=QueueStats(running=0, waiting=0, kv_tokens_free=1, kv_tokens_total=1),
        buckets=list(buckets),
        requests_finished={},
        prompt_tokens=0,
        generated_tokens=generated,
        first_tokens=0,
        draft_failures=0,
    )


def bucket(num_steps: int, rounds: int, reached: list[int], correct: list[int], size: int = 1) -> StatsBucket:
    names = [name for name in StatsBucket.model_fields if name.endswith(("_seconds", "_squared"))]
    zeros = {name: 0 if name == "correct_squared" else 0.0 for name in names}
    return StatsBucket(
        num_steps=num_steps,
        max_batch_size=size,
        rounds=rounds,
        request_rounds=rounds * size,
        proposed=reached,
        reached=reached,
        correct=correct,
        accept_tokens=rounds * size + sum(correct),
        emitted_tokens=0,
        verify_rows=0,
        context_tokens=0,
        prefill_rounds=0,
        **zeros,
    )


def test_an_interval_is_a_difference_with_own_denominators() -> None:
    before = stats(bucket(0, 5, [], []), bucket(2, 10, [10, 6], [6, 3]), generated=30)
    after = stats(
        bucket(0, 8, [], []), bucket(2, 20, [20, 10], [10, 5]), bucket(1, 4, [8], [2], size=2), generated=61
    )
    interval = between(before, after)
    assert interval.generated_tokens == 31
    assert interval.rounds_by_depth == {0: 3, 1: 4, 2: 10}
    assert interval.depth_shares == [(0, 3 / 17), (1, 4 / 17), (2, 10 / 17)]
    assert interval.reached == (18, 4) and interval.correct == (6, 2)
    assert interval.position_acceptance == [6 / 18, 0.5]
    assert interval.accept_length == (3 + (10 + 6) + (8 + 2)) / (3 + 10 + 8)


def test_an_empty_interval_claims_nothing() -> None:
    interval = between(stats(), stats())
    assert (
        interval.accept_length is None and interval.position_acceptance == [] and interval.depth_shares == []
    )


def test_an_interval_across_a_restart_is_refused() -> None:
    with pytest.raises(ValueError, match="restarted"):
        between(stats(), stats(boot_id="b"))


def test_intervals_of_different_depth_add_up() -> None:
    shallow = between(stats(), stats(bucket(1, 4, [4], [1]), generated=5))
    deep = between(stats(), stats(bucket(3, 2, [2, 1, 1], [1, 1, 0]), generated=4))
    total = add(shallow, deep)
    assert isinstance(total, Interval)
    assert (total.reached, total.correct) == ((6, 1, 1), (2, 1, 0))
    assert total.generated_tokens == 9 and total.request_rounds == 6 and total.rounds_by_depth == {1: 4, 3: 2}


# ---- processes ----


def test_a_taken_port_is_replaced() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        wanted = holder.getsockname()[1]
        taken: set[int] = set()
        port = port_or_free("127.0.0.1", wanted, taken)
    assert port != wanted and taken == {port}
    assert port_or_free("127.0.0.1", wanted, taken) == wanted
    assert port_or_free("127.0.0.1", wanted, taken) not in (wanted, port)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


PARENT = """
import pathlib, sys, time
from bench.demo.processes import Children
with Children(pathlib.Path(sys.argv[1])) as children:
    child = children.start("sleeper", ["sleep", "300"], {})
    print(child.process.pid, flush=True)
    time.sleep(300)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.send_signal(signal.SIGKILL)
    wait_until_dead(child)


def test_leaving_the_context_ends_the_whole_group(tmp_path: Path) -> None:
    command = ["sh", "-c", "sleep 300 & echo $!; trap '' TERM; wait"]
    with pytest.raises(RuntimeError), Children(tmp_path) as children:
        child = children.start("stubborn", command, {})
        while not child.log.read_text():
            time.sleep(0.01)
        raise RuntimeError
    assert child.process.returncode in (0, -signal.SIGTERM, -signal.SIGKILL)
    wait_until_dead(int(child.log.read_text()))


def test_a_dead_child_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("broken", ["sh", "-c", "echo the reason; exit 3"], {"A": "b"})
        child.process.wait()
        with pytest.raises(DemoError, match=r"(?s)broken ended with status 3.*the reason"):
            children.check()


def test_children_do_not_share_the_terminals_process_group(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("sleeper", ["sleep", "300"], {})
        assert os.getpgid(child.process.pid) == child.process.pid != os.getpgrp()


def test_the_default_model_gets_its_head_unless_something_else_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = Path("configs/worker.toml")
    usual = head_of_the_default_model(WorkerConfig(), shipped)
    assert usual["SPEC_WORKER_SPEC__DRAFTER"] == "ngram+eagle"
    assert (Path(usual["SPEC_WORKER_SPEC__DRAFT_MODEL_PATH"]) / "model.safetensors").is_file()
    assert not head_of_the_default_model(WorkerConfig(), tmp_path / "worker.toml")
    assert not head_of_the_default_model(WorkerConfig(model={"path": str(tmp_path)}), shipped)
    without = WorkerConfig(spec={"drafter": "none", "candidate_steps": [0], "num_steps": 0})
    assert not head_of_the_default_model(without, shipped)
    monkeypatch.setenv("SPEC_WORKER_SPEC__DRAFTER", "ngram")
    assert not head_of_the_default_model(WorkerConfig(), shipped)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_own_configurations_are_followed_with_their_workers_and_tokens(tmp_path: Path) -> None:
    token, key = written(tmp_path / "control", "c" * 20), written(tmp_path / "api", "k" * 20)
    taken: set[int] = set()
    ports = [port_or_free("127.0.0.1", 0, taken) for _ in range(3)]
    worker = written(
        tmp_path / "worker.toml",
        f'[server]\nport = {ports[0]}\ncontrol_port = {ports[1]}\ncontrol_token_file = "{token}"\n',
    )
    controller = written(
        tmp_path / "controller.toml",
        f'[server]\nport = {ports[2]}\ntoken_file = "{key}"\n'
        f'[[workers]]\nid = "mine"\nurl = "http://127.0.0.1:{ports[1]}"\ntoken_file = "{token}"\n'
        '[[workers]]\nid = "far"\nurl = "http://10.0.0.1:8101"\n',
    )
    found = choose_addresses(worker, controller)
    assert found.controller_environment == {"SPEC_CONTROLLER_SERVER__PORT": str(ports[2])}
    assert found.worker_control.client().headers["authorization"] == "Bearer " + "c" * 20
    assert found.controller.client().headers["authorization"] == "Bearer " + "k" * 20
    assert "authorization" not in found.worker.client().headers
    assert found.notes == []

    with socket.create_server(("127.0.0.1", ports[1])):
        moved = choose_addresses(worker, controller)
    (only,) = json.loads(moved.controller_environment["SPEC_CONTROLLER_WORKERS"])
    assert only == {"id": "local", "url": moved.worker_control.url, "token_file": str(token)}
    assert [note for note in moved.notes if "alone, as `local`" in note]

    token.unlink()
    with pytest.raises(DemoError, match="control_token_file"):
        choose_addresses(worker, controller)
