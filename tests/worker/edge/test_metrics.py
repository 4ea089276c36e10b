"""Metrics at the scrape: equal to the engine's own counters, consistent, bounded."""

from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from worker.api.served import ServedModel
from worker.engine_thread import EngineThread
from worker.metrics import SpecCollector
from worker.protocol import SpecStats, StatsBucket

BODY = {"text": "abab" * 12, "sampling_params": {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}}

EXPECTED = {
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos", "spec_decode_reached_per_pos", "spec_rounds", "spec_timed_rounds",
    "spec_request_rounds", "spec_accept_tokens", "spec_verify_rows", "spec_emitted_tokens", "spec_round_seconds",
    "spec_generated_tokens", "spec_first_tokens", "spec_prompt_tokens", "spec_draft_failures", "spec_requests_finished",
    "spec_requests_running", "spec_requests_waiting", "spec_kv_tokens_free", "spec_kv_tokens_total", "spec_num_steps",
    "spec_uptime_seconds", "spec_plan_source", "spec_time_to_first_token_seconds", "spec_request_duration_seconds",
}  # fmt: skip


def bucket(num_steps: int, max_batch_size: int, **values: Any) -> StatsBucket:
    zeros = {
        name: 0
        for name, field in StatsBucket.model_fields.items()
        if name.split("_")[0] not in ("max", "num")
    }
    lists = {name: [0] * num_steps for name in ("proposed", "reached", "correct")}
    return StatsBucket.model_validate(
        zeros | lists | {"num_steps": num_steps, "max_batch_size": max_batch_size} | values
    )


def test_every_name_is_there_and_none_has_a_colon(client: TestClient) -> None:
    client.post("/generate", json=BODY)
    answer = client.get("/metrics", follow_redirects=False)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert client.get("/metrics/", follow_redirects=False).status_code == 200
    families = {family.name for family in text_string_to_metric_families(answer.text)}
    assert families - {"spec_plan_age_seconds"} >= EXPECTED
    assert not [name for name in families if ":" in name or not name.startswith("spec_")]


def test_numbers_equal_the_engines(
    client: TestClient, engine: EngineThread, registry: CollectorRegistry
) -> None:
    client.post("/generate", json=BODY)
    stats = engine.stats()
    get = registry.get_sample_value
    assert get("spec_generated_tokens_total") == stats.generated_tokens
    assert get("spec_emitted_tokens_total") == stats.generated_tokens - stats.first_tokens
    assert get("spec_decode_num_draft_tokens_total") == sum(sum(bucket.proposed) for bucket in stats.buckets)
    assert get("spec_decode_num_accepted_tokens_total") == sum(
        sum(bucket.correct) for bucket in stats.buckets
    )
    for item in stats.buckets:
        labels = {"num_steps": str(item.num_steps), "batch_size_le": str(item.max_batch_size)}
        assert get("spec_rounds_total", labels) == item.rounds
        assert get("spec_accept_tokens_total", labels) == item.accept_tokens
    assert get("spec_requests_finished_total", {"reason": "length"}) == stats.requests_finished["length"]
    assert get("spec_requests_finished_total", {"reason": "error"}) == 0
    assert get("spec_requests_running") == 0
    assert get("spec_plan_source", {"source": stats.plan.source}) == 1


def test_latencies_are_observed_once_per_request(client: TestClient, registry: CollectorRegistry) -> None:
    client.post("/generate", json=BODY)
    client.post("/generate", json=BODY | {"stream": True})
    client.post("/generate", json={"text": ""})
    assert registry.get_sample_value("spec_time_to_first_token_seconds_count") == 2
    assert registry.get_sample_value("spec_request_duration_seconds_count") == 2
    first = registry.get_sample_value("spec_time_to_first_token_seconds_sum")
    whole = registry.get_sample_value("spec_request_duration_seconds_sum")
    assert first is not None and whole is not None and 0 < first <= whole


@pytest.fixture
def scraped(scripted: Any) -> Any:
    def scrape(*buckets: StatsBucket) -> CollectorRegistry:
        scripted.frozen_stats = SpecStats.model_validate(
            scripted.frozen_stats.model_dump() | {"buckets": [item.model_dump() for item in buckets]}
        )
        registry = CollectorRegistry()
        registry.register(SpecCollector(ServedModel(scripted, None)))
        return registry

    return scrape


def test_positions_and_depths_are_summed_with_their_own_denominators(scraped: Any) -> None:
    registry = scraped(
        bucket(0, 1, rounds=5, request_rounds=5, accept_tokens=5, round_seconds=0.5),
        bucket(1, 1, rounds=4, proposed=[4], reached=[4], correct=[3], draft_seconds=0.25),
        bucket(1, 2, rounds=2, proposed=[3], reached=[3], correct=[1], draft_seconds=0.5),
        bucket(3, 1, rounds=3, prefill_rounds=1, proposed=[3, 2, 1], reached=[3, 2, 1], correct=[2, 1, 0]),
    )
    get = registry.get_sample_value
    assert get("spec_decode_num_drafts_total") == 10
    assert get("spec_decode_num_draft_tokens_total") == 13
    assert get("spec_decode_num_accepted_tokens_total") == 7
    per_position = [
        (get("spec_decode_num_accepted_tokens_per_pos_total", {"position": str(i)}),
         get("spec_decode_reached_per_pos_total", {"position": str(i)}))
        for i in range(4)
    ]  # fmt: skip
    assert per_position == [(6, 10), (1, 2), (0, 1), (None, None)]
    assert get("spec_round_seconds_total", {"stage": "draft", "num_steps": "1"}) == 0.75
    assert get("spec_round_seconds_total", {"stage": "round", "num_steps": "0"}) == 0.5
    assert get("spec_timed_rounds_total", {"num_steps": "3", "batch_size_le": "1"}) == 2
    assert get("spec_rounds_total", {"num_steps": "1", "batch_size_le": "2"}) == 2


def test_nothing_is_kept_between_scrapes(scraped: Any) -> None:
    registry = scraped(bucket(1, 1, rounds=4))
    assert registry.get_sample_value("spec_rounds_total", {"num_steps": "1", "batch_size_le": "1"}) == 4
    registry = scraped()
    assert registry.get_sample_value("spec_rounds_total", {"num_steps": "1", "batch_size_le": "1"}) is None


def test_while_loading_there_is_nothing_to_tell() -> None:
    registry = CollectorRegistry()
    registry.register(SpecCollector(ServedModel()))
    assert list(registry.collect()) == []
