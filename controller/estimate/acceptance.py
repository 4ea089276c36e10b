"""Acceptance: how likely a draft is correct at each position, whatever depths it was seen at.

Hazards with right-censoring (Kaplan-Meier): p_i = correct_i / reached_i with each position's own denominators. A
round at depth k tells of all positions up to k and nothing beyond; a cut draft tells nothing past the cut. Thin
positions lean on the one before them, p_i = (correct_i + m q_i) / (reached_i + m), through a shape that is learned
slowly: how much likelier (in log-odds) a draft at i is than one at i - 1.

Evidence fades with time, also while idle: old text says little about new text. A change of the text shows in the
newest windows being unlikely under what was expected; what came before is then kept only as far as there may have
been none. Rows of one round and rounds of one request are alike, so counts are worth less than their number:
variances grow by a dispersion that is estimated from the residuals.

Pure. Knows nothing about time costs and depths to choose.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from controller.types import AcceptanceEstimate, CellDelta, Hazard

HALF_LIFE_SECONDS = 6.0
SHAPE_HALF_LIFE_SECONDS = 120.0
PRIOR = 12.0
"""m: request-rounds that a position's lean on the one before is worth."""
FIRST_PRIOR = 4.0
"""The same for the first position, which leans on the long-run rate."""
SHAPE_PRIOR = 40.0
RATIO = 0.99
"""Without a learned shape: q_i = RATIO p_{i-1}."""
WINDOWS = 6
"""Windows within which the beginning of a change is looked for."""
CHANGE_ODDS = 0.02
"""Odds of a change within a window, before anything is seen of it."""
MAX_DISPERSION = 2.5


@dataclass
class Counts:
    """Weighted `reached` and `correct` per position, and rounds."""

    reached: list[float]
    correct: list[float]
    rounds: float = 0.0
    request_rounds: float = 0.0

    @staticmethod
    def empty(width: int) -> "Counts":
        """No evidence."""
        return Counts([0.0] * width, [0.0] * width)

    def scale(self, factor: float) -> None:
        """Let all of it fade."""
        self.reached = [factor * n for n in self.reached]
        self.correct = [factor * s for s in self.correct]
        self.rounds *= factor
        self.request_rounds *= factor

    def add(self, other: "Counts") -> None:
        """Take other evidence in."""
        self.reached = [a + b for a, b in zip(self.reached, other.reached, strict=True)]
        self.correct = [a + b for a, b in zip(self.correct, other.correct, strict=True)]
        self.rounds += other.rounds
        self.request_rounds += other.request_rounds


