"""The HTTP API: statuses, shapes, strictness; the loop runs behind it on real time."""

import asyncio
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from controller.app import create_app
from controller.clock import SystemClock
from controller.config import ControllerConfig
from worker.protocol import PlanStatus, SpecPlan


@pytest.fixture
def simulated(simulation: ModuleType) -> Any:
    return simulation.SimulatedWorker(simulation.VirtualClock())


@pytest.fixture
def client(simulated: Any) -> Iterator[TestClient]:
    config = ControllerConfig.model_validate(
        {
            "loop": {
                "poll_interval_seconds": 0.02,
                "confirm_timeout_seconds": 0.1,
                "recent_window_seconds": 600,
                "backoff_max_seconds": 0.02,
            },
            "guards": {"window_seconds": 600},
            "journal": {"path": ":memory:"},
            "workers": [{"id": "a", "url": "http://a:1"}],
        }
    )
    app = create_app(config, clock=SystemClock(), registry=CollectorRegistry(), clients={"a": simulated})
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        wait_for(lambda: client.get("/v1/workers/a/depth").json()["source"] == "policy")
        yield client


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.01)


def problem_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status and body["title"] and body["detail"]
    return body


def test_depth_before_during_and_after_a_pin(client: TestClient, simulated: Any) -> None:
    before = client.get("/v1/workers/a/depth").json()
    assert before["desired"] == before["effective"] == 2 and before["source"] == "policy"
    assert before["tiers"] == [0, 1, 2, 3, 5, 7] and before["expires_at"]
    answer = client.put(
        "/v1/workers/a/depth", json={"num_steps": 5, "num_draft_tokens": 6, "reason": "a test"}
    )
    assert answer.status_code == 200
    pinned = answer.json()
    assert (pinned["desired"], pinned["effective"], pinned["source"]) == (5, 5, "pin")
    assert pinned["plan_version"] > before["plan_version"] and pinned["expires_at"] > before["expires_at"]
    assert simulated.plans[-1].pin.num_steps == 5 and 3590 < simulated.plans[-1].pin.ttl_seconds <= 3600
    released = client.delete("/v1/workers/a/depth")
    assert released.status_code == 200 and released.json()["source"] == "policy"
    assert client.delete("/v1/workers/a/depth").status_code == 200, "releasing twice is fine"


def test_a_depth_without_a_tier_is_refused_by_name(client: TestClient, simulated: Any) -> None:
    body = problem_of(client.put("/v1/workers/a/depth", json={"num_steps": 4}), 422)
    assert body["candidate_steps"] == [0, 1, 2, 3, 5, 7] and "[0, 1, 2, 3, 5, 7]" in body["detail"]
    assert all(plan.pin is None for plan in simulated.plans)


def test_an_inconsistent_pair_names_both_numbers(client: TestClient, simulated: Any) -> None:
    answer = client.put("/v1/workers/a/depth", json={"num_steps": 3, "num_draft_tokens": 3})
    detail = problem_of(answer, 422)["detail"]
    assert "num_draft_tokens 3" in detail and "num_steps 3" in detail and "= 4" in detail
    assert all(plan.pin is None for plan in simulated.plans)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ('{"num_steps": true}', "num_steps"),
        ('{"num_steps": 3.0}', "num_steps"),
        ('{"num_steps": "3"}', "num_steps"),
        ('{"num_steps": -1}', "num_steps"),
        ('{"num_steps": null}', "num_steps"),
        ("{}", "num_steps"),
        ('{"num_steps": 3, "ttl_seconds": 0}', "ttl_seconds"),
        ('{"num_steps": 3, "ttl_seconds": NaN}', "ttl_seconds"),
        ('{"num_steps": 3, "ttl_seconds": 1e400}', "ttl_seconds"),
        ('{"num_steps": 3, "ttl_seconds": true}', "ttl_seconds"),
        ('{"num_steps": 3, "ttl_seconds": 1e9}', "ttl_seconds"),
        ('{"num_steps": 3, "depth": 4}', "depth"),
        ('{"num_steps": 3, "reason": 7}', "reason"),
        ('{"num_steps": 3, "reason": "\\ud800"}', "reason"),
        ("[3]", "body"),
        ("{", "body"),
        ("", "body"),
        ('"\\ud800"', "body"),
    ],
)
def test_bad_bodies_are_422_and_change_nothing(
    client: TestClient, simulated: Any, content: str, field: str
) -> None:
    answer = client.put("/v1/workers/a/depth", content=content, headers={"content-type": "application/json"})
    body = problem_of(answer, 422)
    assert any(field in error["field"] for error in body["errors"]), body
    assert all(plan.pin is None for plan in simulated.plans)


