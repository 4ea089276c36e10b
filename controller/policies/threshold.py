"""`threshold`: follow the mean of correct drafts per request-round, as SGLang's adaptive rule does.

Per slot, with tiers c_0 < c_1 < … and m the moving average of correct drafts at the present tier c_i:

- down while m <= c_{i-1} - 0.5 + down_hysteresis (over several tiers if need be);
- up by one when m > c_i - 0.5 + up_hysteresis. m never exceeds c_i, because a fully accepted draft says only
  "at least c_i": full acceptance must climb, so the way up compares with the present tier, not with the next;
- between the two: stay. One sample cannot change a tier: `warmup` and `interval` request-rounds must pass, both
  counted in rounds that really ran at the present tier, so that an idle worker uses nothing up.

At 0 nothing is drafted and m says nothing, so 0 is left by a *probe*: a few rounds at the smallest positive tier,
after `probe_interval` rounds at 0, doubled by each failure up to `probe_interval_max` (never given up, so 0 is
no one-way latch), spread a little per worker. A probe whose mean exceeds `enter` goes up.

The rule knows acceptance only and no cost; which depths may pay on a machine is said by the slots' candidates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from controller.policies.base import PolicyKind, jitter
from controller.types import Estimate, ProbeEvidence, ProbeRequest, Proposal, Slot, SlotEstimate


@dataclass(frozen=True, kw_only=True)
class ThresholdParameters:
    """`[policy.parameters]` of `threshold`."""

    warmup: int = 24
    """Request-rounds at a tier before it is judged."""
    interval: int = 12
    """Request-rounds between two judgements."""
    up_hysteresis: float = 0.0
    down_hysteresis: float = -0.25
    urgent: float = 0.1
    """At or below this mean the way down does not wait for the dwell time."""
    enter: float = 0.45
    """A probe from 0 must bring more correct drafts per request-round than this."""
    probe_rounds: int = 12
    probe_interval: int = 48
    """Rounds at 0 before the first probe."""
    probe_interval_max: int = 384

    def __post_init__(self) -> None:
        for name in ("warmup", "interval", "probe_rounds", "probe_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.probe_rounds > 1024:
            raise ValueError(f"probe_rounds must be at most 1024, got {self.probe_rounds}")
        if self.probe_interval_max < self.probe_interval:
            raise ValueError(
                f"probe_interval_max {self.probe_interval_max} is below probe_interval {self.probe_interval}"
            )
        for name in ("up_hysteresis", "down_hysteresis", "urgent", "enter"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}")
        if self.down_hysteresis > self.up_hysteresis:
            raise ValueError(
                f"down_hysteresis {self.down_hysteresis} is above up_hysteresis {self.up_hysteresis}: "
                "the depth would flap"
            )
        if not 0 <= self.urgent <= self.enter:
            raise ValueError(f"urgent must be within 0…enter ({self.enter}), got {self.urgent}")


class _SlotState:
    """What the rule remembers of one slot between two calls."""

    def __init__(self) -> None:
        self.depth = -1
        self.judged_at = 0
        self.failures = 0
        self.probes = 0
        self.next_probe = 0

    def follow(self, estimate: SlotEstimate) -> None:
        """Notice that the depth moved: its sample counts began again."""
        if estimate.num_steps != self.depth:
            self.depth = estimate.num_steps
            self.judged_at = 0


class ThresholdPolicy:
    """The rule of the module's docstring for all slots of one worker."""

    def __init__(self, parameters: ThresholdParameters, slots: Sequence[Slot], seed: str) -> None:
        self._parameters = parameters
        self._seed = seed
        self._states = {slot.max_batch_size: _SlotState() for slot in slots}

    def decide(self, estimate: Estimate) -> list[Proposal]:
        """See `Policy.decide`."""
        proposals = []
        may_probe = estimate.probe is None
        for slot in estimate.slots:
            state = self._states[slot.slot.max_batch_size]
            came_down = slot.num_steps == 0 and state.depth != 0
            state.follow(slot)
            if came_down:
                state.next_probe = self._pause(slot, state)
            if slot.num_steps > 0:
                proposal = self._judge(slot, state)
            elif slot.probe is not None:
                proposal = self._judge_probe(slot, slot.probe, state)
            else:
                proposal = self._probe(slot, state) if may_probe else None
            if proposal is not None:
                may_probe = may_probe and proposal.probe is None
                proposals.append(proposal)
        return proposals

    # ---- at a positive tier ----

    def _judge(self, slot: SlotEstimate, state: _SlotState) -> Proposal | None:
        p = self._parameters
        if slot.mean_correct is None or slot.request_rounds < p.warmup:
            return None
        if state.judged_at and slot.request_rounds - state.judged_at < p.interval:
            return None
        state.judged_at = slot.request_rounds
        if slot.request_rounds >= p.probe_interval_max:
            state.failures = 0  # the tier has lasted: a later fall to 0 is a new story
        tiers = slot.slot.candidate_steps
        mean, index = slot.mean_correct, _index(tiers, slot.num_steps)
        lower = index
        while lower > 0 and mean <= self._leave(tiers, lower):
            lower -= 1
        if lower < index:
            return self._drop(slot, mean, tiers[lower], self._leave(tiers, index))
        climb_above = slot.num_steps - 0.5 + p.up_hysteresis
        if index + 1 < len(tiers) and mean > climb_above:
            state.failures = 0
            return _proposal(
                slot,
                tiers[index + 1],
                reason="climb",
                message=f"{mean:.2f} correct drafts per round at {slot.num_steps}, above {climb_above:.2f}",
                inputs={"mean_correct": mean, "climb_above": climb_above},
            )
        return None

    def _leave(self, tiers: Sequence[int], index: int) -> float:
        """The mean at or below which tier `index` gives way to the one below."""
        below = tiers[index - 1]
        return (0.5 if below == 0 else below - 0.5) + self._parameters.down_hysteresis

    def _drop(self, slot: SlotEstimate, mean: float, target: int, leave_at: float) -> Proposal:
        return _proposal(
            slot,
            target,
            reason="drop",
            message=f"{mean:.2f} correct drafts per round at {slot.num_steps}, not above {leave_at:.2f}",
            inputs={"mean_correct": mean, "drop_at": leave_at},
            is_urgent=mean <= self._parameters.urgent,
        )

    # ---- at 0 ----

    def _pause(self, slot: SlotEstimate, state: _SlotState) -> int:
        """Rounds at 0 (in the slot's count) at which the next probe is due."""
        p = self._parameters
        pause = min(p.probe_interval << min(state.failures, 32), p.probe_interval_max)
        return slot.rounds + round(pause * jitter(self._seed, slot.slot.max_batch_size, state.probes))

    def _probe(self, slot: SlotEstimate, state: _SlotState) -> Proposal | None:
        tiers = slot.slot.candidate_steps
        if slot.rounds < state.next_probe or slot.busiest_bucket is None or tiers[-1] == 0:
            return None
        tier = next(tier for tier in tiers if tier > 0)
        rounds = self._parameters.probe_rounds
        return _proposal(
            slot,
            0,
            reason="probe",
            message=f"{slot.rounds} rounds without drafts: {rounds} rounds at {tier} to see whether they pay",
            inputs={"rounds_at_0": slot.rounds, "failures": state.failures},
            probe=ProbeRequest(
                slot=slot.slot.max_batch_size,
                num_steps=tier,
                rounds=rounds,
                max_batch_size=slot.busiest_bucket,
            ),
        )

    def _judge_probe(self, slot: SlotEstimate, probe: ProbeEvidence, state: _SlotState) -> Proposal | None:
        p = self._parameters
        if probe.rounds < p.probe_rounds and probe.waited_rounds < p.probe_interval:
            return None
        state.probes += 1
        inputs = {
            "mean_correct": probe.mean_correct,
            "enter_above": p.enter,
            "probe_rounds": float(probe.rounds),
        }
        tier = probe.request.num_steps
        if probe.rounds < p.probe_rounds:
            state.next_probe = self._pause(slot, state)
            message = f"only {probe.rounds} of {p.probe_rounds} probe rounds ran: the batch size moved on"
            return _proposal(
                slot, 0, reason="probe_inconclusive", message=message, inputs=inputs, ends_probe=True
            )
        found = f"{probe.mean_correct:.2f} correct drafts per round in the probe of {tier}"
        # A success counts as a failure until the tier has lasted: a tier that is entered and left again and
        # again is then entered less and less often.
        state.failures += 1
        if probe.mean_correct > p.enter:
            message = f"{found}, above {p.enter:.2f}"
            return _proposal(
                slot, tier, reason="probe_succeeded", message=message, inputs=inputs, ends_probe=True
            )
        state.next_probe = self._pause(slot, state)
        message = f"{found}, not above {p.enter:.2f}"
        return _proposal(slot, 0, reason="probe_failed", message=message, inputs=inputs, ends_probe=True)


