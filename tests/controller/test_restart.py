"""What outlives the controller: modes, pins, holds, undoable changes; and what does not: the policy's own depths."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from controller.app import create_app
from controller.commands import ModeForbids, NotConfirmed, NothingToUndo, Operator
from controller.config import ControllerConfig
from controller.journal_read import remembered
from controller.journal_store import Store

MakeRig = Callable[..., Any]


@pytest.fixture
def rig(worker: Any, make_rig: MakeRig, tmp_path: Path) -> Any:
    return make_rig(
        {"a": worker}, policy={"name": "threshold"}, journal={"path": str(tmp_path / "journal.sqlite3")}
    )


def go(rig: Any, seconds: float, **other: float) -> None:
    asyncio.run(rig.run(seconds, **other))


def restart(rig: Any) -> None:
    rig.stop()
    rig.start()


def pin(rig: Any, num_steps: int, ttl_seconds: float = 60) -> None:
    asyncio.run(Operator(rig.loop).pin(rig.loop.workers["a"], num_steps, ttl_seconds=ttl_seconds))


def roll_back(rig: Any, ttl_seconds: float = 60) -> None:
    asyncio.run(Operator(rig.loop).roll_back(rig.loop.workers["a"], ttl_seconds=ttl_seconds, reason="bad"))


def table(worker: Any) -> list[int]:
    return [entry.num_steps for entry in worker.plans[-1].entries]


# ---- restart ----


def test_it_adopts_what_the_worker_runs_and_does_not_jump(rig: Any, worker: Any) -> None:
    worker.acceptance = [1.0] * 64
    go(rig, 10)
    assert worker.depths[-1] == 7
    first = worker.plans[-1]
    worker.acceptance = [0.0] * 64  # its old evidence is gone: the new controller has to see this for itself
    restart(rig)
    go(rig, 1)
    assert worker.depths[-1] == 7 and rig.reasons("worker") == ["met", "returned"]
    assert worker.plans[-1].controller_epoch > first.controller_epoch
    go(rig, 20)
    assert worker.depths[-1] == 0


def test_a_pin_goes_on_with_what_is_left_of_it(rig: Any, worker: Any) -> None:
    go(rig, 2)
    pin(rig, 5, ttl_seconds=30)
    go(rig, 10)
    restart(rig)
    go(rig, 15)
    assert worker.depths[-1] == 5 and 4 < worker.plans[-1].pin.ttl_seconds < 10
    go(rig, 6)
    assert worker.plans[-1].pin is None and rig.reasons("pin") == ["pinned", "expired"]


def test_a_pin_reaches_a_worker_that_restarted_meanwhile(rig: Any, worker: Any) -> None:
    go(rig, 2)
    pin(rig, 5)
    rig.stop()
    worker.restart("boot-2")
    rig.start()
    go(rig, 1)
    assert worker.depths[-1] == 5


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_clock_that_jumps_never_lengthens_a_pin(
    rig: Any, worker: Any, clock: Any, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(rig, 2)
    pin(rig, 5, ttl_seconds=30)
    wall = clock.wall
    monkeypatch.setattr(clock, "wall", lambda: wall() + jump)
    restart(rig)
    go(rig, 31)
    assert worker.plans[-1].pin is None


@pytest.mark.parametrize("order", [pin, roll_back])
def test_what_is_left_is_written_anew_while_it_runs(
    rig: Any, worker: Any, clock: Any, order: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.acceptance = [1.0] * 64
    go(rig, 10)
    if order is pin:
        pin(rig, 5, ttl_seconds=600)
    else:
        roll_back(rig, ttl_seconds=600)
    go(rig, 500, rounds_per_second=0)
    wall = clock.wall
    monkeypatch.setattr(clock, "wall", lambda: wall() - 3600.0)
    restart(rig)
    found = rig.loop.workers["a"]
    held = found.pin if order is pin else found.hold
    assert 100 <= held.remaining(clock.now) <= 100 + 10


def test_state_without_times_is_not_written_again(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go(rig, 2, rounds_per_second=0)
    pin(rig, 5, ttl_seconds=5)
    go(rig, 10, rounds_per_second=0)
    rows: list[str] = []
    monkeypatch.setattr(rig.journal, "remember", lambda key, _: rows.append(key))
    go(rig, 60, rounds_per_second=0)
    assert rows == []


def test_a_controller_that_ends_writes_what_is_left(simulation: Any, clock: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "journal.sqlite3")
    config = ControllerConfig.model_validate(
        {"journal": {"path": path}, "workers": [{"id": "a", "url": "http://a:1"}]}
    )
    worker = simulation.SimulatedWorker(clock)
    app = create_app(config, clock=clock, registry=CollectorRegistry(), clients={"a": worker})
    with TestClient(app, base_url="http://localhost") as client:
        body = {"num_steps": 3, "ttl_seconds": 600}
        assert client.put("/v1/workers/a/depth", json=body).status_code == 200
        clock.now += 7
    store = Store.read_only(path)
    left = remembered(store)["worker:a"]["pin"]["remaining"]
    store.close()
    assert left == pytest.approx(593)


def test_a_release_that_the_worker_missed_is_not_forgotten(rig: Any, worker: Any, simulation: Any) -> None:
    go(rig, 2)
    pin(rig, 7, ttl_seconds=600)
    worker.failure = simulation.UNREACHABLE
    with pytest.raises(NotConfirmed):
        asyncio.run(Operator(rig.loop).release(rig.loop.workers["a"]))
    restart(rig)
    worker.failure = None
    go(rig, 3)
    assert worker.plans[-1].pin is None and "adopted" not in rig.reasons("pin")


def test_modes_come_back(rig: Any, worker: Any) -> None:
    asyncio.run(Operator(rig.loop).set_mode("advisory"))
    asyncio.run(Operator(rig.loop).set_worker_mode(rig.loop.workers["a"], "frozen"))
    restart(rig)
    assert rig.loop.mode == "advisory" and rig.loop.workers["a"].mode == "frozen"
    asyncio.run(Operator(rig.loop).set_worker_mode(rig.loop.workers["a"], None))
    restart(rig)
    assert rig.loop.workers["a"].mode == "advisory"


def test_a_mode_newly_configured_wins_over_an_older_order(rig: Any) -> None:
    asyncio.run(Operator(rig.loop).set_mode("frozen"))
    rig.stop()
    policy = rig.config.policy.model_copy(update={"mode": "advisory"})
    rig.config = rig.config.model_copy(update={"policy": policy})
    rig.start()
    assert rig.loop.mode == "advisory"


def test_a_workers_own_mode_ends_with_it(rig: Any) -> None:
    asyncio.run(Operator(rig.loop).set_worker_mode(rig.loop.workers["a"], "frozen"))
    restart(rig)
    assert rig.loop.workers["a"].mode == "frozen", "the configuration is as it was"
    rig.stop()
    policy = rig.config.policy.model_copy(update={"mode": "advisory"})
    rig.config = rig.config.model_copy(update={"policy": policy})
    rig.start()
    found = rig.loop.workers["a"]
    assert found.mode == "advisory" and found.mode_override is None


def test_decisions_are_read_on_with_the_old_cursor(rig: Any) -> None:
    go(rig, 3)
    cursor = rig.journal.read()[-1].cursor
    restart(rig)
    go(rig, 3)
    assert [r.decision.reason for r in rig.journal.read(after=cursor)][:1] == ["returned"]


# ---- rollback ----


def test_a_policys_change_is_undone_and_held_for_a_time(rig: Any, worker: Any) -> None:
    worker.acceptance = [1.0] * 64
    go(rig, 10)
    assert table(worker) == [7, 2, 2]
    roll_back(rig, ttl_seconds=20)
    assert table(worker) == [5, 2, 2]
    go(rig, 18)
    assert set(worker.depths[-600:]) == {5}
    held = [r.decision for r in rig.journal.read(limit=1000) if r.decision.guard == "rollback"]
    assert held and held[-1].outcome == "held" and held[-1].num_steps == 5
    go(rig, 6)
    assert worker.depths[-1] == 7 and rig.reasons("rollback") == ["rolled_back", "hold_expired"]


def test_each_further_rollback_goes_one_change_further_back(rig: Any, worker: Any) -> None:
    worker.acceptance = [1.0] * 64
    go(rig, 10)
    depths = []
    for _ in range(3):
        roll_back(rig)
        depths.append(table(worker)[0])
    assert depths == [5, 3, 2]
    with pytest.raises(NothingToUndo):
        roll_back(rig)
    assert table(worker)[0] == 2


def test_a_pin_is_undone_to_the_one_before_and_a_release_to_the_pin(rig: Any, worker: Any) -> None:
    go(rig, 1)
    pin(rig, 3, ttl_seconds=100)
    pin(rig, 7, ttl_seconds=100)
    roll_back(rig)
    assert worker.plans[-1].pin.num_steps == 3
    asyncio.run(Operator(rig.loop).release(rig.loop.workers["a"]))
    assert worker.plans[-1].pin is None and rig.loop.workers["a"].hold is None
    go(rig, 10, rounds_per_second=0)
    roll_back(rig)
    assert worker.plans[-1].pin.num_steps == 3 and worker.plans[-1].pin.ttl_seconds < 91
    roll_back(rig)
    assert worker.plans[-1].pin is None


def test_nothing_to_undo_at_first_and_after_a_pin_ran_out(rig: Any) -> None:
    go(rig, 1)
    with pytest.raises(NothingToUndo):
        roll_back(rig)
    pin(rig, 3, ttl_seconds=2)
    go(rig, 3, rounds_per_second=0)
    with pytest.raises(NothingToUndo):
        roll_back(rig)
    assert rig.loop.workers["a"].hold is None


def test_a_rollback_survives_a_restart_and_so_does_what_can_be_undone(rig: Any, worker: Any) -> None:
    worker.acceptance = [1.0] * 64
    go(rig, 10)
    roll_back(rig, ttl_seconds=60)
    restart(rig)
    go(rig, 10)
    assert worker.depths[-1] == 5, "still held"
    roll_back(rig)
    assert table(worker)[0] == 3


def test_a_restarted_worker_has_no_table_to_go_back_to(rig: Any, worker: Any) -> None:
    worker.acceptance = [1.0] * 64
    go(rig, 10)
    worker.restart("boot-2")
    go(rig, 1)
    with pytest.raises(NothingToUndo):
        roll_back(rig)


def test_a_table_that_is_not_ours_is_not_undone(rig: Any, worker: Any) -> None:
    worker.acceptance = [1.0] * 64
    go(rig, 10)
    asyncio.run(Operator(rig.loop).set_mode("advisory"))
    with pytest.raises(NothingToUndo):
        roll_back(rig)


def test_the_policy_goes_on_when_the_hold_is_released(rig: Any, worker: Any) -> None:
    worker.acceptance = [1.0] * 64
    go(rig, 10)
    roll_back(rig, ttl_seconds=600)
    asyncio.run(Operator(rig.loop).release(rig.loop.workers["a"]))
    go(rig, 5)
    assert worker.depths[-1] == 7 and rig.reasons("rollback") == ["rolled_back", "hold_released"]


def test_a_release_that_the_mode_forbids_changes_nothing(rig: Any) -> None:
    go(rig, 1)
    pin(rig, 3)
    pin(rig, 5)
    roll_back(rig)
    operator, controlled = Operator(rig.loop), rig.loop.workers["a"]
    asyncio.run(operator.set_worker_mode(controlled, "released"))
    before = controlled.pin, controlled.hold
    with pytest.raises(ModeForbids):
        asyncio.run(operator.release(controlled))
    assert (controlled.pin, controlled.hold) == before and None not in before
    assert rig.reasons("rollback") == ["rolled_back"]