def test_202_while_the_worker_has_not_followed(client: TestClient, simulated: Any) -> None:
    put = simulated.put_plan

    async def slow(plan: SpecPlan) -> PlanStatus:
        return lagging(await put(plan))

    def lagging(status: PlanStatus) -> PlanStatus:
        return status.model_copy(update={"num_steps": 2})

    status = simulated.plan_status

    async def slow_status() -> PlanStatus:
        return lagging(await status())

    simulated.put_plan, simulated.plan_status = slow, slow_status
    answer = client.put("/v1/workers/a/depth", json={"num_steps": 5})
    assert answer.status_code == 202 and answer.json()["desired"] == 5


def test_503_keeps_the_wish_and_it_is_sent_later(
    client: TestClient, simulated: Any, simulation: ModuleType
) -> None:
    simulated.failure = simulation.UNREACHABLE
    wait_for(lambda: not client.get("/v1/workers").json()["workers"][0]["reachable"])
    body = problem_of(client.put("/v1/workers/a/depth", json={"num_steps": 7}), 503)
    assert body["depth"]["desired"] == 7 and body["depth"]["effective"] is None
    problem_of(client.put("/v1/workers/a/depth", json={"num_steps": 6}), 422)
    simulated.failure = None
    wait_for(lambda: client.get("/v1/workers/a/depth").json()["effective"] == 7)


def test_409_while_released(client: TestClient) -> None:
    assert client.put("/v1/workers/a/mode", json={"mode": "released"}).status_code == 200
    problem_of(client.put("/v1/workers/a/depth", json={"num_steps": 1}), 409)


def test_409_when_the_worker_insists_on_another_plan(
    client: TestClient, simulated: Any, simulation: ModuleType
) -> None:
    async def contest(plan: SpecPlan) -> PlanStatus:
        newer = plan.model_copy(update={"version": plan.version + 1})
        status = (await simulated.plan_status()).model_copy(update={"plan": newer})
        raise simulation.Conflict("409: somebody else's", status)

    simulated.put_plan = contest
    problem_of(client.put("/v1/workers/a/depth", json={"num_steps": 1}), 409)


@pytest.mark.parametrize("path", ["/v1/workers/b/depth", "/v1/workers/b", "/v1/workers/b/mode", "/nowhere"])
def test_404(client: TestClient, path: str) -> None:
    problem_of(client.get(path), 404)


def test_405_says_what_is_allowed(client: TestClient) -> None:
    answer = client.post("/v1/workers/a/depth", json={})
    problem_of(answer, 405)
    assert answer.headers["allow"] == "DELETE, GET, PUT"


