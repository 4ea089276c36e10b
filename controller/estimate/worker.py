"""All evidence of one worker put together: per slot, what each depth would bring.

Goodput g(bs, k) = bs E(k) / t(bs, k). Acceptance is shared by all batch sizes, for it is the text's; costs are not.
Restarted when the worker is. Pure.
"""

from collections.abc import Sequence

from controller.estimate.acceptance import Acceptance
from controller.estimate.latency import Latency, Profile
from controller.estimate.slots import SlotEvidence
from controller.types import (
    AcceptanceEstimate,
    Delivery,
    Depths,
    Estimate,
    Observation,
    ProbeRequest,
    Slot,
    SlotForecast,
    TierForecast,
    slot_edge,
)

LOAD_HALF_LIFE_SECONDS = 1.5
"""How fast the typical batch size of a slot follows."""


class Estimator:
    """The evidence of one worker. Mutated only by the loop."""

    def __init__(
        self, slots: Sequence[Slot], depths: Depths, alpha: float, profile: Profile | None = None
    ) -> None:
        self._edges = tuple(slot.max_batch_size for slot in slots)
        self._evidence = {s.max_batch_size: SlotEvidence(s, depths[s.max_batch_size], alpha) for s in slots}
        self._tiers = {slot.max_batch_size: slot.candidate_steps for slot in slots}
        width = max(max(slot.candidate_steps[-1] for slot in slots), max(depths.values()))
        self._width = width
        self._acceptance = Acceptance(width)
        self._latency = Latency(profile, width)
        self._load: dict[int, list[float]] = {}
        self._before: AcceptanceEstimate | None = None
        """The estimate of the turn before, that forecasts are made with."""

    def follow(self, depths: Depths, probe: ProbeRequest | None) -> None:
        """Tell what is in force from now on: the depth of every slot, and the probe in flight."""
        for edge, evidence in self._evidence.items():
            evidence.decide(depths[edge])
            evidence.begin_probe(probe if probe is not None and probe.slot == edge else None)

    def estimate(self, observation: Observation) -> Estimate:
        """Take an observation in and return what is known."""
        for cell in observation.cells:
            own = slot_edge(self._edges, cell.max_batch_size)
            for edge, evidence in self._evidence.items():
                if edge == own:
                    evidence.add(cell)
                else:
                    evidence.wait(cell.rounds)
        delivery = self._delivery(observation)
        self._acceptance.add(observation.cells, observation.span_seconds)
        acceptance = self._before = self._acceptance.estimate()
        drafts = self._drafts(acceptance)
        self._latency.add(observation.cells, observation.span_seconds, drafts)
        self._follow_load(observation)
        forecasts = self._forecasts(acceptance, drafts) if self._latency.is_known else {}
        return Estimate(
            slots=tuple(evidence.estimate() for evidence in self._evidence.values()),
            seconds=observation.seconds,
            span_seconds=observation.span_seconds,
            is_busy=bool(observation.cells),
            acceptance=acceptance,
            forecasts=forecasts,
            delivery=delivery,
        )

    def _delivery(self, observation: Observation) -> Delivery | None:
        """Compare a window with what was forecast before it; rounds beside a prefill are left out."""
        cells = [cell for cell in observation.cells if cell.timed_rounds == cell.rounds]
        if not self._latency.is_known or not cells:
            return None
        acceptance = self._before
        if acceptance is None:
            return None
        drafts = self._drafts(acceptance)
        tokens = acceptance.expected_tokens()
        expected_tokens = expected_seconds = 0.0
        for cell in cells:
            depth = min(cell.num_steps, self._width)
            batch_size = cell.request_rounds / cell.rounds
            expected_tokens += cell.request_rounds * tokens[depth]
            (cost,) = self._latency.forecast(batch_size, (depth,), drafts)
            expected_seconds += cell.rounds * cost.seconds
        return Delivery(
            request_rounds=sum(cell.request_rounds for cell in cells),
            tokens=sum(cell.emitted_tokens for cell in cells),
            expected_tokens=expected_tokens,
            seconds=sum(cell.round_seconds for cell in cells),
            expected_seconds=expected_seconds,
        )

    def _drafts(self, acceptance: AcceptanceEstimate) -> list[float]:
        """Drafts verified per request-round at each depth."""
        drafts = [0.0]
        for share in acceptance.proposed:
            drafts.append(drafts[-1] + share)
        return drafts

    def _follow_load(self, observation: Observation) -> None:
        """Per slot: decayed rounds and request-rounds."""
        keep = 0.5 ** (observation.span_seconds / LOAD_HALF_LIFE_SECONDS)
        for load in self._load.values():
            load[0] *= keep
            load[1] *= keep
        for cell in observation.cells:
            load = self._load.setdefault(slot_edge(self._edges, cell.max_batch_size), [0.0, 0.0])
            load[0] += cell.rounds
            load[1] += cell.request_rounds

    def _forecasts(self, acceptance: AcceptanceEstimate, drafts: Sequence[float]) -> dict[int, SlotForecast]:
        """What every tier would bring, by slot: tokens depend on the depth alone, seconds on the slot as well."""
        tokens = acceptance.expected_tokens()
        total = sum(load[0] for load in self._load.values())
        return {edge: self._forecast(edge, tokens, drafts, total) for edge in self._edges}

    def _forecast(
        self, edge: int, tokens: Sequence[float], drafts: Sequence[float], total_rounds: float
    ) -> SlotForecast:
        rounds, request_rounds = self._load.get(edge, (0.0, 0.0))
        batch_size = request_rounds / rounds if rounds > 1e-3 else float(edge)
        tiers = self._tiers[edge]
        costs = self._latency.forecast(batch_size, tiers, drafts)
        return SlotForecast(
            batch_size=batch_size,
            tiers=tuple(
                TierForecast(
                    num_steps=num_steps,
                    tokens=tokens[num_steps],
                    round_seconds=cost.seconds,
                    round_variance=cost.variance,
                    spread=cost.spread,
                    goodput=batch_size * tokens[num_steps] / cost.seconds,
                )
                for num_steps, cost in zip(tiers, costs, strict=True)
            ),
            share=rounds / total_rounds if total_rounds > 0 else 0.0,
        )
