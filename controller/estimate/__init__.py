"""Estimate: from windows of counters to what the evidence says; pure, without clock or thresholds of a policy.

`slots` keeps what was seen at each slot's own depth, `acceptance` what the text is like at every position,
`latency` what rounds cost, `worker` puts them together.
"""

from controller.estimate.latency import Profile, ProfileCell
from controller.estimate.slots import PositionCounts, SlotEvidence
from controller.estimate.worker import Estimator

__all__ = ["Estimator", "PositionCounts", "Profile", "ProfileCell", "SlotEvidence"]
