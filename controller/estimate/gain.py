"""Gain: how much more goodput one depth brings than another, in logarithms, and how sure that is.

G = ln E(k2) - ln E(k1) + ln t(k1) - ln t(k2). Positions that both depths use cancel in part: a way down is certified
quickly, a way up carries what is not known about the further positions.
(d ln E(k) / d p_i = Σ_{j=i..k} S_j / (p_i E(k)).)
"""

import math
from dataclasses import dataclass

from controller.types import AcceptanceEstimate, TierForecast


@dataclass(frozen=True)
class Gain:
    """ln(goodput of the one / goodput of the other)."""

    mean: float
    sd: float
    """From the acceptance: it changes with the text, and with it the sign of small gains."""
    cost_sd: float
    """From the round seconds: it stays until the depth is tried, and is gone then."""


def gain(acceptance: AcceptanceEstimate, to: TierForecast, over: TierForecast) -> Gain:
    """Return what `to` gains over `over`."""
    if to.num_steps == over.num_steps:
        return Gain(0.0, 0.0, 0.0)
    slopes_to = _slopes(acceptance, to.num_steps)
    slopes_over = _slopes(acceptance, over.num_steps)
    variance = 0.0
    for position in range(max(to.num_steps, over.num_steps)):
        slope = slopes_to[position] if position < to.num_steps else 0.0
        slope -= slopes_over[position] if position < over.num_steps else 0.0
        variance += slope * slope * acceptance.hazards[position].variance
    cost_sd = math.sqrt(to.round_variance + over.round_variance)
    return Gain(math.log(to.goodput / over.goodput), math.sqrt(variance), cost_sd)


def _slopes(acceptance: AcceptanceEstimate, num_steps: int) -> list[float]:
    """Return d ln E(k) / d p_i for the positions of a depth."""
    survivals = []
    survival = 1.0
    for hazard in acceptance.hazards[:num_steps]:
        survival *= hazard.probability
        survivals.append(survival)
    expected = 1.0 + sum(survivals)
    slopes = [0.0] * num_steps
    tail = 0.0
    for position in range(num_steps - 1, -1, -1):
        tail += survivals[position]
        slopes[position] = tail / (acceptance.hazards[position].probability * expected)
    return slopes
