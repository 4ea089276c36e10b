"""`goodput`, rule by rule, on estimates made by hand."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from controller.estimate.gain import Gains
from controller.policies.goodput import KIND, GoodputPolicy
from controller.policies.goodput_parameters import GoodputParameters
from controller.types import (
    AcceptanceEstimate,
    Estimate,
    Hazard,
    ProbeEvidence,
    Proposal,
    Slot,
    SlotEstimate,
    SlotForecast,
    TierForecast,
)

TIERS = (0, 1, 3, 7)
SLOTS = (Slot(max_batch_size=1, candidate_steps=TIERS), Slot(max_batch_size=4, candidate_steps=TIERS))
SURE = 1e-6


def acceptance(p: float, variance: float = SURE, *, known: int = 7, **changes: Any) -> AcceptanceEstimate:
    hazards = tuple(Hazard(probability=p, variance=variance if i < known else 0.04) for i in range(7))
    return AcceptanceEstimate(
        hazards=hazards, proposed=(1.0,) * 7, rounds=100.0, request_rounds=100.0, end_rate=0.0, surprise=0.0,
        has_changed=False, **changes,
    )  # fmt: skip


def forecast(
    found: AcceptanceEstimate, *, per_step: float = 0.001, batch_size: float = 1.0, share: float = 1.0,
    spread: float = 0.05, cost_variance: float = SURE,
) -> SlotForecast:  # fmt: skip
    tiers = []
    for steps in TIERS:
        seconds = 0.010 + per_step * steps
        tokens = found.expected_tokens()[steps]
        tiers.append(
            TierForecast(
                num_steps=steps, tokens=tokens, round_seconds=seconds, round_variance=cost_variance,
                spread=spread, goodput=batch_size * tokens / seconds,
            )
        )  # fmt: skip
    return SlotForecast(batch_size=batch_size, tiers=tuple(tiers), share=share)


def estimate(
    found: AcceptanceEstimate,
    depths: Mapping[int, int],
    *,
    seconds: float = 100.0,
    shares: Sequence[float] = (1.0, 0.0),
    probe: tuple[int, ProbeEvidence] | None = None,
    **costs: Any,
) -> Estimate:
    slots = tuple(
        SlotEstimate(
            slot=slot, num_steps=depths[slot.max_batch_size], rounds=50, request_rounds=50, mean_correct=None,
            sd=None, position_acceptance=(), scores=(), busiest_bucket=slot.max_batch_size,
            probe=probe[1] if probe and probe[0] == slot.max_batch_size else None,
        )
        for slot in SLOTS
    )  # fmt: skip
    forecasts = {
        slot.max_batch_size: forecast(found, batch_size=slot.max_batch_size, share=share, **costs)
        for slot, share in zip(SLOTS, shares, strict=True)
    }
    return Estimate(
        slots=slots, seconds=seconds, span_seconds=0.25, is_busy=True, acceptance=found, forecasts=forecasts
    )


def policy(**parameters: Any) -> GoodputPolicy:
    built = KIND.build(GoodputParameters(**{"sight": 0.0, **parameters}), SLOTS, "w")
    assert isinstance(built, GoodputPolicy)
    return built


def by_slot(proposals: Sequence[Proposal]) -> dict[int, Proposal]:
    return {proposal.slot: proposal for proposal in proposals}


@pytest.mark.parametrize(
    ("p", "per_step", "best"),
    [(0.95, 0.001, 7), (0.6, 0.001, 3), (0.3, 0.002, 1), (0.1, 0.002, 0), (0.95, 0.012, 0)],
)
def test_the_depth_that_brings_most_is_chosen(p: float, per_step: float, best: int) -> None:
    found = acceptance(p)
    scores = {t.num_steps: t.goodput for t in forecast(found, per_step=per_step).tiers}
    assert max(scores, key=lambda k: scores[k]) == best
    start = 3 if best != 3 else 0
    proposals = by_slot(policy().decide(estimate(found, {1: start, 4: start}, per_step=per_step)))
    assert proposals[1].num_steps == best
    assert {score.num_steps for score in proposals[1].scores} == set(TIERS)


def test_at_the_best_depth_nothing_is_proposed() -> None:
    assert policy().decide(estimate(acceptance(0.95), {1: 7, 4: 7})) == []


def test_a_gain_below_delta_moves_nothing() -> None:
    found = acceptance(0.6)
    tiers = {t.num_steps: t.goodput for t in forecast(found).tiers}
    least = math.log(max(tiers.values()) / tiers[1])
    stays = policy(delta=least + 0.01, probe_share=1e-6).decide(estimate(found, {1: 1, 4: 1}))
    moves = policy(delta=least - 0.01, probe_share=1e-6).decide(estimate(found, {1: 1, 4: 1}))
    assert 1 not in by_slot(stays) and by_slot(moves)[1].num_steps == 3


def test_a_doubtful_gain_moves_nothing_and_is_probed() -> None:
    doubtful, rule = acceptance(0.8, known=1), policy(z=3.0)
    now, proposals = 100.0, []
    while not proposals:
        now += 0.25
        proposals = rule.decide(estimate(doubtful, {1: 1, 4: 1}, seconds=now))
    (proposal,) = proposals
    assert proposal.reason == "probe" and proposal.num_steps == 1 and proposal.probe is not None
    assert proposal.probe.num_steps > 1 and proposal.probe.rounds == 8


def test_a_slow_drop_to_plain_decoding_does_not_wait() -> None:
    urgent = policy().decide(estimate(acceptance(0.05), {1: 7, 4: 7}))[0]
    assert urgent.num_steps == 0 and urgent.is_urgent
    up = policy().decide(estimate(acceptance(0.95), {1: 0, 4: 0}))[0]
    assert up.num_steps == 7 and not up.is_urgent


def test_slots_without_traffic_follow_one_that_moves() -> None:
    moved = by_slot(policy().decide(estimate(acceptance(0.95), {1: 3, 4: 3})))
    assert set(moved) == {1, 4}
    alone = by_slot(policy().decide(estimate(acceptance(0.95), {1: 7, 4: 0})))
    assert alone == {}


# ---- probes ----


def run_probes(rule: GoodputPolicy, found: AcceptanceEstimate, seconds: float, **costs: Any) -> list[float]:
    """Let a slot stay at 0 and every probe find nothing; return when probes were asked for."""
    asked = []
    evidence: tuple[int, ProbeEvidence] | None = None
    for step in range(int(seconds * 4)):
        now = 100.0 + step / 4
        e = estimate(found, {1: 0, 4: 0}, seconds=now, probe=evidence, **costs)
        evidence = None
        for proposal in rule.decide(e):
            if proposal.probe is not None:
                asked.append(now)
                evidence = 1, ProbeEvidence(
                    request=proposal.probe, rounds=proposal.probe.rounds, request_rounds=8, waited_rounds=0,
                    mean_correct=0.0,
                )  # fmt: skip
            assert not proposal.is_change
    return asked


def test_depth_0_is_never_left_alone() -> None:
    asked = run_probes(policy(), acceptance(0.05), 120.0)
    gaps = [b - a for a, b in zip(asked, asked[1:], strict=False)]
    assert len(asked) > 10 and max(gaps) < 15


def test_probes_keep_to_their_share_of_time() -> None:
    for per_step in (0.001, 0.02):
        rule = policy(probe_share=0.01)
        asked = run_probes(rule, acceptance(0.05), 300.0, per_step=per_step)
        rounds = 2  # a quarter of 8 request-rounds at batch size 1
        assert len(asked) * rounds * (0.010 + 3 * per_step) <= 0.01 * 300 + 0.1


def test_idle_time_saves_nothing_for_probes() -> None:
    """Saved up in a quiet night, a share of all time would be a large one of the first busy seconds."""
    asked = {}
    for is_busy in (True, False):
        rule = policy()
        for step in range(400):
            quiet = estimate(acceptance(0.95), {1: 7, 4: 7}, seconds=step / 4)
            assert rule.decide(dataclasses.replace(quiet, is_busy=is_busy)) == []
        asked[is_busy] = len(run_probes(rule, acceptance(0.05), 5.0, per_step=0.02))
    assert asked[False] <= 1 < 3 <= asked[True]


def test_at_depth_0_the_most_hopeful_depth_is_looked_at() -> None:
    """The profile may be wrong about one cell; only trying it tells."""
    found = acceptance(0.3)
    for doubtful, probed in ((None, 3), (1, 1), (7, 7)):
        rule, now, proposals = policy(), 100.0, []
        while not proposals:
            now += 0.25
            e = estimate(found, {1: 0, 4: 0}, seconds=now, per_step=0.004)
            forecasts = {
                edge: dataclasses.replace(
                    f, tiers=tuple(
                        dataclasses.replace(t, round_variance=0.9 if t.num_steps == doubtful else SURE)
                        for t in f.tiers
                    ),
                )
                for edge, f in e.forecasts.items()
            }  # fmt: skip
            proposals = rule.decide(dataclasses.replace(e, forecasts=forecasts))
        assert proposals[0].probe is not None and proposals[0].probe.num_steps == probed


def test_without_a_budget_there_are_hardly_any_probes() -> None:
    assert len(run_probes(policy(probe_share=1e-6), acceptance(0.05), 200.0)) < 5, "only what it starts with"


def test_a_surprising_probe_is_repeated_at_once() -> None:
    rule, found = policy(), acceptance(0.05)
    now, proposals = 100.0, []
    while not proposals:
        now += 0.25
        proposals = rule.decide(estimate(found, {1: 0, 4: 0}, seconds=now))
    request = proposals[0].probe
    assert request is not None
    evidence = ProbeEvidence(request=request, rounds=2, request_rounds=2, waited_rounds=0, mean_correct=1.0)
    better = dataclasses.replace(found, surprise=2.0)
    (again,) = rule.decide(estimate(better, {1: 0, 4: 0}, seconds=now + 0.25, probe=(1, evidence)))
    assert again.ends_probe and again.probe is not None and again.probe != request


def test_a_probe_whose_batch_size_is_gone_is_given_up() -> None:
    rule, found = policy(), acceptance(0.05)
    now, proposals = 100.0, []
    while not proposals:
        now += 0.25
        proposals = rule.decide(estimate(found, {1: 0, 4: 0}, seconds=now))
    request = proposals[0].probe
    assert request is not None
    waiting = ProbeEvidence(request=request, rounds=0, request_rounds=0, waited_rounds=9, mean_correct=0.0)
    later = estimate(found, {1: 0, 4: 0}, seconds=now + 1.0, probe=(1, waiting))
    assert rule.decide(later) == []
    (ended,) = rule.decide(dataclasses.replace(later, seconds=now + 2.5))
    assert ended.ends_probe and ended.probe is None and ended.reason == "probe_inconclusive"


# ---- sight ----


def test_a_text_that_keeps_changing_is_kept_in_sight() -> None:
    found = acceptance(0.05)  # 0 is 4.5 % better than 1
    rule = policy(sight=0.1, probe_share=1e-6)
    at_0 = by_slot(rule.decide(estimate(found, {1: 0, 4: 0}, seconds=100.0)))
    assert (at_0[1].num_steps, at_0[1].reason) == (1, "sight")
    assert rule.decide(estimate(found, {1: 1, 4: 1}, seconds=100.5)) == []
    quiet = by_slot(rule.decide(estimate(found, {1: 1, 4: 1}, seconds=140.0)))
    assert quiet[1].num_steps == 0
    assert not by_slot(rule.decide(estimate(found, {1: 0, 4: 0}, seconds=141.0)))
    changed = dataclasses.replace(found, has_changed=True)
    again = by_slot(rule.decide(estimate(changed, {1: 0, 4: 0}, seconds=142.0)))
    assert again[1].num_steps == 1


# ---- objectives and caps ----


def test_latency_slo_keeps_rounds_short() -> None:
    found = acceptance(0.95)
    # 7 drafts: 17 ms, 3: 13 ms; the 95th percentile is 8.6 % above the mean.
    rule = policy(objective="latency_slo", slo_seconds=0.0145)
    assert rule.decide(estimate(found, {1: 0, 4: 0}))[0].num_steps == 3
    tight = policy(objective="latency_slo", slo_seconds=0.001)
    assert tight.decide(estimate(found, {1: 7, 4: 7}))[0].num_steps == 0, "none fits: the fastest round"


def test_caps_by_batch_size() -> None:
    rule = policy(max_num_steps={4: 1})
    proposals = by_slot(rule.decide(estimate(acceptance(0.95), {1: 3, 4: 3}, shares=(0.5, 0.5))))
    assert (proposals[1].num_steps, proposals[4].num_steps) == (7, 1)


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"objective": "latency_slo"}, "slo_seconds"),
        ({"objective": "latency_slo", "slo_seconds": -1.0}, "slo_seconds"),
        ({"delta": -0.1}, "delta"),
        ({"z": math.nan}, "z"),
        ({"probe_share": 0.5}, "probe_share"),
        ({"probe_samples": 0}, "probe_samples"),
        ({"probe_pause_seconds": 9.0}, "probe_pause_max_seconds"),
        ({"max_num_steps": {0: 1}}, "max_num_steps"),
    ],
)
def test_bad_parameters_are_named(parameters: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        GoodputParameters(**parameters)


def test_nothing_known_nothing_proposed() -> None:
    assert policy().decide(Estimate(slots=())) == []


# ---- the gain ----


def test_what_both_depths_share_cancels_in_the_doubt() -> None:
    known_first = acceptance(0.7, 0.01, known=1)
    tiers = forecast(known_first)
    one, three, seven = tiers.tier(1), tiers.tier(3), tiers.tier(7)
    assert one is not None and three is not None and seven is not None
    assert Gains(known_first).of(one, three).mean == pytest.approx(-Gains(known_first).of(three, one).mean)
    assert Gains(known_first).of(seven, one).sd > Gains(known_first).of(three, one).sd
    assert Gains(known_first).of(three, three).sd == 0


def test_the_doubt_is_that_of_the_delta_method() -> None:
    """Against finite differences."""
    found = acceptance(0.6, 0.003)
    tiers = forecast(found)
    three, seven = tiers.tier(3), tiers.tier(7)
    assert three is not None and seven is not None
    variance = 0.0
    for position in range(7):
        moved = list(found.hazards)
        moved[position] = Hazard(probability=0.6 + 1e-6, variance=0.0)
        other = dataclasses.replace(found, hazards=tuple(moved))
        slope = (
            sum(
                sign * math.log(e.expected_tokens()[k])
                for e, k, sign in ((other, 7, 1), (found, 7, -1), (other, 3, -1), (found, 3, 1))
            )
            / 1e-6
        )
        variance += slope * slope * 0.003
    assert Gains(found).of(seven, three).sd == pytest.approx(math.sqrt(variance), rel=1e-3)
