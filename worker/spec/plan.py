"""The plan table: which depth the next round runs at, who said so, and for how long it holds.

Order of authority: an operator's pin, a live plan (its probe first), the worker's own fallback. Time to live
runs on the caller's monotonic clock from receipt, so no clocks need to agree. Knows nothing about drafters,
batches or HTTP; every method may be called from any thread.
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from worker.protocol import PlanEntry, PlanSource, PlanStatus, SpecPlan, batch_size_bucket


class PlanConflict(Exception):
    """The plan is older than, or contradicts, what the worker holds (409)."""

    def __init__(self, message: str, current: PlanStatus) -> None:
        super().__init__(message)
        self.current = current


class UnknownTier(Exception):
    """The plan names a depth, or a size of trees, without a prebuilt runtime state (422)."""

    def __init__(self, message: str, candidate_steps: Sequence[int]) -> None:
        super().__init__(message)
        self.candidate_steps = list(candidate_steps)


DEAD_BAND_ROUNDS = 16
"""So long a batch size within the dead band must stay until it gets its own entry's depth: it no longer swings then."""

ChangeReason = Literal["plan", "pin", "fallback", "probe"]
CHANGE_REASONS: tuple[ChangeReason, ...] = get_args(ChangeReason)


class DepthCounts(NamedTuple):
    """What moved the depth, cumulative."""

    changes: Mapping[ChangeReason, int]
    """Rounds that were asked for another depth than the round before, by who asked."""
    probes: int
    """Probes of which at least one round was run."""
    probe_rounds: int


class RoundDepth(NamedTuple):
    """The depth of one round and where it came from."""

    num_steps: int
    source: PlanSource
    is_probe: bool = False


