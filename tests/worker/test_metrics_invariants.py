"""At every scrape: accepted ≤ reached per position, nothing NaN or negative, nothing counted after the end."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from worker.api.served import ServedModel
from worker.metrics import SpecCollector
from worker.protocol import PlanEntry, PlanStatus, Probe, QueueStats, SpecInfo, SpecPlan, SpecStats
from worker.spec.plan import CHANGE_REASONS, DepthCounts
from worker.spec.stats import RoundTimes, RowOutcome, StatsRecorder
from worker.telemetry import Telemetry

TIERS = [0, 1, 2, 3, 5]
POSITIONS = [str(position) for position in range(max(TIERS))]


class Recorded:
    """What the collector needs of an engine, around a real recorder."""

    def __init__(self) -> None:
        self.recorder = StatsRecorder()
        self.info = SpecInfo(
            boot_id="b", version="1", model="m", drafter="model", topk=1, device="cpu", dtype="float64",
            candidate_steps=TIERS, fallback_num_steps=1, fast_path="on", max_running_requests=6,
            max_context_tokens=64, max_num_batched_tokens=64, adaptation=True,
        )  # fmt: skip

    def telemetry(self) -> Telemetry:
        status = PlanStatus(
            source="fallback", plan=None, age_seconds=None, remaining_seconds=0.0, pin_remaining_seconds=0.0,
            fallback_num_steps=1, num_steps=1,
        )  # fmt: skip
        queue = QueueStats(running=0, waiting=0, kv_tokens_free=1, kv_tokens_total=1)
        stats = SpecStats(
            boot_id="b", uptime_seconds=1.0, plan=status, queue=queue, **self.recorder.snapshot()._asdict()
        )
        counts = DepthCounts(dict.fromkeys(CHANGE_REASONS, 0), probes=0, probe_rounds=0)
        return Telemetry(
            stats=stats, durations=self.recorder.durations(), depth=counts, slow_path_rounds=0, eager_rounds=0
        )


def registry_of(engine: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(SpecCollector(ServedModel(engine, None)))  # type: ignore[arg-type]
    return registry


def samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """All samples of one scrape, by name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


def check(now: dict[tuple[str, ...], float], before: dict[tuple[str, ...], float]) -> None:
    assert all(math.isfinite(value) and value >= 0 for value in now.values())
    assert set(before) <= set(now), "a series has gone"
    counters = [key for key in before if key[0].endswith(("_total", "_count", "_sum", "_bucket"))]
    assert all(now[key] >= before[key] for key in counters), "a counter went backwards"
    rounds = sum(value for key, value in now.items() if key[0] == "spec_request_rounds_total")
    outer = rounds
    for position in POSITIONS:
        accepted = now["spec_decode_num_accepted_tokens_per_pos_total", position]
        proposed = now["spec_decode_num_draft_tokens_per_pos_total", position]
        reached = now["spec_decode_reached_per_pos_total", position]
        assert accepted <= min(reached, proposed) and max(reached, proposed) <= outer
        outer = rounds if position == "0" else outer
    accepted = now["spec_decode_num_accepted_tokens_total",]
    proposed = now["spec_decode_num_draft_tokens_total",]
    assert accepted <= proposed
    wasted = sum(value for key, value in now.items() if key[0] == "spec_wasted_drafts_total")
    assert wasted == proposed - accepted
    emitted = now["spec_emitted_tokens_total",]
    # A round yields its correct drafts and one more; only the end of a request takes that one away, and no other.
    finished = sum(value for key, value in now.items() if key[0] == "spec_requests_finished_total")
    assert 0 <= accepted + rounds - emitted <= finished
    assert now["spec_generated_tokens_total",] == emitted + now["spec_first_tokens_total",]
    for key, value in now.items():
        if key[0] == "spec_round_seconds_bucket" and key[-1] == "+Inf":
            assert value == now["spec_round_seconds_count", *key[1:-1]]


@st.composite
def rows(draw: Any, num_steps: int) -> RowOutcome:
    """One request's round as the engine would report it: drafts, what was right, and where the request ended."""
    budget = draw(st.integers(0, num_steps))
    proposed = draw(st.integers(0, budget))
    matching = draw(st.integers(0, proposed))
    emitted = draw(st.integers(1, matching + 1))  # an EOS, a stop or a limit cuts anywhere
    return RowOutcome(
        num_proposed_drafts=proposed, num_correct_drafts=min(matching, emitted), num_accept_tokens=matching + 1,
        num_emitted_tokens=emitted, row_budget=budget, context_tokens=10,
    )  # fmt: skip


