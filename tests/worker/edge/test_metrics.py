"""Metrics at the scrape: equal to the engine's own counters, consistent, bounded."""

from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from worker.api.served import ServedModel
from worker.engine_thread import EngineThread
from worker.metrics import ServerMetrics, SpecCollector, TokenTimes
from worker.protocol import Pin, PlanEntry, PlanStatus, SpecPlan, SpecStats, StatsBucket

BODY = {"text": "abab" * 12, "sampling_params": {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}}


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


def test_the_page_is_served_under_both_paths(client: TestClient) -> None:
    client.post("/generate", json=BODY)
    answer = client.get("/metrics", follow_redirects=False)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert client.get("/metrics/", follow_redirects=False).status_code == 200
    families = {family.name for family in text_string_to_metric_families(answer.text)}
    assert not [name for name in families if ":" in name or not name.startswith("spec_")]


def test_every_series_is_there_before_anything_happened(scraped: Any) -> None:
    """No first event is lost to a rate, and an idle worker shows zeros instead of gaps."""
    fresh = {(s.name, *sorted(s.labels.items())) for m in scraped().collect() for s in m.samples}
    busy = scraped(*(bucket(tier, size, rounds=1) for tier in (0, 1, 3) for size in (1, 2, 4)))
    assert {(s.name, *sorted(s.labels.items())) for m in busy.collect() for s in m.samples} == fresh
    assert all(s.value == 0 for m in scraped().collect() if m.type == "counter" for s in m.samples
               if s.name.startswith(("spec_decode", "spec_rounds", "spec_wasted")))  # fmt: skip


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


def test_an_interval_per_token_after_the_first(client: TestClient, registry: CollectorRegistry) -> None:
    """One per token, not per round, and their sum is the time between first and last token."""
    client.post("/generate", json=BODY)
    client.post("/generate", json=BODY)
    assert registry.get_sample_value("spec_inter_token_seconds_count") == 2 * 60 - 2
    between = registry.get_sample_value("spec_inter_token_seconds_sum")
    first = registry.get_sample_value("spec_time_to_first_token_seconds_sum")
    whole = registry.get_sample_value("spec_request_duration_seconds_sum")
    assert between is not None and first is not None and whole is not None
    assert 0 < between <= whole - first


def test_tokens_of_one_round_share_its_time() -> None:
    registry = CollectorRegistry()
    times = TokenTimes(ServerMetrics(registry), started_seconds=10.0)
    for count, now in ((0, 10.5), (1, 11.0), (3, 11.3), (0, 12.0), (1, 11.4)):
        times.arrived(count, now)
    get = registry.get_sample_value
    assert get("spec_time_to_first_token_seconds_sum") == 1.0
    assert get("spec_inter_token_seconds_count") == 4
    assert get("spec_inter_token_seconds_sum") == pytest.approx(0.4)
    assert get("spec_inter_token_seconds_bucket", {"le": "0.08"}) == 0
    assert get("spec_inter_token_seconds_bucket", {"le": "0.15"}) == 4


@pytest.fixture
def scraped(scripted: Any) -> Any:
    def scrape(*buckets: StatsBucket, **values: Any) -> CollectorRegistry:
        scripted.frozen_stats = SpecStats.model_validate(
            scripted.frozen_stats.model_dump() | {"buckets": [item.model_dump() for item in buckets]} | values
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
    assert get("spec_timed_rounds_total", {"num_steps": "3", "batch_size_le": "1"}) == 2
    assert get("spec_timed_round_seconds_total", {"num_steps": "0", "batch_size_le": "1"}) == 0.5
    assert get("spec_rounds_total", {"num_steps": "1", "batch_size_le": "2"}) == 2
    assert get("spec_rounds_total", {"num_steps": "1", "batch_size_le": "4"}) == 0
    assert [get("spec_wasted_drafts_total", {"num_steps": k}) for k in "013"] == [0, 3, 3]
    assert get("spec_eager_rounds_total") == 14


def test_nothing_is_kept_between_scrapes(scraped: Any) -> None:
    labels = {"num_steps": "1", "batch_size_le": "1"}
    assert scraped(bucket(1, 1, rounds=4)).get_sample_value("spec_rounds_total", labels) == 4
    assert scraped().get_sample_value("spec_rounds_total", labels) == 0


@pytest.mark.parametrize(
    ("left", "pin_left", "in_force"),
    [(5.0, 0.0, [3, 1, 1]), (5.0, 9.0, [0, 0, 0]), (0.0, 9.0, [0, 0, 0]), (0.0, 0.0, [1, 1, 1])],
)
def test_the_depth_in_force_follows_pin_plan_and_fallback(
    scraped: Any, left: float, pin_left: float, in_force: list[int]
) -> None:
    plan = SpecPlan(
        controller_epoch=1, version=1, boot_id="b", ttl_seconds=10.0,
        entries=[PlanEntry(max_batch_size=1, num_steps=3), PlanEntry(max_batch_size=2, num_steps=1)],
        pin=Pin(num_steps=0, ttl_seconds=20.0),
    )  # fmt: skip
    status = PlanStatus(
        source="plan", plan=plan, age_seconds=1.0, remaining_seconds=left, pin_remaining_seconds=pin_left,
        fallback_num_steps=1, num_steps=3,
    )  # fmt: skip
    get = scraped(plan=status.model_dump()).get_sample_value
    found = [get("spec_num_steps_in_force", {"batch_size_le": size}) for size in ("1", "2", "4")]
    assert found == in_force
    assert get("spec_plan_age_seconds") == 1.0
    assert get("spec_plan_remaining_seconds") == left


def test_while_loading_there_is_nothing_to_tell() -> None:
    registry = CollectorRegistry()
    registry.register(SpecCollector(ServedModel()))
    assert list(registry.collect()) == []
