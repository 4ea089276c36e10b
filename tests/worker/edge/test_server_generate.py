"""`POST /generate` as SGLang's clients use it, against a real engine with a tiny model."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from worker.tokenization import Tokenizer

GREEDY = {"temperature": 0, "ignore_eos": True}


def post(client: TestClient, **body: Any) -> Any:
    return client.post("/generate", json=body)


def test_text_and_ids_agree(client: TestClient, tokenizer: Tokenizer) -> None:
    text = "abc abc abc"
    by_text = post(client, text=text, sampling_params=GREEDY | {"max_new_tokens": 12}).json()
    by_ids = post(
        client, input_ids=tokenizer.encode(text), sampling_params=GREEDY | {"max_new_tokens": 12}
    ).json()
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["text"] == tokenizer.decode(by_text["output_ids"])
    assert len(by_text["output_ids"]) == 12


def test_meta_info_counts_fit_together(client: TestClient, tokenizer: Tokenizer) -> None:
    answer = post(
        client, text="abab" * 10, sampling_params=GREEDY | {"max_new_tokens": 40}, rid="mine"
    ).json()
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 40}
    assert meta["prompt_tokens"] == len(tokenizer.encode("abab" * 10))
    assert meta["completion_tokens"] == 40
    assert meta["e2e_latency"] > 0
    # The first token is the prefill's; each round adds one token beside its correct drafts.
    assert meta["spec_verify_ct"] + meta["spec_accept_token_num"] == 39
    assert 0 <= meta["spec_accept_token_num"] <= meta["spec_draft_token_num"]
    assert sum(meta["spec_accept_histogram"]) == meta["spec_verify_ct"]
    assert meta["spec_accept_length"] == pytest.approx(39 / meta["spec_verify_ct"])


def test_defaults(client: TestClient) -> None:
    answer = post(client, text="abc", sampling_params={"ignore_eos": True, "sampling_seed": 3, "top_k": -1})
    assert answer.json()["meta_info"]["completion_tokens"] == 128


def test_seed_repeats(client: TestClient) -> None:
    def ids(seed: int) -> list[int]:
        sampling = {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": seed}
        return list(post(client, text="abc", sampling_params=sampling).json()["output_ids"])

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)
    openai_names = {"max_tokens": 16, "min_tokens": 2, "ignore_eos": True, "seed": 2}
    assert post(client, text="abc", sampling_params=openai_names).json()["output_ids"] == ids(2)


def test_a_list_gives_a_list_in_order(client: TestClient) -> None:
    texts = ["one", "two", "three", "four", "five", "six"]
    sampling = GREEDY | {"max_new_tokens": 5}
    batch = post(client, text=texts, sampling_params=sampling).json()
    alone = [post(client, text=text, sampling_params=sampling).json()["output_ids"] for text in texts]
    assert [answer["output_ids"] for answer in batch] == alone
    one = post(client, input_ids=[[1, 2, 3]], sampling_params=sampling).json()
    assert isinstance(one, list)
    assert len(one) == 1


def test_stream_is_cumulative_and_ends_with_done(client: TestClient) -> None:
    sampling = GREEDY | {"max_new_tokens": 30}
    whole = post(client, text="abc", sampling_params=sampling).json()
    lines = post(client, text="abc", sampling_params=sampling, stream=True).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    answers = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    for before, after in zip(answers, answers[1:], strict=False):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert (answers[-1]["text"], answers[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert answers[-1]["meta_info"]["spec_verify_ct"] == whole["meta_info"]["spec_verify_ct"]


def test_stop_token_is_in_the_ids_but_not_in_the_text(client: TestClient, tokenizer: Tokenizer) -> None:
    ids = post(client, text="abc", sampling_params=GREEDY | {"max_new_tokens": 20}).json()["output_ids"]
    stop = ids[7]
    upto = ids.index(stop)
    answer = post(client, text="abc", sampling_params=GREEDY | {"stop_token_ids": [stop]}).json()
    assert answer["output_ids"] == ids[: upto + 1]
    assert answer["text"] == tokenizer.decode(ids[:upto])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"), ({"text": "a", "input_ids": [1]}, "text"), ({"text": ""}, "text"), ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text"), ({"text": 5}, "text"), ({"text": ["a", 5]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids"), ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"), ({"input_ids": [1.0]}, "input_ids"), ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [258]}, "input_ids"), ({"input_ids": [10**30]}, "input_ids"), ({"input_ids": "1"}, "input_ids"),
        ({"input_ids": [1] * 512}, "input_ids"), ({"text": "x" * 512}, "text"), ({"text": ["a"] * 13}, "text"),
        ({"text": "a", "return_logprob": True}, "return_logprob"),
        ({"text": "a", "sampling_params": {"stop": ""}}, "sampling_params.stop.0"),
        ({"text": "a", "sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"min_new_tokens": -2}}, "sampling_params.min_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"sampling_seed": True}}, "sampling_params.sampling_seed"),
        ({"text": "a", "sampling_params": []}, "sampling_params"), ({"text": "a", "rid": 5}, "rid"),
        ({"text": "a", "rid": ""}, "rid"), ({"text": "a", "rid": "a b"}, "rid"),
    ],
)  # fmt: skip
def test_bad_requests_are_400_and_name_the_field(client: TestClient, body: Any, param: str) -> None:
    answer = post(client, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert param.split(".")[-1] in answer.json()["error"]["message"]


def test_the_longest_prompt_that_fits_gets_one_token(client: TestClient) -> None:
    answer = post(client, input_ids=[97] * 511, sampling_params=GREEDY).json()
    assert answer["meta_info"]["completion_tokens"] == 1
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
