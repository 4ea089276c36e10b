"""A request's own say in speculation: caps that change no token, and statistics in vLLM's shape."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from worker.api.served import ServedModel
from worker.api.speculation import acceptance_metrics
from worker.config import WorkerConfig
from worker.request import RequestSpecStats
from worker.server import create_app

GREEDY = {"temperature": 0, "ignore_eos": True}
REPEATING = "ababab" * 10


def completion(client: TestClient, **body: Any) -> Any:
    body = {"prompt": REPEATING, "max_tokens": 40, **GREEDY} | body
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_caps_change_no_token(client: TestClient) -> None:
    free = completion(client)["choices"]
    for cap in (
        {"num_steps": 0},
        {"num_steps": 1},
        {"num_steps": 64},
        {"speculation": False},
        {"speculation": True},
    ):
        assert completion(client, **cap)["choices"] == free, cap


@pytest.mark.parametrize(
    "caps", [{"num_steps": 0}, {"speculation": False}, {"speculation": False, "num_steps": 3}]
)
@pytest.mark.parametrize("inside", [True, False])
def test_without_speculation_nothing_is_drafted(client: TestClient, caps: Any, inside: bool) -> None:
    metrics = completion(client, per_request_spec_decode_metrics="summary", **caps)["metrics"]
    assert metrics["speculative_decoding"] == {
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": 0.0,
        "acceptance_histogram": [0],
        "acceptance_histogram_by_draft_length": {},
        "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0,
        "num_draft_tokens": 0,
        "num_spec_tokens": None,
    }
    sampling: dict[str, Any] = GREEDY | {"max_new_tokens": 40} | (caps if inside else {})
    native = {"text": REPEATING, "sampling_params": sampling} | ({} if inside else caps)
    meta = client.post("/generate", json=native).json()["meta_info"]
    assert (meta["spec_draft_token_num"], meta["spec_verify_ct"]) == (0, 39)


def check_consistent(metrics: Any, completion_tokens: int) -> None:
    histogram = metrics["acceptance_histogram"]
    assert sum(histogram) == metrics["num_spec_steps"] > 0
    accepted = sum(count * steps for count, steps in enumerate(histogram))
    assert accepted == metrics["num_accepted_draft_tokens"] <= metrics["num_draft_tokens"]
    assert metrics["mean_acceptance_length"] == pytest.approx(1 + accepted / metrics["num_spec_steps"])
    assert metrics["draft_acceptance_rate"] == pytest.approx(accepted / metrics["num_draft_tokens"])
    by_length = metrics["acceptance_histogram_by_draft_length"]
    assert all(len(row) == int(length) + 1 for length, row in by_length.items())
    assert sum(sum(row) for row in by_length.values()) == metrics["num_spec_steps"]
    assert sum(int(length) * sum(row) for length, row in by_length.items()) == metrics["num_draft_tokens"]
    assert metrics["num_spec_steps"] + accepted <= completion_tokens


def test_statistics_in_the_body(client: TestClient) -> None:
    answer = completion(client, per_request_spec_decode_metrics="detailed")
    metrics = answer["metrics"]["speculative_decoding"]
    check_consistent(metrics, answer["usage"]["completion_tokens"])
    assert len(metrics["per_step_accepted"]) == len(metrics["per_step_drafted"]) == metrics["num_spec_steps"]
    assert sum(metrics["per_step_accepted"]) == metrics["num_accepted_draft_tokens"]
    assert sum(metrics["per_step_drafted"]) == metrics["num_draft_tokens"]
    assert min(metrics["per_step_drafted"]) > 0
    summary = completion(client, per_request_spec_decode_metrics="summary")["metrics"]["speculative_decoding"]
    assert summary == {name: value for name, value in metrics.items() if not name.startswith("per_step")}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("usage", [True, False])
def test_statistics_ride_the_last_chunk_of_a_stream(client: TestClient, path: str, usage: bool) -> None:
    body = {
        "prompt": REPEATING, "messages": [{"role": "user", "content": REPEATING}], "max_tokens": 40, **GREEDY,
        "stream": True, "stream_options": {"include_usage": usage}, "per_request_spec_decode_metrics": "summary",
    }  # fmt: skip
    lines = client.post(path, json=body).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-2]]
    assert chunks[-1]["choices"] == []
    check_consistent(chunks[-1]["metrics"]["speculative_decoding"], 40)
    assert (chunks[-1]["usage"] is not None) == usage
    assert not any("metrics" in chunk for chunk in chunks[:-1])


def test_they_add_up_to_the_counters(client: TestClient, registry: CollectorRegistry) -> None:
    names = {
        "num_spec_steps": "spec_decode_num_drafts_total",
        "num_draft_tokens": "spec_decode_num_draft_tokens_total",
        "num_accepted_draft_tokens": "spec_decode_num_accepted_tokens_total",
    }

    def counters() -> list[float]:
        return [registry.get_sample_value(name) or 0 for name in names.values()]

    before = counters()
    metrics = completion(client, per_request_spec_decode_metrics="summary")["metrics"]["speculative_decoding"]
    grown = [after - earlier for after, earlier in zip(counters(), before, strict=True)]
    assert grown == [metrics[name] for name in names]


def test_the_setting_is_the_default_and_the_field_wins(model: ServedModel, config: WorkerConfig) -> None:
    server = config.server.model_copy(update={"per_request_spec_decode_metrics": "summary"})
    app = create_app(model, config.model_copy(update={"server": server}), registry=CollectorRegistry())
    with TestClient(app) as client:
        assert "speculative_decoding" in completion(client)["metrics"]
        assert "metrics" not in completion(client, per_request_spec_decode_metrics="none")


def test_nobody_asked(client: TestClient) -> None:
    assert "metrics" not in completion(client)


def test_several_prompts_have_no_statistics_in_common(client: TestClient) -> None:
    answer = completion(client, prompt=["a", "b"], per_request_spec_decode_metrics="summary")
    assert answer["metrics"] is None


def test_rounds_without_a_draft_are_no_steps() -> None:
    spec = RequestSpecStats()
    for proposed, correct in ((0, 0), (3, 3), (1, 0), (0, 0), (3, 1)):
        spec.record(num_proposed=proposed, num_correct=correct)
    metrics = acceptance_metrics(spec, "detailed")
    assert metrics["acceptance_histogram"] == [1, 1, 0, 1]
    assert metrics["acceptance_histogram_by_draft_length"] == {"1": [1, 0], "3": [0, 1, 0, 1]}
    assert (metrics["num_spec_steps"], metrics["num_draft_tokens"]) == (3, 7)
    assert metrics["per_step_accepted"] == [3, 0, 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_steps", -1), ("num_steps", 65), ("num_steps", True), ("num_steps", 1.0), ("num_steps", "1"),
        ("speculation", 0), ("speculation", "no"), ("timeout_seconds", 0.9), ("timeout_seconds", -1),
        ("timeout_seconds", 86401), ("timeout_seconds", "5"), ("timeout_seconds", True),
    ],
)  # fmt: skip
def test_bad_values_are_400_and_name_the_field(client: TestClient, field: str, value: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (
        ("/v1/chat/completions", chat | {field: value}),
        ("/v1/completions", {"prompt": "x", field: value}),
        ("/generate", {"text": "x", field: value}),
        ("/generate", {"text": "x", "sampling_params": {field: value}}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert field in answer.json()["error"]["param"]


def test_an_unknown_level_names_the_known_ones(client: TestClient) -> None:
    body = {"prompt": "x", "per_request_spec_decode_metrics": "all"}
    error = client.post("/v1/completions", json=body).json()["error"]
    assert error["param"] == "per_request_spec_decode_metrics"
    assert "detailed" in error["message"]
