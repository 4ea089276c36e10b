"""`goodput`: the depth that brings most tokens per second, as far as that is known.

Per slot, with g(k) = bs E(k) / t(bs, k) and G = ln g(k2) - ln g(k1) for the present depth k1:

- **change** to the best k2 when G > max(delta, z sd(G)): the gain must be worth it and beyond doubt. For a way down
  less will do (delta_down): where depths are worth the same, the shallow one wastes least. The dwell time between two
  changes is the guards'. When plain decoding is clearly faster, the way to it does not wait.
- **probe** a depth whose optimistic gain G + optimism sd(G) exceeds delta, for as few rounds as tell something. A
  probe is paid from a budget, a share of busy time; one that found nothing waits twice as long for the next, and a
  change of the text sets that back. At depth 0 nothing is learned about the text, so probes go on there for ever.
- **sight**: while the text keeps changing any other depth is worth a little more than its goodput, because a change
  shows there at once. With drafts that cost next to nothing this keeps a lookup drafter from being switched off.
- **slots without traffic** follow when a slot in use changes, so that the table is right when the batch size gets
  there; by themselves they move nothing.
- **latency_slo**: only depths whose rounds stay below `slo_seconds` at the 95th percentile (a stream's tokens come
  once per round, so that is its inter-token time); if none does, the fastest round.

Regimes: cheap drafts and long runs, the deepest tier; a batch that fills the machine or text that cannot be guessed,
0; in between E(k) is concave and t(bs, k) climbs, in steps, so there is one best depth or a flat top. On a flat top
nothing moves: no gain exceeds delta.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from controller.estimate.gain import Gains
from controller.policies.base import PolicyKind, jitter
from controller.policies.goodput_choice import P95, Choice
from controller.policies.goodput_parameters import GoodputParameters
from controller.types import (
    AcceptanceEstimate,
    Estimate,
    ProbeRequest,
    Proposal,
    Slot,
    SlotEstimate,
    SlotForecast,
    TierForecast,
)

BUDGET_START_SECONDS = 0.08
BUDGET_MAX_SECONDS = 0.6
"""Probe time that can be saved up while none is needed."""
SURPRISE = 1.3
"""At depth 0: a probe that was better than expected by this many standard deviations is repeated at once."""
REPEATS = 2
"""Times that it is repeated; the time is borrowed from the budget if need be."""
PROBE_WAITS_SECONDS = 2.0
"""A probe whose batch size does not come within this time is given up."""


@dataclass
class _SlotState:
    """What the policy remembers of one slot."""

    failures: int = 0
    probes: int = 0
    next_probe: float = 0.0
    probe_since: float = 0.0
    depth: int = -1


class GoodputPolicy:
    """The rule of the module's docstring for all slots of one worker."""

    def __init__(self, parameters: GoodputParameters, slots: Sequence[Slot], seed: str) -> None:
        self._parameters = parameters
        self._seed = seed
        self._states = {slot.max_batch_size: _SlotState() for slot in slots}
        self._budget = BUDGET_START_SECONDS
        self._changed_at = -math.inf

    def decide(self, estimate: Estimate) -> list[Proposal]:
        """See `Policy.decide`."""
        acceptance = estimate.acceptance
        if acceptance is None or not estimate.forecasts:
            return []
        if estimate.is_busy:
            saved = self._parameters.probe_share * estimate.span_seconds
            self._budget = min(self._budget + saved, BUDGET_MAX_SECONDS)
        if self._changed_at == -math.inf:
            self._changed_at = estimate.seconds
        if acceptance.has_changed:
            self._changed_at = estimate.seconds
            for state in self._states.values():
                state.failures, state.next_probe = 0, min(state.next_probe, estimate.seconds)
        gains, sight = Gains(acceptance), self._sight(estimate)
        choices = [self._choice(slot, estimate, acceptance, gains, sight) for slot in estimate.slots]
        moved = any(choice.is_active and choice.is_change for choice in choices)
        proposals = []
        may_probe = estimate.probe is None
        for choice in choices:
            proposal = choice.proposal(moved)
            if choice.slot.probe is not None:
                proposal = self._end_probe(choice, proposal, estimate)
            elif proposal is None and may_probe and choice.is_active:
                proposal = self._probe(choice, estimate)
            if proposal is not None:
                may_probe = may_probe and proposal.probe is None
                proposals.append(proposal)
        return proposals

    # ---- choosing ----

    def _choice(
        self,
        slot: SlotEstimate,
        estimate: Estimate,
        acceptance: AcceptanceEstimate,
        gains: Gains,
        sight: float,
    ) -> Choice:
        p = self._parameters
        forecast = estimate.forecasts[slot.slot.max_batch_size]
        state = self._states[slot.slot.max_batch_size]
        if slot.num_steps != state.depth:
            state.depth, state.failures = slot.num_steps, 0
            state.next_probe = estimate.seconds + p.probe_pause_seconds
        tiers = self._allowed(forecast)
        present = forecast.tier(slot.num_steps)
        # NOTE: what is seen of the text is worth `sight` at any depth but 0.
        best = max(tiers, key=lambda tier: math.log(tier.goodput) + (sight if tier.num_steps else 0.0))
        if present is None or present not in tiers:
            return Choice(slot, forecast, acceptance, gains, present, best, None, "not_allowed")
        found = gains.of(best, present)
        worth = found.mean + (sight if best.num_steps else 0.0) - (sight if present.num_steps else 0.0)
        is_deeper = best.num_steps > present.num_steps
        least = p.delta if is_deeper else p.delta_down
        if best is present or worth <= max(least, p.z * found.sd):
            return Choice(slot, forecast, acceptance, gains, present, present, found, "stay")
        reason = "sight" if found.mean <= 0 else "deeper" if is_deeper else "shallower"
        return Choice(slot, forecast, acceptance, gains, present, best, found, reason)

    def _sight(self, estimate: Estimate) -> float:
        """What any depth but 0 is worth beside its goodput, in logarithms: it shows when the text changes."""
        p = self._parameters
        return p.sight * math.exp(-(estimate.seconds - self._changed_at) / p.sight_seconds)

    def _allowed(self, forecast: SlotForecast) -> list[TierForecast]:
        """The tiers that objective and caps leave; never empty."""
        p = self._parameters
        caps = [deepest for size, deepest in p.max_num_steps.items() if forecast.batch_size >= size]
        tiers = [t for t in forecast.tiers if not caps or t.num_steps <= min(caps)] or [forecast.tiers[0]]
        if p.objective == "throughput" or p.slo_seconds is None:
            return tiers
        slo = p.slo_seconds
        inside = [t for t in tiers if t.round_seconds * math.exp(P95 * t.spread) <= slo]
        return inside or [min(tiers, key=lambda tier: tier.round_seconds)]

    # ---- probing ----

    def _probe(self, choice: Choice, estimate: Estimate) -> Proposal | None:
        """Ask for a few rounds at the most promising deeper depth, if it is time and the budget has them."""
        p = self._parameters
        slot, present = choice.slot, choice.present
        state = self._states[slot.slot.max_batch_size]
        if present is None or slot.busiest_bucket is None or estimate.seconds < state.next_probe:
            return None
        deeper = [tier for tier in self._allowed(choice.forecast) if tier.num_steps > present.num_steps]
        hopes = [self._hope(choice, tier, present) for tier in deeper]
        best = max(hopes, default=0.0)
        chosen = [tier for tier, hope in zip(deeper, hopes, strict=True) if hope == best > p.delta][:1]
        if not chosen and slot.num_steps == 0:
            # A change of the text can be seen nowhere else. Two positions tell more than one.
            chosen = deeper[:2][-1:]
        if not chosen:
            return None
        tier = chosen[0]
        samples = p.probe_samples if slot.num_steps > 0 else p.probe_samples / 4
        rounds = max(1, math.ceil(samples / choice.forecast.batch_size))
        cost = rounds * tier.round_seconds
        # At depth 0 there is always a next probe: at the latest when its share of the time, and half of what was
        # borrowed for repeats, has passed.
        debt = max(0.0, -self._budget) / 2
        is_overdue = (
            slot.num_steps == 0 and estimate.seconds - state.probe_since > (cost + debt) / p.probe_share
        )
        if cost > self._budget and not is_overdue:
            return None
        hope = math.expm1(self._hope(choice, tier, present))
        why = f"may bring up to {100 * hope:+.0f} %" if hope > 0 else "would show a change of the text"
        message = f"{tier.num_steps} {why}: {rounds} rounds to see"
        return self._ask(choice, message, tier, rounds, slot.busiest_bucket, estimate)

    def _hope(self, choice: Choice, tier: TierForecast, present: TierForecast) -> float:
        found = choice.gains.of(tier, present)
        return found.mean + self._parameters.optimism * math.hypot(found.sd, found.cost_sd)

    def _ask(
        self,
        choice: Choice,
        message: str,
        tier: TierForecast,
        rounds: int,
        bucket: int,
        estimate: Estimate,
        *,
        ends_probe: bool = False,
    ) -> Proposal:
        edge = choice.slot.slot.max_batch_size
        state = self._states[edge]
        self._budget -= rounds * tier.round_seconds
        state.probes += 1
        state.probe_since = estimate.seconds
        return choice.make(
            "probe",
            message,
            choice.slot.num_steps,
            choice.gain,
            probe=ProbeRequest(slot=edge, num_steps=tier.num_steps, rounds=rounds, max_batch_size=bucket),
            ends_probe=ends_probe,
        )

    def _end_probe(self, choice: Choice, proposal: Proposal | None, estimate: Estimate) -> Proposal | None:
        """End a probe that has run, that waits in vain, or that a change has overtaken."""
        probe = choice.slot.probe
        assert probe is not None
        p = self._parameters
        edge = choice.slot.slot.max_batch_size
        state = self._states[edge]
        has_run = probe.rounds >= probe.request.rounds
        if proposal is None and not has_run and estimate.seconds - state.probe_since < PROBE_WAITS_SECONDS:
            return None
        if proposal is not None:
            return choice.make(
                proposal.reason, proposal.message, proposal.num_steps, choice.gain, ends_probe=True
            )
        again = self._repeat(choice, estimate) if has_run else None
        if again is not None:
            return again
        state.failures += choice.slot.num_steps > 0
        pause = min(
            p.probe_pause_seconds * 2 ** min(max(state.failures - 1, 0), 32), p.probe_pause_max_seconds
        )
        state.next_probe = estimate.seconds + pause * jitter(self._seed, edge, state.probes)
        reason = "probe_failed" if has_run else "probe_inconclusive"
        message = f"{probe.rounds} of {probe.request.rounds} rounds at {probe.request.num_steps}: no gain"
        return choice.make(reason, message, choice.slot.num_steps, choice.gain, ends_probe=True)

    def _repeat(self, choice: Choice, estimate: Estimate) -> Proposal | None:
        """At depth 0: look again at once if a probe was better than expected, on borrowed time if need be."""
        probe = choice.slot.probe
        assert probe is not None
        tier = choice.forecast.tier(probe.request.num_steps)
        surprise = choice.acceptance.surprise
        if choice.slot.num_steps > 0 or tier is None or surprise < SURPRISE:
            return None
        # NOTE: one round more, so that it is another plan: the same probe again would be a renewal.
        rounds = probe.request.rounds + 1
        first = max(1, math.ceil(self._parameters.probe_samples / 4 / choice.forecast.batch_size))
        if rounds > first + REPEATS:
            return None
        message = f"more drafts were correct than expected ({surprise:.1f} sd): {rounds} rounds more"
        return self._ask(
            choice, message, tier, rounds, probe.request.max_batch_size, estimate, ends_probe=True
        )


KIND = PolicyKind(name="goodput", version="3", parameters=GoodputParameters, build=GoodputPolicy)
