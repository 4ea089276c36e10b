"""`POST /v1/completions`: strings, token ids and lists of them, against a real engine with a tiny model."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from worker.tokenization import Tokenizer

GREEDY = {"temperature": 0, "ignore_eos": True}


def post(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/completions", json=body)


def native_ids(client: TestClient, text: str, count: int) -> list[int]:
    sampling = GREEDY | {"max_new_tokens": count}
    return list(
        client.post("/generate", json={"text": text, "sampling_params": sampling}).json()["output_ids"]
    )


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_answer_has_openais_shape_and_exact_counts(client: TestClient, tokenizer: Tokenizer) -> None:
    response = post(client, prompt="abc abc", max_tokens=9, model="tiny", **GREEDY)
    answer = response.json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert response.headers["x-request-id"] == answer["id"]
    assert answer["choices"] == [
        {
            "index": 0,
            "text": tokenizer.decode(native_ids(client, "abc abc", 9)),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (7, 9)


def test_every_form_of_a_prompt(client: TestClient, tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode("one"), tokenizer.encode("two")

    def texts(prompt: Any) -> list[str]:
        answer = post(client, prompt=prompt, max_tokens=6, **GREEDY).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
        return [choice["text"] for choice in answer["choices"]]

    expected = [tokenizer.decode(native_ids(client, text, 6)) for text in ("one", "two")]
    assert texts("one") == texts(one) == texts(["one"]) == texts([one]) == expected[:1]
    assert texts(["one", "two"]) == texts([one, two]) == expected


def test_sixteen_tokens_are_the_default(client: TestClient) -> None:
    assert post(client, prompt="x", **GREEDY).json()["usage"]["completion_tokens"] == 16


def test_streams_of_several_prompts_join_to_the_whole_answers(client: TestClient) -> None:
    prompts = ["one", "two", "three", "four", "five", "six"]  # more than run at once
    body = {"prompt": prompts, "max_tokens": 12, **GREEDY}
    whole = post(client, **body).json()
    options = {"include_usage": True}
    chunks = events(post(client, **body, stream=True, stream_options=options).text)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert chunks[-1]["usage"] == whole["usage"]
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    for expected in whole["choices"]:
        mine = [choice for choice in choices if choice["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"), ({"prompt": ["a", [1]]}, "prompt"), ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"), ({"prompt": [True]}, "prompt"), ({"prompt": [258]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"), ({"prompt": {"a": 1}}, "prompt"), ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": ["a"] * 13}, "prompt"),
        ({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"), ({"logprobs": 0}, "logprobs"),
        ({"n": 2}, "n"), ({"max_tokens": 0}, "max_tokens"), ({"min_tokens": -1}, "min_tokens"),
    ],
)  # fmt: skip
def test_bad_values_are_400_and_name_the_field(client: TestClient, change: Any, param: str) -> None:
    answer = post(client, **{"prompt": "x", "max_tokens": 2} | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


def test_a_prompt_is_needed(client: TestClient) -> None:
    assert post(client, max_tokens=2).json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("length", range(1, 8))  # up to deepest tier + 3, and one more
def test_the_shortest_prompts(client: TestClient, length: int) -> None:
    plain = post(client, prompt=[97] * length, max_tokens=8, speculation=False, **GREEDY).json()
    answer = post(client, prompt=[97] * length, max_tokens=8, **GREEDY).json()
    assert answer["choices"] == plain["choices"]
    assert answer["usage"]["completion_tokens"] == 8
