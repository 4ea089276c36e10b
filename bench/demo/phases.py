"""What the sample traffic is: phases that differ in nature, their texts and their order.

Knows nothing about processes, HTTP or the clock; the texts lie in `bench/texts`.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TEXTS = Path(__file__).resolve().parents[1] / "texts"
PHASE_SECONDS = 20.0
"""Length of a phase when the demo has no end."""
SHORTEST_PHASE_SECONDS = 15.0
"""A second rotation is worth having only if its phases last at least this long."""
MINIMUM_SECONDS = 15
"""Shortest demo: three phases in less would show nothing but their beginnings."""


@dataclass(frozen=True)
class Kind:
    """A nature of traffic: where its texts are and how they are sampled."""

    name: str
    temperature: float
    max_tokens: int

    def prompts(self) -> list[str]:
        """Return the texts in their fixed order."""
        lines = (TEXTS / f"{self.name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["text"] for line in lines]


PREDICTABLE = Kind("predictable", temperature=0.0, max_tokens=256)
"""Lists, tables and code to repeat with small edits: the answer is largely in the prompt."""
CHAT = Kind("chat", temperature=0.0, max_tokens=192)
PROSE = Kind("prose", temperature=1.0, max_tokens=192)
"""Free writing, sampled at temperature 1: next to nothing can be looked up."""


@dataclass(frozen=True)
class Phase:
    """One stretch of traffic: `concurrency` streams of one kind for `seconds`."""

    kind: Kind
    concurrency: int
    seconds: float

    @property
    def label(self) -> str:
        """Name and concurrency, as the tables show them."""
        return f"{self.kind.name} ×{self.concurrency}"


ROTATIONS = (
    ((PREDICTABLE, 1), (CHAT, 4), (PROSE, 8)),
    ((PREDICTABLE, 4), (CHAT, 1), (PROSE, 8)),
)
"""Two rotations alternate, so that nature and concurrency do not always change together."""


def schedule(duration_seconds: float | None) -> Iterator[Phase]:
    """Yield the phases in order: endless without a duration, else sharing it evenly.

    Every kind appears once; twice if each phase then still lasts `SHORTEST_PHASE_SECONDS`, and so on.
    """
    kinds = len(ROTATIONS[0])
    if duration_seconds is None:
        rounds: Iterator[int] = itertools.count()
        seconds = PHASE_SECONDS
    else:
        rotations = max(1, int(duration_seconds // (kinds * SHORTEST_PHASE_SECONDS)))
        rounds = iter(range(rotations))
        seconds = duration_seconds / (kinds * rotations)
    for index in rounds:
        for kind, concurrency in ROTATIONS[index % len(ROTATIONS)]:
            yield Phase(kind, concurrency, seconds)
