"""The requests of a simulated worker: how long they are, and which drafts would be correct for them.

A request's text does not depend on the depth (lossless decoding): its length, the mood of each stretch of it and
whether a draft at a place of it is correct come from the request's own number. So all policies meet the same texts,
and differences between them are not differences in luck.
"""

import math
import random
from collections.abc import Callable, Sequence

from controller.simulate.recorded import RecordedStream, load_streams
from controller.simulate.scenario import MAX_NUM_STEPS, KindConfig, PhaseConfig, Scenario, WalkConfig

ENDLESS = 1 << 60
MOODS = 15
"""Grid of the latent shift, -3 to 3 standard deviations."""


class Row:
    """One running request."""

    __slots__ = (
        "draws",
        "hazards",
        "kind",
        "mood_left",
        "moods",
        "place",
        "propose",
        "recorded",
        "remaining",
        "rng",
    )

    def __init__(
        self, kind: int, propose: float, remaining: int, rng: random.Random, moods: random.Random
    ) -> None:
        self.kind = kind
        self.propose = propose
        self.remaining = remaining
        self.mood_left = 0
        self.hazards: Sequence[float] = ()
        self.recorded: RecordedStream | None = None
        self.rng = rng
        self.moods = moods
        self.draws: list[float] = []
        """A draw per place of the text: the draft there is correct if it is below the acceptance."""
        self.place = 0
        """Where in `draws` the next token is."""

    def proposes(self) -> bool:
        """Whether the drafter has something to propose at this place."""
        return self.propose >= 1.0 or self.draws[self.place] * 7919 % 1 < self.propose

    def look_ahead(self, num_steps: int) -> None:
        """Have the draws of the next places ready."""
        missing = self.place + num_steps + 1 - len(self.draws)
        if missing > 0:
            if self.place > 512:
                del self.draws[: self.place]
                self.place = 0
            draw = self.rng.random
            self.draws += [draw() for _ in range(max(missing, 32))]


class Traffic:
    """The requests of one phase, as many as the phase wants at its present progress."""

    def __init__(self, phase: PhaseConfig, scenario: Scenario, seed: str) -> None:
        self._phase = phase
        self._seed = seed
        self._kinds = list(phase.kinds)
        self._curves = [_curves(kind, phase.dispersion) for kind in self._kinds]
        self._streams = load_streams(scenario.directory / phase.recorded) if phase.recorded else []
        self._next = 0
        self._dealt = [0.0] * len(self._kinds)
        self.rows: list[Row] = []
        self.size_at = _sizes(phase, seed)

    def fill(self, size: int) -> int:
        """Let requests join (or take the newest away) until `size` run; return how many joined."""
        joined = 0
        while len(self.rows) < size:
            self.rows.append(self.next_request())
            joined += 1
        del self.rows[size:]
        return joined

    def settle_mood(self, row: Row) -> None:
        """Draw the mood of a row's next stretch."""
        curves = self._curves[row.kind]
        shift = max(-3.0, min(3.0, row.moods.gauss(0, 1)))
        row.hazards = curves[round((shift + 3) / 6 * (len(curves) - 1))]
        row.mood_left = self._phase.dispersion_tokens if len(curves) > 1 else ENDLESS

    def next_request(self) -> Row:
        """Return the request that comes next."""
        rng = random.Random(f"{self._seed} request {self._next}")
        self._next += 1
        kind = self._deal()
        phase = self._phase
        remaining = rng.randint(*phase.request_tokens) if phase.request_tokens else ENDLESS
        row = Row(kind, self._kinds[kind].propose, remaining, rng, random.Random(rng.random()))
        if self._streams:
            row.recorded = RecordedStream(self._streams[(self._next - 1) % len(self._streams)], rng)
        self.settle_mood(row)
        return row

    def _deal(self) -> int:
        """Kinds take turns by share, so that a few requests are mixed as the whole is."""
        for index, kind in enumerate(self._kinds):
            self._dealt[index] += kind.share
        chosen = max(range(len(self._kinds)), key=lambda i: self._dealt[i])
        self._dealt[chosen] -= sum(kind.share for kind in self._kinds)
        return chosen


def _curves(kind: KindConfig, dispersion: float) -> list[list[float]]:
    """The acceptance curve at every mood of the grid; the mean over moods is close to the curve itself."""
    base = [kind.acceptance[min(i, len(kind.acceptance) - 1)] for i in range(MAX_NUM_STEPS)]
    if dispersion == 0:
        return [base]
    moods = [6 * i / (MOODS - 1) - 3 for i in range(MOODS)]
    return [[_shifted(p, dispersion * mood) for p in base] for mood in moods]


def _shifted(probability: float, shift: float) -> float:
    if probability in (0.0, 1.0):
        return probability
    odds = probability / (1 - probability) * math.exp(shift)
    return odds / (1 + odds)


def _sizes(phase: PhaseConfig, seed: str) -> Callable[[float, int], int]:
    """Return the batch size as a function of the phase's progress (0…1) and its tokens so far."""
    size = phase.batch_size
    if isinstance(size, int):
        return lambda progress, tokens: size
    if isinstance(size, WalkConfig):
        walk = size

        def drawn(progress: float, tokens: int) -> int:
            stretch = tokens // walk.every_tokens
            if stretch not in known:
                known[stretch] = random.Random(f"{seed} walk {stretch}").randint(walk.low, walk.high)
            return known[stretch]

        known: dict[int, int] = {}
        return drawn
    sizes = size
    return lambda progress, tokens: sizes[min(int(progress * len(sizes)), len(sizes) - 1)]