class Acceptance:
    """The evidence of one worker."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._old = Counts.empty(width)
        self._recent: deque[Counts] = deque()
        self._shape = Counts.empty(width)
        self._proposed = [0.0] * width
        self._asked = [0.0] * width
        self._lost = 0.0
        self._exposed = 0.0
        self._dispersion = 1.5
        self._surprise = 0.0
        self._odds = 0.0

    def add(self, cells: Sequence[CellDelta], span_seconds: float) -> None:
        """Take a window in; an empty one lets the evidence fade."""
        self._fade(span_seconds)
        window = self._counts(cells)
        self._odds = 0.0
        if not window.rounds:
            self._surprise = 0.0
        if not window.reached or window.reached[0] <= 0:
            self._old.rounds += window.rounds
            self._old.request_rounds += window.request_rounds
            return
        self._recent.append(window)
        self._look_for_change()
        while len(self._recent) > WINDOWS:
            self._old.add(self._recent.popleft())
        self._shape.add(window)
        self._count_ends(cells)

    def estimate(self) -> AcceptanceEstimate:
        """Return what is known now."""
        counts = self._all()
        return AcceptanceEstimate(
            hazards=self._hazards(counts),
            proposed=self._proposed_shares(),
            rounds=counts.rounds,
            request_rounds=counts.request_rounds,
            end_rate=self._lost / (self._exposed + 1.0),
            surprise=self._surprise,
            has_changed=self._odds > 1,
        )

    # ---- what is known ----

    def _all(self) -> Counts:
        counts = Counts.empty(self._width)
        counts.add(self._old)
        for window in self._recent:
            counts.add(window)
        return counts

    def _hazards(self, counts: Counts) -> tuple[Hazard, ...]:
        found: list[Hazard] = []
        shape = self._shape
        before = (
            (shape.correct[0] + 0.5 * FIRST_PRIOR) / (shape.reached[0] + FIRST_PRIOR) if self._width else 0.5
        )
        for position in range(self._width):
            lean = FIRST_PRIOR if position == 0 else PRIOR
            q = before if position == 0 else self._following(position, before)
            n, s = counts.reached[position], counts.correct[position]
            p = min(max((s + lean * q) / (n + lean), 1e-3), 1 - 1e-3)
            variance = self._dispersion * p * (1 - p) / (n + lean + 1)
            found.append(Hazard(probability=p, variance=variance))
            before = p
        return tuple(found)

    def _following(self, position: int, before: float) -> float:
        """q_i: what p_i would be, judging by p_{i-1} and the shape that the text has had."""
        shape = self._shape
        n, s = shape.reached[position], shape.correct[position]
        n0, s0 = shape.reached[position - 1], shape.correct[position - 1]
        plain = RATIO * before
        if n <= 0 or n0 <= 0:
            return plain
        step = _log_odds((s + 1) / (n + 2)) - _log_odds((s0 + 1) / (n0 + 2))
        learned = 1 / (1 + math.exp(-(_log_odds(before) + step)))
        share = n / (n + SHAPE_PRIOR)
        return share * learned + (1 - share) * plain

    def _proposed_shares(self) -> tuple[float, ...]:
        """Positions never asked for are taken to be as the last one that was."""
        shares: list[float] = []
        for proposed, asked in zip(self._proposed, self._asked, strict=True):
            last = shares[-1] if shares else 1.0
            shares.append((proposed + 2 * last) / (asked + 2))
        return tuple(shares)

    # ---- taking in ----

    def _fade(self, span_seconds: float) -> None:
        keep = 0.5 ** (span_seconds / HALF_LIFE_SECONDS)
        self._old.scale(keep)
        for window in self._recent:
            window.scale(keep)
        self._proposed = [keep * x for x in self._proposed]
        self._asked = [keep * x for x in self._asked]
        self._lost *= keep
        self._exposed *= keep
        self._shape.scale(0.5 ** (span_seconds / SHAPE_HALF_LIFE_SECONDS))

    def _counts(self, cells: Sequence[CellDelta]) -> Counts:
        window = Counts.empty(self._width)
        for cell in cells:
            window.rounds += cell.rounds
            window.request_rounds += cell.request_rounds
            for position in range(min(cell.num_steps, self._width)):
                window.reached[position] += cell.reached[position]
                window.correct[position] += cell.correct[position]
                if cell.proposed:
                    self._asked[position] += cell.request_rounds
                    self._proposed[position] += cell.proposed[position]
        return window

    def _count_ends(self, cells: Sequence[CellDelta]) -> None:
        """Learn how often text ends: tokens lost behind an end, by how many there were to lose.

        With e the chance that a token is the last, a round loses Σ S_i (1 - (1 - e)^i), about e Σ i S_i.
        """
        hazards = self._hazards(self._all())
        for cell in cells:
            survival, depth_sum = 1.0, 0.0
            for position in range(min(cell.num_steps, self._width)):
                survival *= hazards[position].probability
                depth_sum += (position + 1) * survival
            self._lost += max(0, cell.accept_tokens - cell.emitted_tokens)
            self._exposed += cell.request_rounds * depth_sum

    def _look_for_change(self) -> None:
        """Test the newest 1, 2, … windows against all before; at a change forget what came before it."""
        worst, split, surprise = 0.0, 0, 0.0
        newest = Counts.empty(self._width)
        for count in range(1, len(self._recent)):
            newest.add(self._recent[-count])
            z = self._residual(newest, count)
            if count == 1:
                # Residuals of single windows tell how much more counts vary than independent drafts would.
                keep = 0.97
                self._dispersion *= keep + (1 - keep) * min(z * z, 4.0)
                self._dispersion = min(max(self._dispersion, 1.0), MAX_DISPERSION)
            if abs(z) > worst:
                worst, split, surprise = abs(z), count, z
        self._surprise = surprise
        self._odds = CHANGE_ODDS * math.exp(min(worst * worst / 2, 50.0))
        keep = 1 / (1 + self._odds)
        self._old.scale(keep)
        for window in list(self._recent)[: len(self._recent) - split]:
            window.scale(keep)
        self._proposed = [keep * x for x in self._proposed]
        self._asked = [keep * x for x in self._asked]

    def _residual(self, newest: Counts, count: int) -> float:
        """How far the drafts correct in the newest windows are from what was expected, in standard deviations.

        The signed root of the likelihood ratio of the pooled counts: unlike a z-score it is right for few drafts and
        for rates near 0 and 1, where a single draft can say a lot.
        """
        base = Counts.empty(self._width)
        base.add(self._old)
        for window in list(self._recent)[: len(self._recent) - count]:
            base.add(window)
        total = correct = expected = uncertainty = 0.0
        for position, hazard in enumerate(self._hazards(base)):
            n, p = newest.reached[position], hazard.probability
            if n <= 0:
                continue
            total += n
            correct += newest.correct[position]
            expected += n * p
            uncertainty += n * n * hazard.variance
        if total <= 0 or base.reached[0] < 1:
            return 0.0
        rate, mean = correct / total, expected / total
        spread = mean * (1 - mean)
        effective = 1 / (self._dispersion / total + uncertainty / total**2 / spread)
        divergence = _entropy(rate, mean) + _entropy(1 - rate, 1 - mean)
        return math.copysign(math.sqrt(2 * effective * max(divergence, 0.0)), rate - mean)


def _entropy(rate: float, mean: float) -> float:
    return rate * math.log(rate / mean) if rate > 0 else 0.0


def _log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))
