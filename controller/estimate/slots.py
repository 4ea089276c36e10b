"""What was seen at each slot's own depth, since that depth was decided.

One moving average per slot of the correct drafts per request-round, built from per-position counts with their
own denominators, so that drafts cut short (budget, EOS) say nothing about what they did not reach. Only rounds
that *executed* the depth decided for the slot count; an idle worker changes nothing here.

Pure. Knows no thresholds and no clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from controller.types import (
    CellDelta,
    ProbeEvidence,
    ProbeRequest,
    Slot,
    SlotEstimate,
    TierScore,
)

MIN_WEIGHT = 0.5
"""Decayed observations below which a position counts as unknown."""


class PositionCounts:
    """Exponentially decayed `reached` and `correct` per position; survival and its mean come from them.

    After n request-rounds the old weight is (1 - alpha)^n, whatever the length of the windows they came in, and
    the total weight saturates at 1/alpha request-rounds.
    """

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._reached: list[float] = []
        self._correct: list[float] = []
        self._weight = 0.0

    def add(self, cell: CellDelta) -> None:
        """Take a window's counts in."""
        if cell.request_rounds <= 0:
            return
        keep = (1 - self._alpha) ** cell.request_rounds
        gain = (1 - keep) / (self._alpha * cell.request_rounds)
        grow = max(0, cell.num_steps - len(self._reached))
        self._reached += [0.0] * grow
        self._correct += [0.0] * grow
        for index in range(len(self._reached)):
            fresh = index < cell.num_steps
            self._reached[index] = keep * self._reached[index] + gain * (cell.reached[index] if fresh else 0)
            self._correct[index] = keep * self._correct[index] + gain * (cell.correct[index] if fresh else 0)
        self._weight = keep * self._weight + gain * cell.request_rounds

    def acceptance(self, num_steps: int) -> tuple[float | None, ...]:
        """P(draft i correct | drafts before it correct) for the first `num_steps` positions; None: unknown."""
        known = min(num_steps, len(self._reached))
        rates = [
            self._correct[i] / self._reached[i] if self._reached[i] >= MIN_WEIGHT else None
            for i in range(known)
        ]
        return tuple(rates + [None] * (num_steps - known))

    def mean_correct(self, num_steps: int) -> tuple[float, float] | None:
        """Expected correct drafts per request-round at a depth, and its standard error; None: unknown."""
        return self.means_correct(num_steps)[num_steps]

    def means_correct(self, num_steps: int) -> list[tuple[float, float] | None]:
        """Expected correct drafts per request-round at every depth up to one, and their standard errors.

        The sum of survivals over the positions up to the first unknown one, hence a lower bound there; None
        when not even the first position is known. Depth 0 yields exactly 0 and needs no evidence.
        """
        means: list[tuple[float, float] | None] = [(0.0, 0.0)]
        survival, mean, second_moment = 1.0, 0.0, 0.0
        for index, (reached, correct) in enumerate(
            zip(self._reached[:num_steps], self._correct, strict=False)
        ):
            if reached < MIN_WEIGHT:
                break
            survival *= correct / reached
            mean += survival
            second_moment += (2 * index + 1) * survival  # E[x^2] = sum of (2i - 1) P(x >= i)
            variance = max(0.0, second_moment - mean * mean)
            means.append((mean, math.sqrt(variance / max(self._weight, 1.0))))
        beyond = means[-1] if len(means) > 1 else None
        return means + [beyond] * (num_steps + 1 - len(means))


@dataclass
class _Probing:
    request: ProbeRequest
    rounds: int = 0
    request_rounds: int = 0
    waited_rounds: int = 0


class SlotEvidence:
    """All evidence of one slot. `depth` is what is decided for it; changing it restarts the sample counts."""

    def __init__(self, slot: Slot, depth: int, alpha: float) -> None:
        self.slot = slot
        self.depth = depth
        self._alpha = alpha
        self._counts = PositionCounts(alpha)
        self._rounds = 0
        self._request_rounds = 0
        self._by_bucket: dict[int, float] = {}
        self._probing: _Probing | None = None
        self._probe_counts = PositionCounts(alpha)

    def decide(self, depth: int) -> None:
        """Follow a new depth. Leaving 0 starts from the probe's counts, entering it drops what was known."""
        if depth == self.depth:
            return
        if self.depth == 0:
            self._counts = self._probe_counts
            self._probe_counts = PositionCounts(self._alpha)
        elif depth == 0:
            self._counts.clear()
        self.depth = depth
        self._rounds = self._request_rounds = 0

    def begin_probe(self, request: ProbeRequest | None) -> None:
        """Start to collect for a probe; None ends it. The probe that is in flight already goes on."""
        if request is not None and (self._probing is None or self._probing.request != request):
            self._probing = _Probing(request)
            self._probe_counts.clear()
        elif request is None:
            self._probing = None

    def add(self, cell: CellDelta) -> None:
        """Take in one cell of the slot, if it was executed at the decided depth or at the probe's."""
        share = self._by_bucket.get(cell.max_batch_size, 0.0)
        self._by_bucket = {bucket: 0.8 * rounds for bucket, rounds in self._by_bucket.items()}
        self._by_bucket[cell.max_batch_size] = 0.8 * share + cell.rounds
        if cell.num_steps == self.depth:
            self._rounds += cell.rounds
            self._request_rounds += cell.request_rounds
            self._counts.add(cell)
        probing = self._probing
        if probing is None:
            return
        if (
            cell.num_steps == probing.request.num_steps
            and cell.max_batch_size == probing.request.max_batch_size
        ):
            probing.rounds += cell.rounds
            probing.request_rounds += cell.request_rounds
            self._probe_counts.add(cell)
        else:
            probing.waited_rounds += cell.rounds

    def wait(self, rounds: int) -> None:
        """Rounds of another slot passed: a probe in flight may be waiting for a batch size that is gone."""
        if self._probing is not None:
            self._probing.waited_rounds += rounds

    def estimate(self) -> SlotEstimate:
        """Return what is known now."""
        means = self._counts.means_correct(self.depth)
        at_depth = means[self.depth]
        scores = tuple(self._score(tier, means) for tier in self.slot.candidate_steps)
        return SlotEstimate(
            slot=self.slot,
            num_steps=self.depth,
            rounds=self._rounds,
            request_rounds=self._request_rounds,
            mean_correct=at_depth[0] if at_depth else None,
            sd=at_depth[1] if at_depth else None,
            position_acceptance=self._counts.acceptance(self.depth),
            scores=scores,
            busiest_bucket=max(self._by_bucket, key=lambda b: self._by_bucket[b], default=None),
            probe=self._probe_evidence(),
        )

    def _score(self, tier: int, means: Sequence[tuple[float, float] | None]) -> TierScore:
        found = means[tier] if tier <= self.depth else None
        if found is None and self._probing is not None and tier == self._probing.request.num_steps:
            found = self._probe_counts.mean_correct(tier)
        return TierScore(num_steps=tier, score=found[0] if found else None, sd=found[1] if found else None)

    def _probe_evidence(self) -> ProbeEvidence | None:
        if self._probing is None:
            return None
        found = self._probe_counts.mean_correct(self._probing.request.num_steps)
        return ProbeEvidence(
            request=self._probing.request,
            rounds=self._probing.rounds,
            request_rounds=self._probing.request_rounds,
            waited_rounds=self._probing.waited_rounds,
            mean_correct=found[0] if found else 0.0,
        )
