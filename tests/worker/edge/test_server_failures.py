"""What goes wrong: full queues, dead engines, broken routes, oversized bodies. Always a clear answer, never a hang."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from worker.api.served import ServedModel, ServingEngine
from worker.config import WorkerConfig
from worker.engine_thread import EngineThread, Health
from worker.request import EngineStopped, PromptTooLong, QueueFull, TokenChunk
from worker.server import create_app
from worker.tokenization import Tokenizer

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def test_real_and_scripted_engine_have_the_same_door(scripted: Any) -> None:
    methods = [name for name, _ in inspect.getmembers(ServingEngine, inspect.isfunction) if name[0] != "_"]
    known = {"submit", "abort", "put_plan", "plan_status", "stats", "telemetry", "health", "shutdown"}
    assert known == set(methods)
    for name in methods:
        expected = list(inspect.signature(getattr(ServingEngine, name)).parameters)
        for engine in (EngineThread, type(scripted)):
            assert list(inspect.signature(getattr(engine, name)).parameters) == expected, (engine, name)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("rejection", "status", "code"),
    [
        (QueueFull("8 requests are waiting already", 2.4), 429, "queue_full"),
        (PromptTooLong("too long"), 400, "context_length_exceeded"),
        (EngineStopped("the worker is shutting down"), 503, "stopping"),
    ],
)
def test_rejections(
    scripted_client: TestClient,
    scripted: Any,
    path: str,
    stream: bool,
    rejection: Exception,
    status: int,
    code: str,
) -> None:
    scripted.refuse = rejection
    answer = scripted_client.post(path, json=CHAT | {"text": "Hi", "stream": stream})
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["message"] == str(rejection)
    if status in (429, 503):
        assert int(answer.headers["retry-after"]) >= 1


def test_a_batch_that_does_not_fit_is_taken_back(scripted_client: TestClient, scripted: Any) -> None:
    accept = scripted.submit

    def submit(request: Any) -> None:
        if len(scripted.submitted) == 2:
            raise QueueFull("full", 1.0)
        accept(request)

    scripted.submit = submit
    assert scripted_client.post("/generate", json={"text": ["a", "b", "c", "d"]}).status_code == 429
    assert scripted.aborted == [request.id for request in scripted.submitted]
    assert len(scripted.aborted) == 2


@pytest.mark.parametrize(
    ("chunk", "status", "message"),
    [
        (TokenChunk((), "error", error="the model's logits hold NaN"), 500, "the model's logits hold NaN"),
        (TokenChunk((), "abort"), 503, "the server is stopping; the answer ends early"),
    ],
)
def test_an_answer_cut_short_says_so(
    scripted_client: TestClient, scripted: Any, chunk: TokenChunk, status: int, message: str
) -> None:
    scripted.script = [TokenChunk((72, 105)), chunk]
    whole = scripted_client.post("/v1/chat/completions", json=CHAT)
    assert whole.status_code == status
    assert whole.json()["error"]["message"] == message
    lines = scripted_client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    assert json.loads(lines[-3].removeprefix("data: "))["error"]["message"] == message
    native = scripted_client.post("/generate", json={"text": "Hi"}).json()
    assert native["text"] == "Hi"
    assert native["meta_info"]["finish_reason"] == {"type": "abort", "message": message}


def test_a_bug_is_a_500_in_the_same_shape(scripted_client: TestClient, scripted: Any) -> None:
    scripted.refuse = ZeroDivisionError("secret detail")  # not a rejection: a bug
    answer = scripted_client.post("/generate", json={"text": "Hi"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/generate", 405),
        ("GET", "/v1/models/other", 404),
        ("PUT", "/metrics", 405),
    ],
)
def test_the_frameworks_errors_have_openais_shape(
    client: TestClient, method: str, path: str, status: int
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_bodies_above_the_limit_are_413_announced_or_not(
    model: ServedModel, config: WorkerConfig, registry: CollectorRegistry
) -> None:
    server = config.server.model_copy(update={"max_body_bytes": 1000})
    app = create_app(model, config.model_copy(update={"server": server}), registry=registry)
    with TestClient(app) as client:
        body = json.dumps({"text": "x" * 2000}).encode()
        for content in (body, iter([body[:500], body[500:]])):
            answer = client.post("/generate", content=content)
            assert answer.status_code == 413
            assert "1000 bytes" in answer.json()["error"]["message"]
        assert client.post("/generate", content=b'{"text": ""}').status_code == 400


def test_while_loading_only_health_answers(config: WorkerConfig, registry: CollectorRegistry) -> None:
    with TestClient(create_app(ServedModel(), config, registry=registry)) as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/readyz").status_code == 503
        assert client.get("/readyz").json()["detail"] == "loading"
        assert client.get("/metrics").status_code == 200
        for answer in (
            client.post("/v1/chat/completions", json=CHAT),
            client.post("/generate", json={"text": "Hi"}),
            client.get("/v1/models"),
        ):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "not_ready"
            assert "retry-after" in answer.headers


def test_readiness_follows_the_engine_and_liveness_only_its_death(
    scripted_client: TestClient, scripted: Any
) -> None:
    assert scripted_client.get("/readyz").status_code == 200
    scripted.state = Health(alive=True, ready=False, detail="the engine loop has not ticked for 31 s")
    assert scripted_client.get("/healthz").status_code == 200
    assert scripted_client.get("/readyz").status_code == 503
    assert "31 s" in scripted_client.get("/readyz").json()["detail"]
    scripted.state = Health(alive=False, ready=False, detail="the engine loop died")
    assert scripted_client.get("/healthz").status_code == 503
    assert scripted_client.get("/readyz").status_code == 503


def test_models_are_listed_as_openai_does(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json() == listed["data"][0]


def test_two_apps_in_one_process(model: ServedModel, config: WorkerConfig) -> None:
    for _ in range(2):
        assert isinstance(create_app(model, config, registry=CollectorRegistry()), FastAPI)


def test_a_model_without_a_chat_template_says_what_to_use(
    engine: EngineThread, config: WorkerConfig, registry: CollectorRegistry
) -> None:
    tokenizer = Tokenizer.load(Path(config.model.path))
    tokenizer._tokenizer.chat_template = None
    with TestClient(create_app(ServedModel(engine, tokenizer), config, registry=registry)) as client:
        answer = client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 400
        assert "/generate" in answer.json()["error"]["message"]
