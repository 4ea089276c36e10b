"""`static`: one fixed depth for every slot, the baseline of all comparisons.

The guards apply to it as to any policy. A slot that does not offer the depth takes its nearest tier below.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from controller.policies.base import PolicyKind
from controller.types import Estimate, Proposal, Slot


@dataclass(frozen=True, kw_only=True)
class StaticParameters:
    """`[policy.parameters]` of `static`."""

    num_steps: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.num_steps <= 64:
            raise ValueError(f"num_steps must be within 0…64, got {self.num_steps}")


class StaticPolicy:
    """Proposes its depth wherever another one is in force."""

    def __init__(self, parameters: StaticParameters, slots: Sequence[Slot], seed: str) -> None:
        wanted = parameters.num_steps
        self._depths = {
            slot.max_batch_size: max(
                (tier for tier in slot.candidate_steps if tier <= wanted), default=slot.candidate_steps[0]
            )
            for slot in slots
        }

    def decide(self, estimate: Estimate) -> list[Proposal]:
        """See `Policy.decide`."""
        proposals = []
        for slot in estimate.slots:
            target = self._depths[slot.slot.max_batch_size]
            if slot.num_steps != target:
                proposals.append(
                    Proposal(
                        slot=slot.slot.max_batch_size,
                        num_steps_before=slot.num_steps,
                        num_steps=target,
                        reason="static",
                        message=f"the configured depth is {target}",
                        scores=slot.scores,
                        ends_probe=slot.probe is not None,
                    )
                )
        return proposals


KIND = PolicyKind(name="static", version="1", parameters=StaticParameters, build=StaticPolicy)
