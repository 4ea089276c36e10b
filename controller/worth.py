"""What speculation is worth right now: the depths in force against plain decoding, by the estimates.

Pure. For people and alerts only; no decision rests on it.
"""

from controller.shadow import estimated_gain
from controller.types import Depths, Estimate


def gain_over_plain(estimate: Estimate, depths: Depths) -> float | None:
    """Return the relative gain in tokens per second over depth 0, on the batch sizes of late (-0.1: 10 % slower).

    None while round seconds are not known, before the first rounds, or at a depth that is no candidate of its slot.
    """
    worth, shares = 0.0, 0.0
    for slot, num_steps in depths.items():
        forecast = estimate.forecasts.get(slot)
        if forecast is None or forecast.share <= 0:
            continue
        gain = estimated_gain(estimate, slot, 0, num_steps)
        if gain is None:
            return None
        worth += forecast.share * gain
        shares += forecast.share
    return worth / shares if shares > 0 else None
