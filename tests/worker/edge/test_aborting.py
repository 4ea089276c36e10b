"""Ending a request from outside: by its exact id, or by its own deadline; the neighbours never notice."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from worker.engine_thread import EngineThread
from worker.request import TokenChunk

Live = Callable[[FastAPI], int]
WaitUntil = Callable[[Callable[[], bool]], None]

LONG = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 500}


@pytest.fixture
def http(app: FastAPI, live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{live(app)}", timeout=60) as client:
        yield client


@pytest.fixture
def scripted_http(scripted_app: FastAPI, live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{live(scripted_app)}", timeout=60) as client:
        yield client


class Asking(threading.Thread):
    """One request in the background; `answer` is there after `join`."""

    def __init__(self, http: httpx.Client, path: str, body: Any) -> None:
        super().__init__()
        self.http, self.path, self.body = http, path, body
        self.answer: httpx.Response
        self.start()

    def run(self) -> None:
        self.answer = self.http.post(self.path, json=self.body)


def test_only_the_exact_id_is_ended(
    http: httpx.Client, client: TestClient, engine: EngineThread, wait_until: WaitUntil
) -> None:
    alone = client.post("/generate", json={"text": "abc", "sampling_params": LONG}).json()
    asking = [
        Asking(http, "/generate", {"text": "abc", "rid": rid, "sampling_params": LONG})
        for rid in ("job-1", "job-10", "job-100")
    ]
    wait_until(lambda: engine.stats().queue.running == 3)
    for wrong in ("job", "job-", "job-2", "JOB-10", "*"):
        assert http.post(f"/v1/requests/{wrong}/abort").status_code == 404
    assert http.post("/v1/requests/job-10/abort").json() == {"id": "job-10", "aborted": True}
    for thread in asking:
        thread.join()
    first, ended, last = (thread.answer.json() for thread in asking)
    assert first["output_ids"] == last["output_ids"] == alone["output_ids"]
    assert ended["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "the request was aborted by its id",
    }
    assert ended["output_ids"] == alone["output_ids"][: len(ended["output_ids"])]
    assert len(ended["output_ids"]) < 500
    # Once ended, and once finished, an id is nobody's.
    for gone in ("job-10", "job-1"):
        assert http.post(f"/v1/requests/{gone}/abort").status_code == 404


@pytest.mark.parametrize(
    ("path", "content", "status", "param"),
    [
        ("/v1/requests//abort", None, 400, "id"), ("/v1/requests/nobody/abort", None, 404, "id"),
        ("/abort_request", {"rid": ""}, 400, "rid"), ("/abort_request", {"rid": "nobody"}, 404, "rid"),
        ("/abort_request", {}, 400, "rid"), ("/abort_request", {"rid": 5}, 400, "rid"),
        ("/abort_request", {"rid": None}, 400, "rid"),
        ("/abort_request", {"rid": "x", "abort_all": True}, 400, "abort_all"),
        ("/abort_request", [], 400, None),
    ],
)  # fmt: skip
def test_what_names_no_request(
    client: TestClient, path: str, content: Any, status: int, param: str | None
) -> None:
    answer = client.post(path, json=content)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "request_id": "me"}),
        ("/v1/completions", {"prompt": ["x", "y"], "request_id": "me"}),
        ("/generate", {"text": ["x", "y"], "rid": "me"}),
    ],
)
def test_every_api_can_be_aborted_by_the_clients_own_id(
    scripted_http: httpx.Client, scripted: Any, wait_until: WaitUntil, path: str, body: Any
) -> None:
    asking = Asking(scripted_http, path, body)
    wait_until(lambda: bool(scripted.submitted))
    assert scripted_http.post("/abort_request", json={"rid": "me"}).status_code == 200
    assert scripted.aborted == [request.id for request in scripted.submitted]
    for request in scripted.submitted:  # what the real engine does before its next round
        request.sink(TokenChunk((), "abort"))
    asking.join()
    assert asking.answer.headers["x-request-id"] == "me"
    if path != "/generate":
        assert asking.answer.status_code == 499
        assert asking.answer.json()["error"]["code"] == "aborted"
    assert len(scripted.aborted) == len(scripted.submitted), "nothing is aborted twice"


def test_one_prompt_of_a_batch_has_an_id_of_its_own(
    scripted_http: httpx.Client, scripted: Any, wait_until: WaitUntil
) -> None:
    asking = Asking(scripted_http, "/generate", {"text": ["x", "y"], "rid": "me"})
    wait_until(lambda: len(scripted.submitted) == 2)
    assert scripted_http.post("/v1/requests/me_1/abort").status_code == 200
    assert scripted.aborted == [scripted.submitted[1].id]
    scripted.submitted[0].sink(TokenChunk((72,), "length"))
    scripted.submitted[1].sink(TokenChunk((), "abort"))
    asking.join()
    metas = [answer["meta_info"] for answer in asking.answer.json()]
    assert [meta["id"] for meta in metas] == ["me_0", "me_1"]
    assert [meta["finish_reason"]["type"] for meta in metas] == ["length", "abort"]


def test_an_id_in_flight_is_not_given_twice(
    scripted_http: httpx.Client, scripted: Any, wait_until: WaitUntil
) -> None:
    asking = Asking(scripted_http, "/generate", {"text": "x", "rid": "me"})
    wait_until(lambda: bool(scripted.submitted))
    answer = scripted_http.post("/v1/completions", json={"prompt": "x", "request_id": "me"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "duplicate_id")
    assert len(scripted.submitted) == 1
    scripted.submitted[0].sink(TokenChunk((72,), "length"))
    asking.join()
    scripted.script = [TokenChunk((72,), "length")]
    assert scripted_http.post("/generate", json={"text": "x", "rid": "me"}).status_code == 200


def test_a_stream_says_how_it_ended(http: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 500, "temperature": 0, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        assert stream.headers["x-request-id"] == first["id"]
        assert http.post(f"/v1/requests/{first['id']}/abort").status_code == 200
        last = [line for line in lines if line][-2:]
    assert json.loads(last[0].removeprefix("data: "))["error"]["code"] == "aborted"
    assert last[1] == "data: [DONE]"


TIMED_OUT = TokenChunk((), "abort", error="timeout: longer than 1.5 s")


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token_is_an_error(
    scripted_client: TestClient, scripted: Any, stream: bool
) -> None:
    scripted.script = [TIMED_OUT]
    body = {"prompt": "abc", "timeout_seconds": 1.5, "stream": stream}
    answer = scripted_client.post("/v1/completions", json=body)
    assert scripted.submitted[-1].timeout_seconds == 1.5
    if stream:
        error = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 408
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("timeout", "timeout_error")
    assert error["message"] == "timeout: longer than 1.5 s"


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_said_before_a_deadline_is_the_answer(
    scripted_client: TestClient, scripted: Any, stream: bool
) -> None:
    scripted.script = [TokenChunk((72, 105)), TIMED_OUT]
    body = {"prompt": "abc", "timeout_seconds": 2, "stream": stream}
    answer = scripted_client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    if stream:
        chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
        choices = [chunk["choices"][0] for chunk in chunks]
        choice = {**choices[-1], "text": "".join(choice["text"] for choice in choices)}
    else:
        choice = answer.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hi", "abort", "timeout")
    native = scripted_client.post("/generate", json={"text": "abc", "timeout_seconds": 2}).json()
    assert native["meta_info"]["finish_reason"] == {"type": "abort", "message": "timeout: longer than 1.5 s"}
    assert scripted.submitted[-1].timeout_seconds == 2
