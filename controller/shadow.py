"""Shadow: a second policy beside the active one, on the same observations; what it would do is never done.

At every turn it stands on the table that is really in force (its own wishes are not followed), so its figures say
what it would change from here. Pure, as the policies are: `replay` uses it for "what would that policy have done".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from controller.config import ControllerConfig, PolicyConfig
from controller.life import Life
from controller.turn import Turn
from controller.types import Estimate, Verdict, slot_edge
from controller.worker_client import WorkerClient
from worker.protocol import PlanStatus, SpecInfo

WISH_SECONDS = 10.0
"""A wish that is not repeated for so long counts as dropped: policies say what they want, not that they are content."""


@dataclass(frozen=True, kw_only=True)
class Wished:
    """What the shadow would have in a slot instead of what is in force."""

    slot: int
    num_steps_now: int
    num_steps: int
    gain: float | None
    """Estimated relative gain in tokens per second, e.g. 0.05; None while round seconds are not known."""


class Shadow:
    """A policy that looks on. One per worker life."""

    def __init__(
        self, worker_id: str, policy: PolicyConfig, config: ControllerConfig, *, life: Life, now: float
    ) -> None:
        """Stand beside a life.

        Args:
            worker_id: seeds the policy's jitter, as for the active one.
            policy: what to look on with.
            config: guards and limits are the active policy's.
            life: the life to stand beside.
            now: monotonic seconds.
        """
        self.kind = policy.kind
        self._life = bystander(worker_id, config.model_copy(update={"policy": policy}), life.info, now)
        self.estimate: Estimate | None = None
        """What its evidence says, on its own slots, as of the newest turn."""
        self._wishes: dict[int, tuple[Wished, float]] = {}
        self.follow(life.depths)

    def turn(self, turn: Turn) -> list[Verdict]:
        """Take the turn's observation in; return what the policy would do now and the guards would allow it."""
        estimate = self.estimate = self._life.estimate(turn.observation)
        if not self._life.info.adaptation or turn.is_pinned:
            return []
        proposals = self._life.decide(estimate)
        verdicts = self._life.guard(proposals, now=turn.now, age_seconds=turn.age_seconds)
        for verdict in verdicts:
            proposal = verdict.proposal
            if verdict.is_allowed and proposal.probe is None:
                wished = Wished(
                    slot=proposal.slot,
                    num_steps_now=proposal.num_steps_before,
                    num_steps=verdict.num_steps,
                    gain=estimated_gain(
                        estimate, proposal.slot, proposal.num_steps_before, verdict.num_steps
                    ),
                )
                self._wishes[proposal.slot] = wished, turn.now
        self._forget_old(turn.now)
        return [v for v in verdicts if v.is_allowed and v.num_steps != v.proposal.num_steps_before]

    def follow(self, depths: Mapping[int, int]) -> None:
        """Stand on the table that is in force (its slots may be others than this policy's)."""
        edges = tuple(sorted(depths))
        table = {
            slot.max_batch_size: depths[slot_edge(edges, slot.max_batch_size)] for slot in self._life.slots
        }
        if table != self._life.depths:
            changed = {edge for edge, depth in table.items() if depth != self._life.depths[edge]}
            self._wishes = {edge: wish for edge, wish in self._wishes.items() if edge not in changed}
            self._life.adopt(table)

    def wished(self) -> list[Wished]:
        """Return, for each slot, what the policy would have there; the present depth where it is content."""
        return [
            self._wishes[edge][0]
            if edge in self._wishes
            else Wished(slot=edge, num_steps_now=depth, num_steps=depth, gain=0.0)
            for edge, depth in self._life.depths.items()
        ]

    def _forget_old(self, now: float) -> None:
        self._wishes = {
            edge: (wish, since) for edge, (wish, since) in self._wishes.items() if now - since < WISH_SECONDS
        }


def bystander(worker_id: str, config: ControllerConfig, info: SpecInfo, now: float) -> Life:
    """Return a life that sends nothing; it starts at the worker's own depth."""
    status = PlanStatus(
        source="fallback",
        plan=None,
        age_seconds=None,
        remaining_seconds=0.0,
        pin_remaining_seconds=0.0,
        fallback_num_steps=info.fallback_num_steps,
        num_steps=info.fallback_num_steps,
    )
    nobody = cast(WorkerClient, None)
    return Life(worker_id, nobody, config, epoch=0, info=info, status=status, now=now)


def estimated_gain(estimate: Estimate, slot: int, before: int, after: int) -> float | None:
    """Return the estimated relative gain in tokens per second of another depth in a slot.

    From the forecasts that every estimate carries, whatever the policy looks at; None while round seconds are not
    known.
    """
    forecast = estimate.forecasts.get(slot)
    if forecast is None:
        return None
    goodput = {tier.num_steps: tier.goodput for tier in forecast.tiers}
    old, new = goodput.get(before), goodput.get(after)
    return None if not old or new is None else new / old - 1
