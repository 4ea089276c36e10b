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
from functools import reduce
from itertools import accumulate

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
LEAST, MOST = 1e-3, 1 - 1e-3
"""Bounds of every probability."""


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

    def plus(self, other: "Counts") -> "Counts":
        """Return both kinds of evidence together."""
        both = Counts(self.reached, self.correct, self.rounds, self.request_rounds)
        both.add(other)
        return both


@dataclass(frozen=True)
class Lean:
    """What thin positions lean on: all of it follows from the shape, so it is worked out once for many counts."""

    first: float
    """Long-run rate of the first position."""
    steps: Sequence[tuple[float, float] | None]
    """Per position: its step in log-odds from the one before, and how far that is trusted; None: not learned."""


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
        rates = self._rates(counts, self._lean())
        return AcceptanceEstimate(
            hazards=tuple(Hazard(probability=p, variance=variance) for p, variance in rates),
            proposed=self._proposed_shares(),
            rounds=counts.rounds,
            request_rounds=counts.request_rounds,
            end_rate=self._lost / (self._exposed + 1.0),
            surprise=self._surprise,
            has_changed=self._odds > 1,
        )

    # ---- what is known ----

    def _all(self) -> Counts:
        return reduce(Counts.plus, self._recent, self._old)

    def _rates(self, counts: Counts, lean: Lean) -> list[tuple[float, float]]:
        """P(draft correct | drafts before it correct) of every position by these counts, and its variance."""
        found: list[tuple[float, float]] = []
        p, prior = lean.first, FIRST_PRIOR
        for n, s, step in zip(counts.reached, counts.correct, lean.steps, strict=True):
            q = _following(p, step) if found else p
            p = (s + prior * q) / (n + prior)
            p = LEAST if p < LEAST else MOST if p > MOST else p
            found.append((p, self._dispersion * p * (1 - p) / (n + prior + 1)))
            prior = PRIOR
        return found

    def _lean(self) -> Lean:
        reached, correct = self._shape.reached, self._shape.correct
        if not reached:
            return Lean(0.5, ())
        first = (correct[0] + 0.5 * FIRST_PRIOR) / (reached[0] + FIRST_PRIOR)
        odds = [_log_odds((s + 1) / (n + 2)) for n, s in zip(reached, correct, strict=True)]
        steps: list[tuple[float, float] | None] = [None]
        for position in range(1, self._width):
            n = reached[position]
            is_learned = n > 0 and reached[position - 1] > 0
            step = odds[position] - odds[position - 1], n / (n + SHAPE_PRIOR)
            steps.append(step if is_learned else None)
        return Lean(first, steps)

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
        rates = self._rates(self._all(), self._lean())
        for cell in cells:
            survival, depth_sum = 1.0, 0.0
            for position in range(min(cell.num_steps, self._width)):
                survival *= rates[position][0]
                depth_sum += (position + 1) * survival
            self._lost += max(0, cell.accept_tokens - cell.emitted_tokens)
            self._exposed += cell.request_rounds * depth_sum

    def _look_for_change(self) -> None:
        """Test the newest 1, 2, … windows against all before; at a change forget what came before it."""
        worst, split, surprise = 0.0, 0, 0.0
        lean = self._lean()
        before = list(accumulate(self._recent, Counts.plus, initial=self._old))
        newest = Counts.empty(self._width)
        for count in range(1, len(self._recent)):
            newest.add(self._recent[-count])
            z = self._residual(newest, before[len(self._recent) - count], lean)
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

    def _residual(self, newest: Counts, base: Counts, lean: Lean) -> float:
        """How far the drafts correct in the newest windows are from what was expected before, in standard deviations.

        The signed root of the likelihood ratio of the pooled counts: unlike a z-score it is right for few drafts and
        for rates near 0 and 1, where a single draft can say a lot.
        """
        total = correct = expected = uncertainty = 0.0
        rates = self._rates(base, lean)
        for n, s, (p, variance) in zip(newest.reached, newest.correct, rates, strict=True):
            if n <= 0:
                continue
            total += n
            correct += s
            expected += n * p
            uncertainty += n * n * variance
        if total <= 0 or base.reached[0] < 1:
            return 0.0
        rate, mean = correct / total, expected / total
        spread = mean * (1 - mean)
        effective = 1 / (self._dispersion / total + uncertainty / total**2 / spread)
        divergence = _entropy(rate, mean) + _entropy(1 - rate, 1 - mean)
        return math.copysign(math.sqrt(2 * effective * max(divergence, 0.0)), rate - mean)


def _following(before: float, step: tuple[float, float] | None) -> float:
    """q_i: what p_i would be, judging by p_{i-1} and the shape that the text has had."""
    plain = RATIO * before
    if step is None:
        return plain
    learned = 1 / (1 + math.exp(-(_log_odds(before) + step[0])))
    return step[1] * learned + (1 - step[1]) * plain


def _entropy(rate: float, mean: float) -> float:
    return rate * math.log(rate / mean) if rate > 0 else 0.0


def _log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))
