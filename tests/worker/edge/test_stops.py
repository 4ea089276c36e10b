"""Where an answer ends: stop strings, stop tokens and minimum lengths, streamed and not, at every depth."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from worker.tokenization import Tokenizer

GREEDY = {"temperature": 0, "ignore_eos": True}
PROMPT = "abc abc abc"
LENGTH = 60


@pytest.fixture
def free_ids(client: TestClient) -> list[int]:
    """What the model says when nothing stops it."""
    sampling = GREEDY | {"max_new_tokens": LENGTH}
    return list(
        client.post("/generate", json={"text": PROMPT, "sampling_params": sampling}).json()["output_ids"]
    )


def chosen_stops(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Pairs of whole characters that the answer holds: each spans two tokens, at every place in a round."""
    text = tokenizer.decode(ids)
    pairs = [text[start : start + 2] for start in range(2, len(text) - 2)]
    return [pair for pair in dict.fromkeys(pairs) if "\N{REPLACEMENT CHARACTER}" not in pair]


def stream_text(client: TestClient, path: str, body: Any) -> tuple[str, Any, Any]:
    """Return the joined text, the choice that ended it, and the usage."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = client.post(path, json=body | {"stream": True, "stream_options": options})
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
    )
    return text, choices[-1], chunks[-1]["usage"]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_ids_counts_usage_and_text_end_at_the_same_token(
    client: TestClient, tokenizer: Tokenizer, free_ids: list[int], num_steps: int
) -> None:
    stops = chosen_stops(tokenizer, free_ids)
    assert len(stops) > 10
    for stop in stops[:10]:
        upto = next(n for n in range(1, LENGTH + 1) if stop in tokenizer.decode(free_ids[:n]))
        shown = tokenizer.decode(free_ids[:upto]).partition(stop)[0]
        sampling = GREEDY | {"max_new_tokens": LENGTH, "stop": stop, "num_steps": num_steps}
        native = client.post("/generate", json={"text": PROMPT, "sampling_params": sampling}).json()
        assert native["text"] == shown
        assert native["output_ids"] == free_ids[:upto]
        assert native["meta_info"]["completion_tokens"] == upto
        assert native["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        body = {"prompt": PROMPT, "max_tokens": LENGTH, "stop": [stop], "num_steps": num_steps, **GREEDY}
        whole = client.post("/v1/completions", json=body).json()
        choice = whole["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (shown, "stop", stop)
        assert whole["usage"]["completion_tokens"] == upto
        text, last, usage = stream_text(client, "/v1/completions", body)
        assert (text, last["finish_reason"], last["stop_reason"]) == (shown, "stop", stop)
        assert usage == whole["usage"]


def test_the_earliest_of_several_wins(client: TestClient, tokenizer: Tokenizer, free_ids: list[int]) -> None:
    text = tokenizer.decode(free_ids)
    stops = chosen_stops(tokenizer, free_ids)[3:12:2]
    first = min(stops, key=text.find)
    body = {"prompt": PROMPT, "max_tokens": LENGTH, "stop": stops, **GREEDY}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (text.partition(first)[0], first)


def test_what_was_held_back_comes_at_the_end(
    client: TestClient, tokenizer: Tokenizer, free_ids: list[int]
) -> None:
    text = tokenizer.decode(free_ids)
    never = text[-3:] + "\N{SNOWMAN}" * 40  # the text ends with a true prefix of it
    body = {"prompt": PROMPT, "max_tokens": LENGTH, "stop": never, **GREEDY}
    shown, last, _ = stream_text(client, "/v1/completions", body)
    assert shown == text
    assert last["finish_reason"] == "length"


def test_chat_stops_too(client: TestClient, tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": LENGTH, **GREEDY}
    free = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    stop = next(pair for n in range(4, 40) if "\N{REPLACEMENT CHARACTER}" not in (pair := free[n : n + 2]))
    choice = client.post("/v1/chat/completions", json=body | {"stop": stop}).json()["choices"][0]
    assert choice["message"]["content"] == free.partition(stop)[0]
    text, last, _ = stream_text(client, "/v1/chat/completions", body | {"stop": stop})
    assert (text, last["finish_reason"]) == (free.partition(stop)[0], "stop")


def test_a_minimum_holds_stop_tokens_back(client: TestClient, free_ids: list[int]) -> None:
    stop = free_ids[4]
    early = GREEDY | {"max_new_tokens": 20, "stop_token_ids": [stop]}
    short = client.post("/generate", json={"text": PROMPT, "sampling_params": early}).json()
    assert short["meta_info"]["completion_tokens"] == free_ids.index(stop) + 1
    late = early | {"min_new_tokens": 12}
    long = client.post("/generate", json={"text": PROMPT, "sampling_params": late}).json()
    assert stop not in long["output_ids"][:12]
    assert long["meta_info"]["completion_tokens"] >= 12
    body = {"prompt": PROMPT, "max_tokens": 20, "min_tokens": 12, "stop_token_ids": [stop], **GREEDY}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] >= 12
    # Where they contradict each other the maximum holds.
    body |= {"max_tokens": 5}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5


def test_a_stop_token_is_told_and_eos_is_not(client: TestClient, free_ids: list[int]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "stop_token_ids": [free_ids[4]], **GREEDY}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["stop_reason"] == free_ids[4]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"stop": ""}, "stop.0"), ({"stop": ["a", ""]}, "stop.1"), ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop.1"),
        ({"stop": ["a"] * 17}, "stop"), ({"stop": "x" * 257}, "stop.0"), ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": [258]}, "stop_token_ids"), ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"), ({"min_tokens": 1.5}, "min_tokens"),
    ],
)  # fmt: skip
def test_bad_stops_are_400_and_name_the_field(client: TestClient, change: Any, param: str) -> None:
    answer = client.post("/v1/completions", json={"prompt": "x"} | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_nothing_to_stop_at_is_fine(client: TestClient) -> None:
    for stop in (None, []):
        assert client.post("/v1/completions", json={"prompt": "x", "stop": stop}).status_code == 200