def _index(tiers: Sequence[int], num_steps: int) -> int:
    """Place of a depth among the tiers; an adopted depth that is none counts as the nearest one below."""
    return max((i for i, tier in enumerate(tiers) if tier <= num_steps), default=0)


def _proposal(
    slot: SlotEstimate,
    num_steps: int,
    *,
    reason: str,
    message: str,
    inputs: dict[str, float],
    is_urgent: bool = False,
    probe: ProbeRequest | None = None,
    ends_probe: bool = False,
) -> Proposal:
    evidence = slot.probe if ends_probe and slot.probe is not None else slot
    return Proposal(
        slot=slot.slot.max_batch_size,
        num_steps_before=slot.num_steps,
        num_steps=num_steps,
        reason=reason,
        message=message,
        scores=slot.scores,
        inputs=inputs,
        rounds=evidence.rounds,
        request_rounds=evidence.request_rounds,
        is_urgent=is_urgent,
        probe=probe,
        ends_probe=ends_probe,
    )


KIND = PolicyKind(
    name="threshold",
    version="1",
    parameters=ThresholdParameters,
    build=ThresholdPolicy,
    # It knows no cost: larger batches have less idle compute for drafts to use, so they get fewer candidates.
    default_slots=(
        Slot(max_batch_size=1, candidate_steps=(0, 1, 2, 3, 5, 7)),
        Slot(max_batch_size=4, candidate_steps=(0, 1, 2, 3)),
        Slot(max_batch_size=8, candidate_steps=(0, 1, 2)),
    ),
)
