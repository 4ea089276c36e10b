"""The control listener: plans and statistics of a real engine, refusals as problem+json, and who may ask."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from worker.access import AccessError, read_control_tokens
from worker.api.served import ServedModel
from worker.config import ServerConfig, WorkerConfig
from worker.control import create_control_app
from worker.engine_thread import EngineThread
from worker.protocol import PlanStatus, SpecInfo, SpecStats

_versions = iter(range(1, 10_000))


@pytest.fixture
def plan(engine: EngineThread) -> dict[str, Any]:
    return {
        "controller_epoch": 1,
        "version": next(_versions),
        "boot_id": engine.info.boot_id,
        "ttl_seconds": 60.0,
        "entries": [{"max_batch_size": 4, "num_steps": 3}],
    }


def test_answers_are_the_wire_types(control: TestClient) -> None:
    info = SpecInfo.model_validate_json(control.get("/v1/spec/info").text)
    assert info.candidate_steps == [0, 1, 3]
    assert SpecStats.model_validate_json(control.get("/v1/spec/stats").text).boot_id == info.boot_id
    assert PlanStatus.model_validate_json(control.get("/v1/spec/plan").text).fallback_num_steps == 1


def test_a_plan_changes_the_depth_of_the_rounds(
    control: TestClient, client: TestClient, plan: dict[str, Any], engine: EngineThread
) -> None:
    def rounds_at(num_steps: int) -> int:
        return sum(bucket.rounds for bucket in engine.stats().buckets if bucket.num_steps == num_steps)

    answer = control.put("/v1/spec/plan", json=plan)
    assert answer.status_code == 200
    status = PlanStatus.model_validate_json(answer.text)
    assert (status.source, status.num_steps) == ("plan", 3)
    before = rounds_at(3)
    client.post(
        "/generate", json={"text": "ababab", "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
    )
    assert rounds_at(3) > before
    # The same again renews it.
    assert control.put("/v1/spec/plan", json=plan).status_code == 200


@pytest.mark.parametrize(
    "change", [{"version": 0}, {"controller_epoch": 0}, {"boot_id": "another"}, {"reason": "x"}]
)
def test_conflicts_carry_the_current_plan(control: TestClient, plan: dict[str, Any], change: Any) -> None:
    assert control.put("/v1/spec/plan", json=plan).status_code == 200
    answer = control.put("/v1/spec/plan", json=plan | change)
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"
    current = PlanStatus.model_validate(answer.json()["current"], strict=False)
    assert current.plan is not None
    assert current.plan.version == plan["version"]


def test_an_unknown_tier_names_the_tiers_and_changes_nothing(
    control: TestClient, plan: dict[str, Any]
) -> None:
    before = control.get("/v1/spec/plan").json()["plan"]
    plan["entries"] = [{"max_batch_size": 4, "num_steps": 2}]
    answer = control.put("/v1/spec/plan", json=plan)
    assert answer.status_code == 422
    assert answer.json()["candidate_steps"] == [0, 1, 3]
    assert "num_steps 2" in answer.json()["detail"]
    assert control.get("/v1/spec/plan").json()["plan"] == before


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ttl_seconds": 0}, "ttl_seconds"), ({"ttl_seconds": "60"}, "ttl_seconds"), ({"version": True}, "version"),
        ({"version": 3.0}, "version"), ({"entries": []}, "entries"), ({"surprise": 1}, "surprise"),
        ({"entries": [{"max_batch_size": 0, "num_steps": 1}]}, "entries.0.max_batch_size"),
        ({"entries": [{"max_batch_size": 4, "num_steps": 3, "num_draft_tokens": 3}]}, "entries.0"),
        ({"boot_id": None}, "boot_id"), ({"dead_band": 0.9}, "dead_band"),
    ],
)  # fmt: skip
def test_invalid_plans_are_422_and_name_the_field(
    control: TestClient, plan: dict[str, Any], change: Any, field: str
) -> None:
    answer = control.put("/v1/spec/plan", json=plan | change)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["errors"][0]["field"] == field
    assert field in answer.json()["detail"]


def test_an_inconsistent_pair_names_both_numbers(control: TestClient, plan: dict[str, Any]) -> None:
    plan["entries"] = [{"max_batch_size": 4, "num_steps": 3, "num_draft_tokens": 7}]
    detail = control.put("/v1/spec/plan", json=plan).json()["detail"]
    assert "num_steps 3" in detail
    assert "num_draft_tokens 7" in detail


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"ttl_seconds": NaN}', b"\xff", b'{"reason": "\\ud800"}']
)
def test_broken_bodies_are_422(control: TestClient, body: bytes) -> None:
    answer = control.put("/v1/spec/plan", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_lone_surrogate_in_a_field_is_422(control: TestClient, plan: dict[str, Any]) -> None:
    import json

    body = json.dumps(plan | {"reason": "\ud800"}).encode()
    answer = control.put("/v1/spec/plan", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/nothing", 404), ("POST", "/v1/spec/plan", 405)]
)
def test_the_frameworks_errors_are_problems(control: TestClient, method: str, path: str, status: int) -> None:
    answer = control.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status


def test_a_405_names_every_method(control: TestClient) -> None:
    assert control.post("/v1/spec/plan").headers["allow"] == "GET, PUT"
    assert control.put("/v1/spec/info").headers["allow"] == "GET"


def test_while_loading_it_is_503(config: WorkerConfig) -> None:
    with TestClient(create_control_app(ServedModel(), config), base_url="http://localhost") as client:
        assert client.get("/v1/spec/info").status_code == 503
        assert client.get("/v1/spec/stats").json()["detail"] == "the model is still loading"


def test_a_body_above_the_limit_is_413(control: TestClient) -> None:
    answer = control.put(
        "/v1/spec/plan", content=b" " * 300_000, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.fixture
def guarded(model: ServedModel, config: WorkerConfig, tmp_path: Path) -> Iterator[TestClient]:
    (tmp_path / "token").write_text("s3cret\n")
    server = ServerConfig(control_host="0.0.0.0", control_token_file=tmp_path / "token")
    with TestClient(
        create_control_app(model, config.model_copy(update={"server": server})), base_url="http://localhost"
    ) as client:
        yield client


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401), ("", 401), ("s3cret", 401), ("Basic s3cret", 401), ("Bearer ", 401), ("Bearer wrong", 403),
        ("Bearer s3cre", 403), ("Bearer s3cret2", 403), ("Bearer é", 403), ("Bearer s3cret", 200),
        ("bearer s3cret", 200),
    ],
)  # fmt: skip
def test_the_token_is_asked_for_before_anything_else(
    guarded: TestClient, header: str | None, status: int
) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    assert guarded.get("/v1/spec/stats", headers=headers).status_code == status
    if status != 200:
        answer = guarded.put("/v1/spec/plan", content=b"{", headers=headers)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert guarded.get("/openapi.json", headers=headers).status_code == status


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert read_control_tokens(ServerConfig(control_host=host)).change is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "worker", ""])
def test_beyond_loopback_a_token_or_a_word_is_needed(host: str) -> None:
    with pytest.raises(AccessError, match="server.control_host"):
        read_control_tokens(ServerConfig(control_host=host))
    assert read_control_tokens(ServerConfig(control_host=host, allow_open_control=True)).change is None


def test_a_token_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="server.control_token_file"):
        read_control_tokens(ServerConfig(control_token_file=tmp_path / "missing"))
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(AccessError, match="empty"):
        read_control_tokens(ServerConfig(control_token_file=tmp_path / "empty"))
