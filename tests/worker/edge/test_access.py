"""Who may do what: the API key of the inference port, and the two tokens of the control port."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from worker.access import AccessError, read_api_key, read_control_tokens
from worker.api.served import ServedModel
from worker.config import ServerConfig, WorkerConfig
from worker.control import create_control_app
from worker.server import create_app

COMPLETION = {"prompt": "x", "max_tokens": 1}


def with_server(config: WorkerConfig, **fields: Any) -> WorkerConfig:
    return config.model_copy(update={"server": ServerConfig(**fields)})


@pytest.fixture
def keyed(model: ServedModel, config: WorkerConfig, tmp_path: Path) -> Iterator[TestClient]:
    (tmp_path / "key").write_text("sk-s3cret\n")
    app = create_app(model, with_server(config, api_key_file=tmp_path / "key"), registry=CollectorRegistry())
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401), ("", 401), ("sk-s3cret", 401), ("Basic sk-s3cret", 401), ("Bearer wrong", 401),
        ("Bearer sk-s3cre", 401), ("Bearer é", 401), ("Bearer sk-s3cret", 200), ("bearer sk-s3cret", 200),
    ],
)  # fmt: skip
def test_the_key_is_asked_for_before_anything_else(
    keyed: TestClient, header: str | None, status: int
) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    answer = keyed.post("/v1/completions", json=COMPLETION, headers=headers)
    assert answer.status_code == status
    for path in ("/v1/models", "/server_info", "/openapi.json"):
        assert keyed.get(path, headers=headers).status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/generate", "/abort_request", "/v1/requests/x/abort"):
            assert keyed.post(path, content=b"{", headers=headers).status_code == 401


def test_probes_and_scrapers_need_no_key(keyed: TestClient) -> None:
    for path in ("/healthz", "/health", "/readyz", "/metrics"):
        assert keyed.get(path).status_code == 200


def test_the_official_client_sends_it(keyed: TestClient) -> None:
    good = openai.OpenAI(api_key="sk-s3cret", base_url="http://testserver/v1", http_client=keyed)
    assert good.completions.create(model="tiny", prompt="x", max_tokens=1).usage is not None
    bad = openai.OpenAI(api_key="sk-other", base_url="http://testserver/v1", http_client=keyed)
    with pytest.raises(openai.AuthenticationError):
        bad.completions.create(model="tiny", prompt="x", max_tokens=1)


@pytest.fixture
def guarded(model: ServedModel, config: WorkerConfig, tmp_path: Path) -> Iterator[TestClient]:
    (tmp_path / "read").write_text("reader")
    server = {
        "control_host": "0.0.0.0",
        "control_token": "changer",
        "control_read_token_file": tmp_path / "read",
    }
    with TestClient(
        create_control_app(model, with_server(config, **server)), base_url="http://localhost"
    ) as client:
        yield client


@pytest.mark.parametrize(
    ("token", "reading", "changing"),
    [(None, 401, 401), ("wrong", 403, 403), ("reader", 200, 403), ("changer", 200, 422)],
)
def test_one_token_reads_and_one_changes(
    guarded: TestClient, token: str | None, reading: int, changing: int
) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    for path in ("/v1/spec/info", "/v1/spec/stats", "/v1/spec/plan"):
        assert guarded.get(path, headers=headers).status_code == reading
    answer = guarded.put("/v1/spec/plan", json={}, headers=headers)
    assert answer.status_code == changing  # 422: past the door, an empty plan
    assert answer.headers["content-type"] == "application/problem+json"
    if token == "reader":
        assert answer.json()["detail"] == "this bearer token may only read"


def test_without_a_token_the_control_port_answers_loopbacks_names_only(
    model: ServedModel, config: WorkerConfig
) -> None:
    rebound = {"Host": "evil.example:8101", "Origin": "http://evil.example:8101"}
    with TestClient(create_control_app(model, config), base_url="http://localhost") as client:
        assert client.get("/v1/spec/info", headers=rebound).status_code == 400
        assert client.put("/v1/spec/plan", json={}, headers=rebound).status_code == 400
        for name in ("127.0.0.1:8101", "[::1]:8101", "localhost"):
            assert client.get("/v1/spec/info", headers={"Host": name}).status_code == 200
    for server in ({"allow_open_control": True}, {"control_token": "changer"}):
        with TestClient(create_control_app(model, with_server(config, **server))) as client:
            headers = rebound | {"Authorization": "Bearer changer"}
            assert client.get("/v1/spec/info", headers=headers).status_code == 200


def test_secrets_come_from_files_or_values_but_not_both(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("  from-file \n")
    assert read_api_key(ServerConfig()) is None
    assert read_api_key(ServerConfig(api_key_file=tmp_path / "secret")) == "from-file"
    assert read_api_key(ServerConfig(api_key=SecretStr("from-value"))) == "from-value"
    with pytest.raises(AccessError, match="server.api_key"):
        read_api_key(ServerConfig(api_key=SecretStr("x"), api_key_file=tmp_path / "secret"))


@pytest.mark.parametrize("secret", ["", " ", "two words", "line\nbreak", "schlüssel"])
def test_what_no_header_can_carry_is_refused(secret: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(secret)
    with pytest.raises(AccessError, match="server.api_key_file"):
        read_api_key(ServerConfig(api_key_file=tmp_path / "secret"))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"control_read_token": "r"}, "goes together with"),
        ({"control_read_token": "same", "control_token": "same"}, "must differ"),
        ({"control_host": "0.0.0.0", "control_read_token": "r"}, "goes together with"),
        ({"control_host": "0.0.0.0"}, "is not loopback"),
    ],
)
def test_token_settings_that_make_no_sense(fields: Any, complaint: str) -> None:
    with pytest.raises(AccessError, match=complaint):
        read_control_tokens(ServerConfig(**fields))


def test_secrets_are_not_printed() -> None:
    server = ServerConfig(api_key=SecretStr("sk-1"), control_token=SecretStr("tok-1"))
    assert "sk-1" not in repr(server) + server.model_dump_json()
    assert "tok-1" not in repr(server) + server.model_dump_json()
