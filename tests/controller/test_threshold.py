"""The threshold rule, as tables of exact thresholds."""

from typing import Any

import pytest

from controller.policies import policy_kinds
from controller.policies.threshold import ThresholdParameters, ThresholdPolicy
from controller.types import Estimate, ProbeEvidence, ProbeRequest, Proposal, Slot, SlotEstimate

TIERS = (0, 1, 3, 7)
PARAMETERS = ThresholdParameters(
    warmup=20, interval=10, probe_rounds=10, probe_interval=100, probe_interval_max=800
)


def slot(num_steps: int, mean: float | None, *, samples: int = 50, **other: Any) -> SlotEstimate:
    return SlotEstimate(
        slot=Slot(max_batch_size=1, candidate_steps=other.pop("tiers", TIERS)),
        num_steps=num_steps,
        rounds=samples,
        request_rounds=samples,
        mean_correct=mean,
        sd=0.1,
        position_acceptance=(),
        scores=(),
        busiest_bucket=1,
        **other,
    )


def policy(parameters: ThresholdParameters = PARAMETERS) -> ThresholdPolicy:
    return ThresholdPolicy(parameters, [Slot(max_batch_size=1, candidate_steps=TIERS)], "worker")


def decide(rule: ThresholdPolicy, estimate: SlotEstimate) -> Proposal | None:
    proposals = rule.decide(Estimate(slots=(estimate,)))
    assert len(proposals) <= 1
    return proposals[0] if proposals else None


@pytest.mark.parametrize(
    ("num_steps", "mean", "target"),
    [
        (1, 0.25, 0),  # 0.5 - 0.25
        (1, 0.26, None),
        (1, 0.50, None),
        (1, 0.51, 3),  # above 1 - 0.5
        (1, 1.00, 3),  # full acceptance climbs
        (3, 0.26, None),  # 1 - 0.5 - 0.25
        (3, 0.25, 0),  # over two tiers
        (3, 2.25, None),
        (3, 2.50, None),
        (3, 2.51, 7),
        (7, 2.25, 3),  # 3 - 0.5 - 0.25
        (7, 2.26, None),
        (7, 7.00, None),  # nothing above
        (7, 0.10, 0),
    ],
)
def test_exact_thresholds(num_steps: int, mean: float, target: int | None) -> None:
    proposal = decide(policy(), slot(num_steps, mean))
    assert (proposal.num_steps if proposal else None) == target


def test_up_hysteresis_moves_the_way_up() -> None:
    parameters = ThresholdParameters(warmup=20, interval=10, up_hysteresis=0.25)
    assert decide(policy(parameters), slot(1, 0.75)) is None
    assert decide(policy(parameters), slot(1, 0.76)) is not None


@pytest.mark.parametrize(("mean", "urgent"), [(0.10, True), (0.11, False)])
def test_urgent_ways_down(mean: float, urgent: bool) -> None:
    proposal = decide(policy(), slot(1, mean))
    assert proposal is not None and proposal.is_urgent is urgent


def test_nothing_before_the_warm_up() -> None:
    assert decide(policy(), slot(1, 1.0, samples=19)) is None
    assert decide(policy(), slot(1, 1.0, samples=20)) is not None


def test_judged_once_per_interval_and_never_while_idle() -> None:
    rule = policy()
    assert decide(rule, slot(1, 0.4, samples=20)) is None
    assert decide(rule, slot(1, 1.0, samples=29)) is None
    for _ in range(100):  # idle: the same counts again
        assert decide(rule, slot(1, 1.0, samples=29)) is None
    assert decide(rule, slot(1, 1.0, samples=30)) is not None


def test_a_new_depth_is_judged_after_its_own_warm_up() -> None:
    rule = policy()
    assert decide(rule, slot(1, 1.0, samples=400)) is not None
    assert decide(rule, slot(3, 3.0, samples=19)) is None
    assert decide(rule, slot(3, 3.0, samples=20)) is not None


def test_unknown_mean_decides_nothing() -> None:
    assert decide(policy(), slot(3, None)) is None


def test_a_depth_that_is_no_candidate_may_still_go_down() -> None:
    proposal = decide(policy(), slot(2, 0.2, tiers=(0, 1)))
    assert proposal is not None and proposal.num_steps == 0


# ---- probes ----


def probe_at(rule: ThresholdPolicy, limit: int = 5000) -> int:
    """Rounds at 0 at which the next probe is asked for."""
    for rounds in range(limit):
        proposal = decide(rule, slot(0, 0.0, samples=rounds))
        if proposal is not None:
            assert proposal.probe == ProbeRequest(slot=1, num_steps=1, rounds=10, max_batch_size=1)
            assert not proposal.is_change
            return rounds
    raise AssertionError("no probe")