rounds = st.sampled_from(TIERS).flatmap(
    lambda k: st.tuples(st.just(k), st.lists(rows(k), min_size=1, max_size=6), st.booleans())
)


@settings(deadline=None, max_examples=60)
@given(st.lists(rounds, max_size=12))
def test_every_scrape_adds_up(history: list[tuple[int, list[RowOutcome], bool]]) -> None:
    engine = Recorded()
    registry = registry_of(engine)
    before = samples(registry)
    check(before, before)
    for num_steps, outcomes, with_prefill in history:
        engine.recorder.record_first_token(3)
        engine.recorder.record_round(
            num_steps=num_steps,
            rows=outcomes,
            verify_rows=sum(1 + row.num_proposed_drafts for row in outcomes),
            times=RoundTimes(0.001 * num_steps, 0.02, 0.03, 0.0),
            is_timed=not with_prefill,
        )
        for row in outcomes:
            if row.num_emitted_tokens < row.num_accept_tokens:
                engine.recorder.record_finish("stop")
        now = samples(registry)
        check(now, before)
        before = now


def test_a_real_engine_adds_up_after_every_step(make_rig: Callable[..., Any]) -> None:
    """Mixed requests on a perfect drafter; some meet their EOS within the accepted prefix."""
    rig = make_rig(spec={"num_steps": 3, "candidate_steps": [0, 1, 3, 5]})
    plain = rig.generate([1, 2, 3], max_tokens=40).tokens
    registry = registry_of(rig.thread)
    before = samples(registry)
    wanted = []
    for place in (7, 10, 13, 18):
        end = next(token for token in plain[place:] if plain.index(token) >= place)
        wanted.append(plain[: plain.index(end) + 1])
        rig.submit([1, 2, 3], eos=[end], max_tokens=40)
    seen = [rig.submit([5, 6], max_tokens=17)]
    while rig.thread._scheduler.has_work():
        rig.step()
        now = samples(registry)
        check(now, before)
        before = now
    assert before["spec_generated_tokens_total",] == 40 + sum(map(len, wanted)) + len(seen[0].tokens)
    reached, accepted = (
        sum(value for key, value in before.items() if key[0] == name)
        for name in ("spec_decode_reached_per_pos_total", "spec_decode_num_accepted_tokens_per_pos_total")
    )
    assert reached == accepted, "a draft of a perfect drafter was counted as wrong"


def test_changes_probes_and_durations_come_from_the_engine(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(spec={"num_steps": 1, "candidate_steps": [0, 1, 3]})
    get = registry_of(rig.thread).get_sample_value
    rig.generate([1, 2, 3])
    plan = SpecPlan(
        controller_epoch=1, version=1, boot_id=rig.thread.info.boot_id, ttl_seconds=60.0,
        entries=[PlanEntry(max_batch_size=64, num_steps=0)], probe=Probe(num_steps=3, rounds=2),
    )  # fmt: skip
    rig.thread.put_plan(plan)
    rig.generate([1, 2, 3])
    reasons = [get("spec_depth_changes_total", {"reason": reason}) for reason in CHANGE_REASONS]
    assert dict(zip(CHANGE_REASONS, reasons, strict=True)) == {
        "plan": 1, "pin": 0, "fallback": 0, "probe": 1,  # 1 -> 3 for the probe -> 0 by the plan
    }  # fmt: skip
    assert (get("spec_probes_total"), get("spec_probe_rounds_total")) == (1, 2)
    for stage in ("draft", "verify", "round", "catch_up"):
        found = [item for item in rig.thread.stats().buckets if item.num_steps == 0]
        labels = {"stage": stage, "num_steps": "0"}
        assert get("spec_round_seconds_count", labels) == sum(item.timed_rounds for item in found) > 0
        seconds = sum(getattr(item, f"{stage}_seconds") for item in found)
        assert get("spec_round_seconds_sum", labels) == pytest.approx(seconds)


@pytest.mark.parametrize(("fast_path", "is_slow"), [("auto", False), ("off", True)])
def test_rounds_off_the_fast_path_are_counted(
    make_rig: Callable[..., Any], fast_path: str, is_slow: bool
) -> None:
    rig = make_rig(spec={"num_steps": 3, "candidate_steps": [0, 3], "fast_path": fast_path})
    rig.generate([1, 2, 3])
    get = registry_of(rig.thread).get_sample_value
    drafted = sum(item.rounds for item in rig.thread.stats().buckets if item.num_steps == 3)
    assert drafted > 2
    assert get("spec_slow_path_rounds_total") == (drafted if is_slow else 0)
