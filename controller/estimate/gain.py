"""Gain: how much more goodput one depth brings than another, in logarithms, and how sure that is.

G = ln E(k2) - ln E(k1) + ln t(k1) - ln t(k2). Positions that both depths use cancel in part: a way down is certified
quickly, a way up carries what is not known about the further positions.
(d ln E(k) / d p_i = Σ_{j=i..k} S_j / (p_i E(k)).)
"""

import math
from dataclasses import dataclass
from itertools import zip_longest

from controller.types import AcceptanceEstimate, TierForecast


@dataclass(frozen=True)
class Gain:
    """ln(goodput of the one / goodput of the other)."""

    mean: float
    sd: float
    """From the acceptance: it changes with the text, and with it the sign of small gains."""
    cost_sd: float
    """From the round seconds: it stays until the depth is tried, and is gone then."""


class Gains:
    """The gains between depths under one estimate of the acceptance.

    What depends on depths alone is the same in every slot, so it is worked out once.
    """

    def __init__(self, acceptance: AcceptanceEstimate) -> None:
        self._hazards = acceptance.hazards
        self._slopes: dict[int, list[float]] = {}
        self._sds: dict[tuple[int, int], float] = {}

    def of(self, to: TierForecast, over: TierForecast) -> Gain:
        """Return what `to` gains over `over`."""
        if to.num_steps == over.num_steps:
            return Gain(0.0, 0.0, 0.0)
        depths = to.num_steps, over.num_steps
        sd = self._sds.get(depths)
        if sd is None:
            sd = self._sds[depths] = self._sd(*depths)
        cost_sd = math.sqrt(to.round_variance + over.round_variance)
        return Gain(math.log(to.goodput / over.goodput), sd, cost_sd)

    def _sd(self, to: int, over: int) -> float:
        variance = 0.0
        slopes = zip_longest(self._slopes_at(to), self._slopes_at(over), fillvalue=0.0)
        for hazard, (slope_to, slope_over) in zip(self._hazards, slopes, strict=False):
            slope = slope_to - slope_over
            variance += slope * slope * hazard.variance
        return math.sqrt(variance)

    def _slopes_at(self, num_steps: int) -> list[float]:
        """Return d ln E(k) / d p_i for the positions of a depth."""
        slopes = self._slopes.get(num_steps)
        if slopes is not None:
            return slopes
        survivals = []
        survival = 1.0
        for hazard in self._hazards[:num_steps]:
            survival *= hazard.probability
            survivals.append(survival)
        expected = 1.0 + sum(survivals)
        slopes = self._slopes[num_steps] = [0.0] * num_steps
        tail = 0.0
        for position in range(num_steps - 1, -1, -1):
            tail += survivals[position]
            slopes[position] = tail / (self._hazards[position].probability * expected)
        return slopes