def finish(
    rule: ThresholdPolicy, mean: float, *, at: int, rounds: int = 10, waited: int = 0
) -> Proposal | None:
    evidence = ProbeEvidence(
        request=ProbeRequest(slot=1, num_steps=1, rounds=10, max_batch_size=1),
        rounds=rounds,
        request_rounds=rounds,
        waited_rounds=waited,
        mean_correct=mean,
    )
    return decide(rule, slot(0, 0.0, samples=at, probe=evidence))


def test_failed_probes_back_off_up_to_the_cap_and_never_stop() -> None:
    rule, pauses, at = policy(), [], 0
    for _ in range(8):
        due = probe_at(rule)
        pauses.append(due - at)
        proposal = finish(rule, 0.0, at=due)
        assert proposal is not None and proposal.reason == "probe_failed" and proposal.ends_probe
        at = due
    for pause, nominal in zip(pauses, [100, 200, 400, 800, 800, 800, 800, 800], strict=True):
        assert 0.89 * nominal <= pause <= 1.11 * nominal
    assert len(set(pauses[3:])) > 1, "jitter"


@pytest.mark.parametrize(("mean", "target"), [(0.45, 0), (0.46, 1)])
def test_a_probe_goes_up_above_enter(mean: float, target: int) -> None:
    rule = policy()
    proposal = finish(rule, mean, at=probe_at(rule))
    assert proposal is not None and proposal.num_steps == target and proposal.ends_probe


def test_a_probe_is_judged_when_it_is_complete() -> None:
    rule = policy()
    assert finish(rule, 1.0, at=probe_at(rule), rounds=9, waited=99) is None


def test_a_probe_that_cannot_run_ends_without_a_verdict() -> None:
    rule = policy()
    due = probe_at(rule)
    proposal = finish(rule, 0.0, at=due, rounds=3, waited=100)
    assert proposal is not None and proposal.reason == "probe_inconclusive" and proposal.num_steps == 0
    assert probe_at(rule) - due <= 110, "no back-off: nothing was learned"


def test_a_tier_that_is_entered_and_left_again_is_entered_less_often() -> None:
    rule, pauses = policy(), []
    for _ in range(4):
        due = probe_at(rule)
        pauses.append(due)
        finish(rule, 0.6, at=due)
        dropped = decide(rule, slot(1, 0.2, samples=20))
        assert dropped is not None and dropped.num_steps == 0
    assert pauses[3] > 2 * pauses[1] > 2 * pauses[0]


def test_a_climb_forgives_earlier_failures() -> None:
    rule = policy()
    for _ in range(4):
        finish(rule, 0.0, at=probe_at(rule))
    finish(rule, 0.9, at=probe_at(rule))
    assert decide(rule, slot(1, 0.9)) is not None
    assert decide(rule, slot(3, 0.1)) is not None
    assert probe_at(rule) <= 110


def test_one_probe_at_a_time() -> None:
    slots = [Slot(max_batch_size=edge, candidate_steps=(0, 1)) for edge in (1, 4)]
    rule = ThresholdPolicy(PARAMETERS, slots, "worker")

    def estimates(samples: int) -> Estimate:
        base = slot(0, 0.0, samples=samples)
        return Estimate(slots=tuple(SlotEstimate(**{**vars(base), "slot": one}) for one in slots))

    rule.decide(estimates(0))
    assert len(rule.decide(estimates(300))) == 1


def test_the_same_evidence_gives_the_same_proposals() -> None:
    history = [slot(1, 0.2), *(slot(0, 0.0, samples=n) for n in range(400))]
    first, second = policy(), policy()
    assert [decide(first, e) for e in history] == [decide(second, e) for e in history]


# ---- parameters and registry ----


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"warmup": 0}, "warmup"),
        ({"interval": -1}, "interval"),
        ({"probe_rounds": 2000}, "probe_rounds"),
        ({"probe_interval": 100, "probe_interval_max": 10}, "probe_interval_max"),
        ({"down_hysteresis": 0.5}, "down_hysteresis"),
        ({"urgent": 0.9}, "urgent"),
    ],
)
def test_bad_parameters_are_named(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ThresholdParameters(**bad)


def test_policies_are_found_by_name() -> None:
    assert set(policy_kinds()) >= {"static", "threshold"}


def test_static_proposes_its_depth_or_the_nearest_below() -> None:
    kind = policy_kinds()["static"]
    slots = [Slot(max_batch_size=1, candidate_steps=(0, 1, 3))]
    rule = kind.build(kind.parameters(num_steps=2), slots, "worker")
    assert [p.num_steps for p in rule.decide(Estimate(slots=(slot(3, None),)))] == [1]
    assert rule.decide(Estimate(slots=(slot(1, None),))) == []
