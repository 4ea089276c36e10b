"""Tokens for reading and changing; open only where nothing but this machine can reach it, or where told so."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from controller.app import create_app
from controller.app.access import AccessError, read_tokens
from controller.clock import SystemClock
from controller.config import ControllerConfig, load_config

CHANGE, READ = "token-for-changes", "token-for-reading"


@pytest.fixture
def make_client(simulation: ModuleType) -> Iterator[Callable[..., TestClient]]:
    clients: list[TestClient] = []

    def make(**server: Any) -> TestClient:
        config = ControllerConfig.model_validate(
            {
                "server": server,
                "journal": {"path": ":memory:"},
                "workers": [{"id": "a", "url": "http://a:1"}],
            }
        )
        worker = simulation.SimulatedWorker(simulation.VirtualClock())
        app = create_app(config, clock=SystemClock(), registry=CollectorRegistry(), clients={"a": worker})
        clients.append(TestClient(app, base_url="http://localhost"))
        return clients[-1].__enter__()

    yield make
    for client in clients:
        client.__exit__(None, None, None)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_each_token_opens_what_it_is_for(make_client: Callable[..., TestClient]) -> None:
    client = make_client(token=CHANGE, read_token=READ)
    reads = ["/v1/workers", "/v1/decisions", "/v1/mode", "/metrics", "/openapi.json", "/v1", "/nowhere"]
    for path in reads:
        for headers in ({}, bearer("wrong"), {"Authorization": CHANGE}, {"Authorization": f"Basic {CHANGE}"}):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.headers["content-type"] == "application/problem+json"
        assert client.get(path, headers=bearer(READ)).status_code in (200, 404)
        assert client.get(path, headers=bearer(CHANGE)).status_code in (200, 404)
    for path in ("/healthz", "/readyz"):
        assert client.get(path).status_code in (200, 503)
        assert client.put(path).status_code == 401
    body = {"mode": "frozen"}
    assert client.put("/v1/mode", json=body).status_code == 401
    assert client.put("/v1/mode", json=body, headers=bearer(READ)).status_code == 403
    assert client.get("/v1/mode", headers=bearer(READ)).json()["mode"] == "active"
    assert client.put("/v1/mode", json=body, headers=bearer(CHANGE)).status_code == 200
    assert client.put("/v1/mode", content=b"{", headers=bearer(READ)).status_code == 403, "before the body"


def test_one_token_does_both_and_metrics_can_be_open(make_client: Callable[..., TestClient]) -> None:
    client = make_client(token=CHANGE, open_metrics=True)
    assert client.get("/metrics").status_code == 200 and client.get("/v1/mode").status_code == 401
    assert client.get("/v1/mode", headers=bearer(CHANGE)).status_code == 200


def test_another_sites_page_changes_nothing(make_client: Callable[..., TestClient]) -> None:
    client = make_client()
    path, page = "/v1/workers/a/depth/rollback", {"Origin": "http://evil.example"}
    assert client.post(path, headers=page).status_code == 403
    for origin in ("null", "http://[", "http://[::1", ""):
        answer = client.post(path, headers={"Origin": origin})
        assert answer.status_code == 403 and answer.json()["status"] == 403, origin
    assert client.get("/v1/mode", headers=page).status_code == 200
    assert client.put("/v1/mode", json={"mode": "active"}, headers={"Origin": "http://localhost"}).is_success


def test_without_a_token_only_loopbacks_names_are_answered(make_client: Callable[..., TestClient]) -> None:
    rebound = {"Host": "evil.example:8200", "Origin": "http://evil.example:8200"}
    client = make_client()
    for path in ("/", "/healthz", "/v1/workers", "/metrics"):
        answer = client.get(path, headers=rebound)
        assert answer.status_code == 400 and answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == 400 and "Host" in answer.json()["detail"]
    for name in ("", "localhost@evil.example", "evil.example/localhost", "[::1", "localhost:x", "[::2]"):
        assert client.get("/v1/workers", headers={"Host": name}).status_code == 400, name
    assert client.put("/v1/mode", json={"mode": "frozen"}, headers=rebound).status_code == 400
    for name in ("localhost", "LOCALHOST:8200", "127.0.0.1:8200", "[::1]:8200"):
        assert client.get("/v1/workers", headers={"Host": name}).status_code == 200
    assert (
        make_client(host="127.3.2.1").get("/v1/mode", headers={"Host": "127.3.2.1:8200"}).status_code == 200
    )
    assert make_client(allow_open=True).get("/v1/mode", headers=rebound).status_code == 200
    assert make_client(token=CHANGE).get("/v1/mode", headers=bearer(CHANGE) | rebound).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "controller.example", ""])
def test_no_open_listener_off_loopback(host: str) -> None:
    def server(**fields: Any) -> Any:
        return ControllerConfig.model_validate({"server": {"host": host, **fields}}).server

    with pytest.raises(AccessError, match=r"server\.host: .* server\.allow_open = true"):
        read_tokens(server())
    assert read_tokens(server(allow_open=True)).change is None
    assert read_tokens(server(token=CHANGE)).change == CHANGE


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_may_be_open(host: str) -> None:
    assert read_tokens(ControllerConfig.model_validate({"server": {"host": host}}).server).change is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"read_token": READ}, "server.token"),
        ({"token": CHANGE, "read_token": CHANGE}, "server.read_token"),
        ({"token": "short"}, "server.token"),
        ({"token": "two words are no token"}, "server.token"),
        ({"token": "ümlaute-gehen-nicht"}, "server.token"),
        ({"token_file": "/nowhere/token"}, "server.token_file"),
    ],
)
def test_unfit_tokens_are_refused_by_name(fields: dict[str, str], named: str) -> None:
    with pytest.raises(AccessError, match=f"^{named}: ") as refusal:
        read_tokens(ControllerConfig.model_validate({"server": fields}).server)
    assert CHANGE not in str(refusal.value)


def test_tokens_come_from_files_and_environment_and_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(CHANGE + "\n")
    monkeypatch.setenv("SPEC_CONTROLLER_SERVER__TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("SPEC_CONTROLLER_SERVER__READ_TOKEN", READ)
    config = load_config(None)
    tokens = read_tokens(config.server)
    assert (tokens.change, tokens.read) == (CHANGE, READ)
    assert READ not in config.model_dump_json() and READ not in repr(config)
    monkeypatch.setenv("SPEC_CONTROLLER_SERVER__TOKEN", CHANGE)
    with pytest.raises(ValueError, match="exclude each other"):
        load_config(None)