class PlanTable:
    """Holds the newest plan; `depth_for_round` is asked exactly once per round."""

    def __init__(
        self,
        *,
        boot_id: str,
        candidate_steps: Sequence[int],
        fallback_num_steps: int,
        num_draft_tokens: Sequence[int] | None = None,
    ) -> None:
        """Start on the fallback; `num_draft_tokens` are the tiers' where they draft trees."""
        self._boot_id = boot_id
        self._candidate_steps = tuple(candidate_steps)
        sizes = num_draft_tokens or [num_steps + 1 for num_steps in candidate_steps]
        self._num_draft_tokens = dict(zip(candidate_steps, sizes, strict=True))
        self._fallback = fallback_num_steps
        self._lock = threading.Lock()
        self._plan: SpecPlan | None = None
        self._received = 0.0
        self._expires = 0.0
        self._pin_expires = 0.0
        self._probe_rounds_left = 0
        self._entry = 0
        self._rounds_off = 0
        """Rounds in a row whose batch size belongs to another entry: the dead band holds them back."""
        self._batch_size = 1
        self._num_steps: int | None = None
        self._changes: Counter[ChangeReason] = Counter()
        self._probes = self._probe_rounds = 0

    def put(self, plan: SpecPlan, now: float) -> PlanStatus:
        """Take a plan, or renew the same one.

        Raises:
            PlanConflict: another boot_id, an older (epoch, version), or the same with other content.
            UnknownTier: a depth that is no tier, or another num_draft_tokens than the tier's.

        In every error case nothing changes.
        """
        with self._lock:
            self._check(plan, now)
            held = self._plan
            is_renewal = held is not None and _order(plan) == _order(held)
            self._plan = plan
            self._received = now
            self._expires = now + plan.ttl_seconds
            self._pin_expires = now + plan.pin.ttl_seconds if plan.pin else 0.0
            if not is_renewal:
                self._probe_rounds_left = plan.probe.rounds if plan.probe else 0
                self._entry = find_entry(plan.entries, self._batch_size)
                self._rounds_off = 0
            return self._status(now)

    def depth_for_round(self, batch_size: int, now: float) -> RoundDepth:
        """Return the depth for a round of `batch_size` decoding rows, counting a probe's round as used."""
        with self._lock:
            self._batch_size = batch_size
            plan = self._plan
            if plan is not None and now < self._expires:
                self._follow(plan, batch_size)
            depth = self._depth(batch_size, now)
            self._count(depth)
            if depth.is_probe:
                self._probe_rounds_left -= 1
            return depth

    def counts(self) -> DepthCounts:
        """Return how often the depth was moved, and by what."""
        with self._lock:
            changes = {reason: self._changes[reason] for reason in CHANGE_REASONS}
            return DepthCounts(changes, self._probes, self._probe_rounds)

    def status(self, now: float) -> PlanStatus:
        """Return what is followed right now; changes nothing."""
        with self._lock:
            return self._status(now)

    def _follow(self, plan: SpecPlan, batch_size: int) -> None:
        """Move to a batch size's entry; within the dead band, once it has stayed there for `DEAD_BAND_ROUNDS`."""
        self._entry = beyond_dead_band(plan.entries, self._entry, batch_size, plan.dead_band)
        own = find_entry(plan.entries, batch_size)
        self._rounds_off = self._rounds_off + 1 if self._entry != own else 0
        if self._rounds_off == DEAD_BAND_ROUNDS:
            self._entry, self._rounds_off = own, 0

    def _count(self, depth: RoundDepth) -> None:
        """Count a round's depth; called before the probe's round is used up."""
        if self._num_steps is not None and depth.num_steps != self._num_steps:
            self._changes["probe" if depth.is_probe else depth.source] += 1
        self._num_steps = depth.num_steps
        if depth.is_probe:
            probe = self._plan.probe if self._plan else None
            self._probes += probe is not None and probe.rounds == self._probe_rounds_left
            self._probe_rounds += 1

    def _check(self, plan: SpecPlan, now: float) -> None:
        if plan.boot_id != self._boot_id:
            raise PlanConflict(
                f"boot_id: this worker is {self._boot_id}, not {plan.boot_id}", self._status(now)
            )
        named = [("entries", entry.num_steps) for entry in plan.entries]
        named += [("probe", plan.probe.num_steps)] if plan.probe else []
        named += [("pin", plan.pin.num_steps)] if plan.pin else []
        for field, num_steps in named:
            if num_steps not in self._candidate_steps:
                tiers = list(self._candidate_steps)
                raise UnknownTier(f"{field}: num_steps {num_steps} is no tier, allowed: {tiers}", tiers)
        for entry in plan.entries:
            fitting = self._num_draft_tokens[entry.num_steps]
            if entry.num_draft_tokens not in (None, fitting):
                raise UnknownTier(
                    f"entries: num_draft_tokens {entry.num_draft_tokens} does not fit num_steps {entry.num_steps}: "
                    f"this worker's trees have {fitting} there",
                    list(self._candidate_steps),
                )
        held = self._plan
        if held is None or _order(plan) > _order(held):
            return
        if _order(plan) < _order(held):
            raise PlanConflict(
                f"version: epoch {plan.controller_epoch} version {plan.version} is older than "
                f"epoch {held.controller_epoch} version {held.version}",
                self._status(now),
            )
        if _content(plan) != _content(held):
            raise PlanConflict(
                f"version: epoch {plan.controller_epoch} version {plan.version} was sent with other content",
                self._status(now),
            )

    def _depth(self, batch_size: int, now: float) -> RoundDepth:
        plan = self._plan
        if plan is not None and plan.pin is not None and now < self._pin_expires:
            return RoundDepth(plan.pin.num_steps, "pin")
        if plan is None or now >= self._expires:
            return RoundDepth(self._fallback, "fallback")
        probe = plan.probe
        in_bucket = probe is not None and probe.max_batch_size in (None, batch_size_bucket(batch_size))
        if probe is not None and in_bucket and self._probe_rounds_left > 0:
            return RoundDepth(probe.num_steps, "plan", is_probe=True)
        return RoundDepth(plan.entries[self._entry].num_steps, "plan")

    def _status(self, now: float) -> PlanStatus:
        depth = self._depth(self._batch_size, now)
        return PlanStatus(
            source=depth.source,
            plan=self._plan,
            age_seconds=max(0.0, now - self._received) if self._plan else None,
            remaining_seconds=max(0.0, self._expires - now) if self._plan else 0.0,
            pin_remaining_seconds=max(0.0, self._pin_expires - now),
            fallback_num_steps=self._fallback,
            num_steps=depth.num_steps,
        )


def _order(plan: SpecPlan) -> tuple[int, int]:
    return plan.controller_epoch, plan.version


def _content(plan: SpecPlan) -> tuple[object, ...]:
    """What must be equal in a renewal: all but the remaining times, which run down on their own."""
    pin = plan.pin.num_steps if plan.pin else None
    return plan.entries, plan.dead_band, plan.probe, pin, plan.reason


def find_entry(entries: Sequence[PlanEntry], batch_size: int) -> int:
    """Index of the first entry whose edge is not below the batch size; the last one beyond all edges."""
    for index, entry in enumerate(entries):
        if batch_size <= entry.max_batch_size:
            return index
    return len(entries) - 1


def beyond_dead_band(entries: Sequence[PlanEntry], current: int, batch_size: int, dead_band: float) -> int:
    """Return the entry of `batch_size`, or the current one if it is within the dead band of the edge just crossed.

    A batch size that swings around an edge would otherwise flip the depth each time (vLLM 49986). The band is
    clamped so that the far end of every entry is always reached: at small sizes it is worth one row at most.
    """
    target = find_entry(entries, batch_size)
    if target > current + 1 or target < current - 1:
        return target
    if target > current:
        edge = entries[target - 1].max_batch_size
        reach = min(math.floor(edge * (1 + dead_band)), entries[target].max_batch_size - 1)
        return target if batch_size > reach else current
    if target < current:
        edge = entries[target].max_batch_size
        lowest = entries[target - 1].max_batch_size + 1 if target else 1
        reach = max(math.floor(edge * (1 - dead_band)), lowest)
        return target if batch_size <= reach else current
    return current
