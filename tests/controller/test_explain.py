"""Why a depth is what it is, in words: over HTTP, from a file, on the command line. And logs as JSON."""

import asyncio
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from controller.app import create_app
from controller.cli import main
from controller.commands import Operator
from controller.explain import parse_time
from controller.logs import JsonFormatter, set_up

MakeRig = Callable[..., Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite3"


@pytest.fixture
def rig(worker: Any, make_rig: MakeRig, file: Path) -> Any:
    rig = make_rig({"a": worker}, policy={"name": "threshold"}, journal={"path": str(file)})
    worker.acceptance = [1.0] * 64
    asyncio.run(rig.run(10))
    return rig


def explained(file: Path, capsys: Any, *arguments: str) -> str:
    assert main(["explain", "--worker", "a", "--journal", str(file), *arguments]) == 0
    return str(capsys.readouterr().out)


def test_a_person_on_call_reads_why(rig: Any, worker: Any, file: Path, capsys: Any, clock: Any) -> None:
    rig.journal.flush()
    text = explained(file, capsys)
    for said in (
        "mode: active",
        "worker: met",
        "batch <= 1: num_steps 7, before that 5, since 2026-",
        "(done)",
        "why: climb: 5.00 correct drafts per round at 5, above 4.50",
        "tiers: 0: 0 ± 0; 1: ",
        "7: unknown (chosen)",
        "acceptance by position 1.00 1.00",
        "ms a round",
        "policy threshold 1, code 0.1.0+",
    ):
        assert said in text, text
    asyncio.run(Operator(rig.loop).pin(rig.loop.workers["a"], 2, ttl_seconds=60, reason="incident 7"))
    rig.journal.flush()
    assert "pin: pinned" in explained(file, capsys) and "incident 7" in explained(file, capsys)
    before_the_first = str(clock.wall() - 9.7)
    assert "No depth was decided yet" in explained(file, capsys, "--at", before_the_first)
    assert "Nothing is known" in explained(file, capsys, "--at", "2001-01-01")


def test_what_was_held_back_is_told_with_its_guard(
    worker: Any, make_rig: MakeRig, file: Path, capsys: Any
) -> None:
    rig = make_rig(
        {"a": worker},
        policy={"name": "threshold"},
        guards={"max_num_steps": 2},
        journal={"path": str(file)},
    )
    worker.acceptance = [1.0] * 64
    asyncio.run(rig.run(10))
    rig.journal.flush()
    text = explained(file, capsys)
    assert "NOT done" in text and "guard that stepped in: bounds" in text


def test_the_record_holds_what_the_decision_rests_on(rig: Any) -> None:
    last = [r.decision for r in rig.journal.read(limit=1000) if r.decision.kind == "depth"][-1]
    (cell,) = [cell for cell in last.observed["cells"] if cell["num_steps"] == last.num_steps_before]
    assert cell["rounds"] > 0 and cell["correct"] == cell["reached"] and last.observed["seconds"] > 0
    assert last.estimate["mean_correct"] == 5.0 and last.estimate["request_rounds"] >= 24
    assert [score.num_steps for score in last.scores] == [0, 1, 2, 3, 5, 7]
    assert last.code_version.startswith("0.1.0+") and last.policy_version


def test_the_same_over_http(rig: Any, worker: Any, file: Path) -> None:
    rig.stop()
    app = create_app(rig.config, clock=rig.clock, registry=CollectorRegistry(), clients={"a": worker})
    with TestClient(app, base_url="http://localhost") as client:
        answer = client.get("/v1/workers/a/explain").json()
        assert answer["worker"] == "a" and any("why: climb" in line for line in answer["lines"])
        assert {d["kind"] for d in answer["decisions"]} >= {"worker", "depth"}
        earlier = client.get("/v1/workers/a/explain", params={"at": "2001-01-01T00:00:00Z"}).json()
        assert earlier["at"] == "2001-01-01T00:00:00Z" and earlier["decisions"] == []
        for bad in ("yesterday", "nan", "inf"):
            refused = client.get("/v1/workers/a/explain", params={"at": bad})
            assert refused.status_code == 422 and refused.json()["errors"][0]["field"].startswith("at")
        for odd in ("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "-1", "1e300"):
            assert client.get("/v1/workers/a/explain", params={"at": odd}).status_code == 200
        assert client.get("/v1/workers/b/explain").status_code == 404


def test_bad_questions_are_refused(file: Path, capsys: Any) -> None:
    assert main(["explain", "--worker", "a", "--at", "soon", "--journal", str(file)]) == 2
    assert "--at" in capsys.readouterr().err
    assert main(["explain", "--worker", "a", "--journal", str(file)]) == 1
    assert "not there" in capsys.readouterr().err
    assert main(["explain", "--worker", "a", "--url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err


def test_times_are_read_with_and_without_a_zone() -> None:
    assert parse_time("1970-01-01T00:01:00") == parse_time("1970-01-01T01:01:00+01:00") == 60.0
    assert parse_time("60.5") == 60.5


# ---- logs ----


def test_a_decision_is_one_line_of_json(worker: Any, make_rig: MakeRig, caplog: Any) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    caplog.set_level(logging.INFO, "controller")
    logging.getLogger("controller").addHandler(handler)
    rig = make_rig({"a": worker}, policy={"name": "threshold"})
    worker.acceptance = [1.0] * 64
    asyncio.run(rig.run(10))
    logging.getLogger("controller").removeHandler(handler)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == len(rig.reasons()) <= 10, "one each, and none per turn"
    climb = next(line for line in lines if (line.get("reason"), line["outcome"]) == ("climb", "applied"))
    assert climb["worker"] == "a" and climb["num_steps"] == 3
    assert climb["level"] == "info" and climb["logger"] == "controller.decisions" and climb["time"]


def test_both_styles_can_be_set_up(capsys: Any) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        set_up("json", "warning")
        logging.getLogger("x").warning("odd\nline %s", "\ud800", extra={"fields": {"n": 1}})
        logging.getLogger("x").info("not shown")
        set_up("console", "info")
        logging.getLogger("x").info("shown")
    finally:
        root.handlers, root.level = handlers, level
    first, second = capsys.readouterr().err.splitlines()
    assert json.loads(first)["n"] == 1 and json.loads(first)["message"] == "odd\nline \ud800"
    assert second.endswith("INFO x: shown")
