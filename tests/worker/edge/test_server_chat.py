"""`POST /v1/chat/completions`: answers, streams and refusals, against a real engine with a tiny model."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from worker.tokenization import Tokenizer

MESSAGES = [{"role": "user", "content": "Hello, hello, hello"}]
GREEDY = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True}


def post(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/chat/completions", json=body)


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_answer_has_openais_shape_and_exact_counts(client: TestClient, tokenizer: Tokenizer) -> None:
    answer = post(client, **GREEDY, max_tokens=11, model="tiny").json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("chatcmpl-")
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    prompt_tokens = len(tokenizer.encode_chat(MESSAGES))
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 11,
        "total_tokens": prompt_tokens + 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_stream_joins_to_the_whole_answer(client: TestClient) -> None:
    whole = post(client, **GREEDY, max_tokens=60).json()
    streamed = post(client, **GREEDY, max_tokens=60, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    chunks = events(streamed.text)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert len(deltas) > 5, "the text came in pieces"


def test_usage_comes_last_when_asked_for(client: TestClient) -> None:
    body = GREEDY | {"max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(post(client, **body).text)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 7
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_usage_comes_with_every_chunk_when_asked_for(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(post(client, **GREEDY, max_tokens=7, stream=True, stream_options=options).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 7


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6])
def test_max_tokens_is_exact_whatever_the_depth(client: TestClient, limit: int) -> None:
    assert post(client, **GREEDY, max_tokens=limit).json()["usage"]["completion_tokens"] == limit
    # The newer name wins.
    both = post(client, **GREEDY, max_tokens=9, max_completion_tokens=limit).json()
    assert both["usage"]["completion_tokens"] == limit


def test_without_max_tokens_the_context_is_the_bound(client: TestClient) -> None:
    answer = post(client, **GREEDY).json()
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"
    clipped = post(client, **GREEDY, max_tokens=100_000).json()
    assert clipped["choices"] == answer["choices"]


def test_seed_repeats_and_differs(client: TestClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 20, "ignore_eos": True}

    def text(seed: int) -> str:
        return str(post(client, **body, seed=seed).json()["choices"][0]["message"]["content"])

    assert text(1) == text(1)
    assert len({text(seed) for seed in (1, 2, 3, -4)}) > 1


def test_content_may_be_text_parts(client: TestClient) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello, hello, hello"}]}]
    assert (
        post(client, **GREEDY | {"messages": parts}, max_tokens=8).json()["choices"]
        == post(client, **GREEDY, max_tokens=8).json()["choices"]
    )


def test_a_stop_token_ends_the_text_before_itself(client: TestClient, tokenizer: Tokenizer) -> None:
    native = client.post(
        "/generate",
        json={
            "input_ids": tokenizer.encode_chat(MESSAGES),
            "sampling_params": {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True},
        },
    ).json()
    stop = native["output_ids"][9]
    upto = native["output_ids"].index(stop)
    answer = post(client, **GREEDY, max_tokens=30, stop_token_ids=[stop]).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(native["output_ids"][:upto])
    assert answer["usage"]["completion_tokens"] == upto + 1


def test_unknown_fields_and_asking_for_nothing_are_tolerated(client: TestClient) -> None:
    neutral = {
        "n": 1, "stop": None, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {},
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "min_tokens": 0, "user": "me",
        "store": False, "made_up": {"x": 1},
    }  # fmt: skip
    assert post(client, **GREEDY, max_tokens=2, **neutral).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", True), ("top_logprobs", 2), ("presence_penalty", 0.5),
        ("frequency_penalty", -1), ("repetition_penalty", 1.1), ("logit_bias", {"5": 1}), ("n", 2), ("n", 0),
        ("n", True), ("echo", True), ("tools", [{"type": "function"}]), ("response_format", {"type": "json_object"}),
        ("response_format", "text"), ("chat_template", "x"), ("modalities", ["audio"]), ("best_of", 2),
        ("guided_json", {"a": 1}), ("skip_special_tokens", False), ("function_call", {"name": "f"}),
    ],
)  # fmt: skip
def test_what_would_change_the_output_is_refused_by_name(client: TestClient, field: str, value: Any) -> None:
    answer = post(client, **GREEDY, max_tokens=2, **{field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert field in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"), ({"top_p": 1.5}, "top_p"), ({"top_k": -2}, "top_k"), ({"top_k": 1.0}, "top_k"),
        ({"min_p": 2}, "min_p"), ({"seed": 2**63}, "seed"), ({"seed": 1.5}, "seed"), ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"), ({"max_tokens": 2**40}, "max_tokens"), ({"stream": "yes"}, "stream"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"), ({"ignore_eos": 1}, "ignore_eos"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"), ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stream_options": 1}, "stream_options"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"), ({"messages": [1]}, "messages.0"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content"), ({"model": 3}, "model"),
    ],
)  # fmt: skip
def test_bad_values_are_400_and_name_the_field(client: TestClient, change: Any, param: str) -> None:
    answer = post(client, **GREEDY | {"max_tokens": 2} | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"


def test_missing_messages(client: TestClient) -> None:
    assert post(client).json()["error"]["param"] == "messages"


def test_another_model_is_404(client: TestClient) -> None:
    answer = post(client, **GREEDY, model="gpt-4")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "tiny" in answer.json()["error"]["message"]


def test_a_prompt_beyond_the_context_names_the_bound(client: TestClient) -> None:
    answer = post(client, messages=[{"role": "user", "content": "x" * 3000}])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "512" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}', b"[" * 100_000,
        b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}',
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
def test_broken_bodies_are_400(client: TestClient, path: str, body: bytes) -> None:
    answer = client.post(path, content=body)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
