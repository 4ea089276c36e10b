"""Recorded turns through the same core: the same decisions bit for bit, or where not."""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from controller.cli import main
from controller.commands import Operator
from controller.config import PolicyConfig
from controller.journal_rows import field_names
from controller.journal_store import Store
from controller.life import Life
from controller.policies import policy_kinds
from controller.replay import LifeReplay, replay
from controller.snapshot import NotASnapshot, restore, take
from controller.tape import checkpoint
from controller.types import Slot

MakeRig = Callable[..., Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "journal" / "controller.sqlite3"


def played(file: Path, **options: Any) -> list[LifeReplay]:
    store = Store.read_only(str(file))
    try:
        return list(replay(store, **options))
    finally:
        store.close()


def a_lively_hour(rig: Any, worker: Any) -> None:
    """Text that shifts, pins, rollbacks, modes and a restart of the worker."""
    operator, controlled = Operator(rig.loop), rig.loop.workers["a"]

    def go(acceptance: list[float], batch_size: int, seconds: float = 12) -> None:
        worker.acceptance, worker.batch_size = acceptance, batch_size
        asyncio.run(rig.run(seconds))

    go([0.95] * 64, 1)
    go([0.6] * 64, 4)
    asyncio.run(operator.pin(controlled, 1, ttl_seconds=5))
    go([0.1] * 64, 4)
    asyncio.run(operator.roll_back(controlled, ttl_seconds=4))
    go([0.9] * 64, 1)
    for mode in ("advisory", "frozen", "active"):
        asyncio.run(operator.set_mode(mode))
        go([0.2] * 64, 2, 4)
    worker.restart("boot-2")
    go([0.8] * 64, 1)


@pytest.mark.parametrize("policy", sorted(policy_kinds()))
def test_the_same_decisions_bit_for_bit(worker: Any, make_rig: MakeRig, file: Path, policy: str) -> None:
    rig = make_rig(
        {"a": worker},
        policy={"name": policy, "parameters": {"num_steps": 3} if policy == "static" else {}},
        journal={"path": str(file), "checkpoint_seconds": 7.0},
    )
    a_lively_hour(rig, worker)
    rig.stop()
    lives = played(file)
    assert [(life.difference, life.problem, life.skipped) for life in lives] == [(None, None, 0)] * 2
    assert sum(life.turns for life in lives) == (12 * 5 + 4 * 3) / 0.25
    assert all(life.checkpoints for life in lives) and lives[0].decisions > (0 if policy == "static" else 5)


def test_a_changed_input_is_found_and_named(worker: Any, make_rig: MakeRig, file: Path, capsys: Any) -> None:
    rig = make_rig({"a": worker}, policy={"name": "threshold"}, journal={"path": str(file)})
    worker.acceptance = [0.95] * 64
    asyncio.run(rig.run(10))
    rig.stop()
    assert main(["replay", "--journal", str(file)]) == 0
    assert "all the same" in capsys.readouterr().out
    names = field_names()
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT place, body FROM turns WHERE kind = 'turn' ORDER BY place").fetchall()
        for place, text in rows:
            body = json.loads(text)
            for cell in body[1][names["Observation"].index("cells")]:
                cell[names["CellDelta"].index("correct")] = [0] * cell[0]
            database.execute("UPDATE turns SET body = ? WHERE place = ?", (json.dumps(body), place))
    database.close()
    assert main(["replay", "--journal", str(file)]) == 1
    assert "DIFFERENT in the turn at" in capsys.readouterr().out


def test_a_life_whose_beginning_is_gone_begins_at_a_checkpoint(
    worker: Any, make_rig: MakeRig, file: Path
) -> None:
    rig = make_rig({"a": worker}, journal={"path": str(file), "checkpoint_seconds": 5.0})
    worker.acceptance = [0.7] * 64
    asyncio.run(rig.run(20))
    rig.stop()
    with sqlite3.connect(file) as database:
        database.execute("DELETE FROM turns WHERE number < 10 OR number BETWEEN 50 AND 55")
    database.close()
    (life,) = played(file)
    assert (life.difference, life.problem) == (None, None)
    assert 10 < life.turns < 60 and 10 < life.skipped < 40 and life.checkpoints >= 1


def test_another_policy_looks_on_on_the_recorded_slots(worker: Any, make_rig: MakeRig, file: Path) -> None:
    slots = [{"max_batch_size": 8, "candidate_steps": [0, 1]}]
    policy = {"mode": "frozen", "slots": slots, "ema_alpha": 0.5, "dead_band": 0.3}
    rig = make_rig({"a": worker}, policy=policy, journal={"path": str(file)})
    worker.acceptance = [0.0] * 64
    asyncio.run(rig.run(30))
    rig.stop()
    for name in ("threshold", "static"):
        (life,) = played(file, policy=PolicyConfig(name=name))
        assert life.problem is None and life.would_be is not None
        found = {(slot, after) for _, slot, _, after, _ in life.would_be.changes}
        assert found and {slot for slot, _ in found} == {8} and {after for _, after in found} <= {0, 1}


def test_what_another_policy_would_have_done(worker: Any, make_rig: MakeRig, file: Path, capsys: Any) -> None:
    rig = make_rig({"a": worker}, policy={"mode": "frozen"}, journal={"path": str(file)})
    worker.acceptance = [0.0] * 64
    asyncio.run(rig.run(30))
    rig.stop()
    (life,) = played(file, policy=PolicyConfig(name="threshold"))
    assert life.difference is None and life.would_be is not None
    (change,) = life.would_be.changes
    assert change[1:4] == (1, 2, 0) and life.would_be.differing_turns[1] > 10
    assert main(["replay", "--journal", str(file), "--policy", "threshold"]) == 0
    assert "2 -> 0 [drop]" in capsys.readouterr().out
    assert main(["replay", "--journal", str(file), "--policy", "threshold", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["would_be"]["changes"][0]["num_steps"] == 0
    assert main(["replay", "--journal", str(file), "--policy", "nonsense"]) == 2
    assert main(["replay", "--journal", str(file.with_name("absent"))]) == 2
    assert main(["replay", "--journal", str(file), "--worker", "nobody"]) == 0
    assert "nothing is recorded of worker nobody" in capsys.readouterr().out


def test_a_journal_of_other_fields_is_refused_by_name(worker: Any, make_rig: MakeRig, file: Path) -> None:
    rig = make_rig({"a": worker}, journal={"path": str(file)})
    asyncio.run(rig.run(2))
    rig.stop()
    with sqlite3.connect(file) as database:
        database.execute("UPDATE lives SET body = replace(body, '\"request_rounds\"', '\"asked\"')")
    database.close()
    (life,) = played(file)
    assert life.problem is not None and "asked" in life.problem


# ---- snapshots ----


def test_a_snapshot_keeps_values_and_who_is_who(worker: Any, make_rig: MakeRig) -> None:
    rig = make_rig({"a": worker})
    worker.acceptance = [0.7] * 64
    asyncio.run(rig.run(5))
    life: Life = rig.loop.workers["a"].life
    text = json.dumps(checkpoint(life))
    again = restore(json.loads(text))
    assert json.dumps(take(again)) == text
    shared = Slot(max_batch_size=1, candidate_steps=(0, 1))
    first, second = restore(json.loads(json.dumps(take([shared, shared]))))
    assert first is second and first == shared
    odd = [float("inf"), -0.0, 5e-324, {1, 2}, {(1, 2): [3]}]
    assert restore(json.loads(json.dumps(take(odd)))) == odd


@pytest.mark.parametrize("value", [object(), Path("x"), [lambda: 1], {"a": open}])
def test_a_snapshot_takes_nothing_foreign(value: Any) -> None:
    with pytest.raises(NotASnapshot):
        take(value)


@pytest.mark.parametrize(
    "data",
    [
        {"class": "subprocess:Popen", "state": []},
        {"class": "controller.types:Any", "state": []},
        {"class": "controller.policies.base:hashlib.sha256", "state": []},
        {"class": "controller.guards:Nothing", "state": []},
        {"named": "os:stat_result", "items": []},
        {"ref": 7},
        {"what": 1},
        {},
        {"tuple": 3},
    ],
)
def test_a_snapshot_from_elsewhere_runs_no_code(data: Any) -> None:
    with pytest.raises(NotASnapshot):
        restore(data)


def test_a_damaged_file_is_no_journal(tmp_path: Path, simulation: ModuleType, capsys: Any) -> None:
    file = tmp_path / "damaged"
    file.write_bytes(b"not a database, but long enough to look at " * 100)
    assert main(["replay", "--journal", str(file)]) == 2
    assert "damaged: file is not a database" in capsys.readouterr().err
