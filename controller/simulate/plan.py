"""The worker's side of a plan, as the simulated worker follows it: entries, dead band, time to live, probe.

The same rules as the worker's own plan table, written again because the controller may not import it (and without
locks and refusals, which a simulation does not need); a property test holds the two against each other.
"""

import bisect
import math

from worker.protocol import SpecPlan, batch_size_bucket

DEAD_BAND_ROUNDS = 16
"""See the worker's."""


class SimulatedPlan:
    """Which depth the next round runs at."""

    def __init__(self, fallback_num_steps: int) -> None:
        self.plan: SpecPlan | None = None
        self.fallback_num_steps = fallback_num_steps
        self.expires = 0.0
        self._edges: list[int] = []
        self._depths: list[int] = []
        self._entry = 0
        self._rounds_off = 0
        self._batch_size = 1
        self._probe_rounds_left = 0
        self._probe_bucket: int | None = None

    def put(self, plan: SpecPlan, now: float) -> None:
        """Take a plan, or renew the one held (same version)."""
        is_renewal = self.plan is not None and plan.version == self.plan.version
        self.plan, self.expires = plan, now + plan.ttl_seconds
        if is_renewal:
            return
        self._edges = [entry.max_batch_size for entry in plan.entries]
        self._depths = [entry.num_steps for entry in plan.entries]
        self._entry = self._find(self._batch_size)
        self._rounds_off = 0
        self._probe_rounds_left = plan.probe.rounds if plan.probe else 0
        self._probe_bucket = plan.probe.max_batch_size if plan.probe else None

    def depth_for_round(self, batch_size: int, now: float) -> tuple[int, bool]:
        """Return the depth of a round of `batch_size` rows, and whether it is a probe's."""
        self._batch_size = batch_size
        if self.plan is None or now >= self.expires:
            return self.fallback_num_steps, False
        self._entry = self._follow(batch_size)
        own = self._find(batch_size)
        self._rounds_off = self._rounds_off + 1 if self._entry != own else 0
        if self._rounds_off == DEAD_BAND_ROUNDS:
            self._entry, self._rounds_off = own, 0
        if self._probe_rounds_left > 0 and self._probe_bucket in (None, batch_size_bucket(batch_size)):
            assert self.plan.probe is not None
            self._probe_rounds_left -= 1
            return self.plan.probe.num_steps, True
        return self._depths[self._entry], False

    def _find(self, batch_size: int) -> int:
        return min(bisect.bisect_left(self._edges, batch_size), len(self._edges) - 1)

    def _follow(self, batch_size: int) -> int:
        """Move to the entry of a batch size, unless it is within the dead band of the edge just crossed."""
        target, current, edges = self._find(batch_size), self._entry, self._edges
        assert self.plan is not None
        band = self.plan.dead_band
        if target == current + 1:
            edge = edges[current]
            reach = min(math.floor(edge * (1 + band)), edges[target] - 1)
            return target if batch_size > reach else current
        if target == current - 1:
            lowest = edges[target - 1] + 1 if target else 1
            reach = max(math.floor(edges[target] * (1 - band)), lowest)
            return target if batch_size <= reach else current
        return target