def test_a_large_body_is_413_announced_or_not(client: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        yield from (b" " * 10_000 for _ in range(10))

    headers = {"content-type": "application/json"}
    problem_of(client.put("/v1/mode", content=b" " * 100_000, headers=headers), 413)
    problem_of(client.put("/v1/mode", content=chunks(), headers=headers), 413)


def test_a_rollback_over_http(client: TestClient, simulated: Any) -> None:
    problem_of(client.post("/v1/workers/a/depth/rollback"), 409)
    client.put("/v1/workers/a/depth", json={"num_steps": 5})
    answer = client.post("/v1/workers/a/depth/rollback", json={"ttl_seconds": 60, "reason": "worse"})
    assert answer.status_code == 200 and answer.json()["source"] == "policy"
    assert answer.json()["held_until"] and answer.json()["reason"] == "worse"
    assert simulated.plans[-1].pin is None
    last = client.get("/v1/decisions").json()["decisions"][-1]
    assert (last["kind"], last["reason"], last["outcome"]) == ("rollback", "rolled_back", "applied")
    assert "undid pin at 5" in last["message"] and "worse" in last["message"]
    assert client.delete("/v1/workers/a/depth").json()["held_until"] is None
    problem_of(client.post("/v1/workers/b/depth/rollback"), 404)
    problem_of(client.post("/v1/workers/a/depth/rollback", json={"ttl_seconds": -1}), 422)
    client.put("/v1/workers/a/mode", json={"mode": "released"})
    problem_of(client.post("/v1/workers/a/depth/rollback"), 409)


def test_a_rollback_of_an_unreachable_worker_is_kept(
    client: TestClient, simulated: Any, simulation: ModuleType
) -> None:
    client.put("/v1/workers/a/depth", json={"num_steps": 5})
    simulated.failure = simulation.UNREACHABLE
    body = problem_of(client.post("/v1/workers/a/depth/rollback"), 503)
    assert body["depth"]["desired"] == 2
    simulated.failure = None
    wait_for(lambda: simulated.plans[-1].pin is None)


def test_modes(client: TestClient) -> None:
    assert client.get("/v1/mode").json() == {"mode": "active", "workers": {"a": "active"}}
    client.put("/v1/workers/a/mode", json={"mode": "frozen"})
    assert client.get("/v1/workers/a/mode").json() == {"worker": "a", "mode": "frozen", "own": True}
    assert client.get("/v1/workers/a/depth").json()["source"] == "frozen"
    assert client.put("/v1/mode", json={"mode": "advisory"}).json()["workers"] == {"a": "advisory"}
    assert client.delete("/v1/workers/a/mode").json()["mode"] == "advisory"
    detail = problem_of(client.put("/v1/mode", json={"mode": "off"}), 422)["detail"]
    assert "mode" in detail and "released" in detail, "names the field and what is allowed"
    records = client.get("/v1/decisions").json()["decisions"]
    assert [r["reason"] for r in records if r["kind"] == "mode"] == ["frozen", "advisory"]


def test_workers_show_what_the_live_table_needs(client: TestClient, simulated: Any) -> None:
    simulated.acceptance = [0.5] * 64
    simulated.batch_size = 3
    simulated.rounds(200)

    def shown() -> Any:
        return client.get("/v1/workers").json()["workers"][0]

    wait_for(lambda: shown()["rounds_by_num_steps"] == {"2": 200})
    worker = shown()
    assert worker["id"] == "a" and worker["reachable"] and worker["boot_id"] == "boot-1"
    assert worker["running_batch"] == 3 and worker["rounds_by_num_steps"] == {"2": 200}
    assert 1.5 < worker["accept_length"] < 2.0 and len(worker["position_acceptance"]) == 2
    assert worker["tokens_per_second"] > 0 and worker["observation_age_seconds"] < 5
    assert worker["depth"]["slots"][1] == {
        "max_batch_size": 2, "num_steps": 2, "candidate_steps": [0, 1, 2, 3, 5, 7],
    }  # fmt: skip
    assert worker["last_decision"]["reason"]


def test_decisions_are_read_with_a_cursor(client: TestClient) -> None:
    client.put("/v1/mode", json={"mode": "frozen"})
    everything = client.get("/v1/decisions").json()
    assert [d["reason"] for d in everything["decisions"]] == ["met", "frozen"]
    first = client.get("/v1/decisions", params={"limit": 1}).json()
    assert first["next"] == 1
    rest = client.get("/v1/decisions", params={"after": first["next"], "worker": "a"}).json()
    assert first["decisions"] + rest["decisions"] == everything["decisions"]
    assert client.get("/v1/decisions", params={"after": rest["next"]}).json() == {
        "decisions": [], "next": rest["next"], "newest": rest["next"],
    }  # fmt: skip
    problem_of(client.get("/v1/decisions", params={"worker": "b"}), 404)
    for bad in ({"limit": 0}, {"limit": 1001}, {"after": -1}, {"after": "x"}):
        problem_of(client.get("/v1/decisions", params=bad), 422)


def test_metrics_health_and_links(client: TestClient) -> None:
    metrics = client.get("/metrics", follow_redirects=False)
    assert metrics.status_code == 200
    for series in (
        'spec_controller_worker_up{worker="a"} 1.0',
        'spec_controller_desired_num_steps{batch_size_le="4",worker="a"} 2.0',
        'spec_controller_mode{mode="active",worker="a"} 1.0',
        'spec_controller_decisions_total{kind="worker",outcome="noted",policy="goodput",reason="met",worker="a"} 1.0',
        "spec_controller_tick_seconds_bucket",
        "spec_controller_observation_age_seconds",
    ):
        assert series in metrics.text, series
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").json() == {
        "ready": True, "detail": "ok", "unreachable_workers": [], "journal": "ok",
    }  # fmt: skip
    links = client.get("/v1").json()["links"]
    assert {"page", "v1/workers", "v1/events"} <= set(links) and links["page"] == "http://localhost/"


def test_readiness_turns_false_when_turns_are_late(simulated: Any, simulation: ModuleType) -> None:
    clock = simulation.VirtualClock()
    config = ControllerConfig.model_validate(
        {"workers": [{"id": "a", "url": "http://a:1"}], "journal": {"path": ":memory:"}}
    )
    app = create_app(config, clock=clock, registry=CollectorRegistry(), clients={"a": simulated})
    assert TestClient(app, base_url="http://localhost").get("/readyz").status_code == 503, (
        "the loop does not run"
    )

    async def hang() -> Any:
        await asyncio.Event().wait()

    with TestClient(app, base_url="http://localhost") as client:
        wait_for(lambda: client.get("/readyz").status_code == 200)
        simulated.stats = hang
        wait_for(lambda: app.state.loop.workers["a"].lock.locked())
        clock.now += 4.9
        assert client.get("/readyz").status_code == 200
        clock.now += 0.2
        late = client.get("/readyz")
        assert late.status_code == 503 and "'a'" in late.json()["detail"]
        assert client.get("/healthz").status_code == 200


def test_two_apps_in_one_process(simulated: Any) -> None:
    config = ControllerConfig.model_validate(
        {"workers": [{"id": "a", "url": "http://a:1"}], "journal": {"path": ":memory:"}}
    )
    for _ in range(2):
        create_app(config, clock=SystemClock(), registry=CollectorRegistry(), clients={"a": simulated})
