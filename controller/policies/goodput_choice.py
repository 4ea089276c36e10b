"""What `goodput` finds for one slot, and how that becomes a proposal with its numbers."""

import math
from dataclasses import dataclass

from controller.estimate.gain import Gain, Gains
from controller.types import (
    AcceptanceEstimate,
    ProbeRequest,
    Proposal,
    SlotEstimate,
    SlotForecast,
    TierForecast,
    TierScore,
)

P95 = 1.645
"""Standard deviations of a one-sided 95 %."""


@dataclass(frozen=True)
class Choice:
    """What one slot should do, before anything is proposed."""

    slot: SlotEstimate
    forecast: SlotForecast
    acceptance: AcceptanceEstimate
    gains: Gains
    """Under this acceptance."""
    present: TierForecast | None
    best: TierForecast
    gain: Gain | None
    reason: str

    @property
    def is_active(self) -> bool:
        """Whether a relevant part of the recent rounds was in this slot."""
        return self.forecast.share >= 0.1

    @property
    def is_change(self) -> bool:
        """Whether the depth should move."""
        return self.best.num_steps != self.slot.num_steps

    def proposal(self, moved: bool) -> Proposal | None:
        """Return the change as a proposal; None to stay."""
        if not self.is_change:
            return None
        if not self.is_active and not moved:
            return None
        if self.gain is None:
            return self.make(
                self.reason, f"{self.slot.num_steps} is not allowed here", self.best.num_steps, None
            )
        message = (
            f"{self.best.num_steps} brings {100 * math.expm1(self.gain.mean):+.1f} % "
            f"(± {100 * self.gain.sd:.1f}) over {self.slot.num_steps} at batch {self.forecast.batch_size:.1f}"
        )
        return self.make(self.reason, message, self.best.num_steps, self.gain)

    def make(
        self,
        reason: str,
        message: str,
        num_steps: int,
        found: Gain | None,
        *,
        probe: ProbeRequest | None = None,
        ends_probe: bool = False,
    ) -> Proposal:
        """Build a proposal with the numbers it follows from."""
        inputs = {"batch_size": self.forecast.batch_size}
        if found is not None:
            inputs |= {"gain": found.mean, "gain_sd": found.sd, "gain_cost_sd": found.cost_sd}
        is_way_down = found is not None and num_steps < self.slot.num_steps
        return Proposal(
            slot=self.slot.slot.max_batch_size,
            num_steps_before=self.slot.num_steps,
            num_steps=num_steps,
            reason=reason,
            message=message,
            scores=self._scores(),
            inputs=inputs,
            rounds=int(self.acceptance.rounds),
            request_rounds=int(self.acceptance.request_rounds),
            is_urgent=is_way_down and found is not None and found.mean > max(0.05, P95 * found.sd),
            probe=probe,
            ends_probe=ends_probe,
        )

    def _scores(self) -> tuple[TierScore, ...]:
        """Goodput of every tier; its uncertainty is that of the gain over the present depth."""
        present = self.present or self.best
        return tuple(
            TierScore(
                num_steps=tier.num_steps,
                score=tier.goodput,
                sd=tier.goodput * self.gains.of(tier, present).sd,
            )
            for tier in self.forecast.tiers
        )
