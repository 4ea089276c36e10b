"""Recorded rounds, played back at any smaller depth than the one they were recorded at.

Decoding is lossless and a chain's drafts at a place of the text depend on the text only, so a round recorded at
full depth tells what every smaller depth would have met: from any place inside it, the drafts still correct are
the rest of its run. Only the draft after a fully accepted run is unknown; it is drawn at the stream's own rate.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class RecordedRound(NamedTuple):
    """One request's part in one round at full depth."""

    proposed: int
    correct: int


def load_streams(path: Path) -> list[list[RecordedRound]]:
    """Read a file of recorded rounds: `{"num_steps": K, "streams": [[[proposed, correct], …], …]}`.

    Raises:
        OSError, ValueError: the file cannot be read, or a count is out of bounds (the place is named).
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    deepest = int(content["num_steps"])
    streams = []
    for number, stream in enumerate(content["streams"]):
        rounds = [RecordedRound(*pair) for pair in stream]
        for place, item in enumerate(rounds):
            if not 0 <= item.correct <= item.proposed <= deepest:
                raise ValueError(f"{path}: streams[{number}][{place}] is {list(item)}, deepest {deepest}")
        if rounds:
            streams.append(rounds)
    if not streams:
        raise ValueError(f"{path}: no recorded rounds")
    return streams


class RecordedStream:
    """A place in a recorded text; starts over at its end."""

    def __init__(self, rounds: Sequence[RecordedRound], rng: random.Random) -> None:
        self._rounds = rounds
        self._round = rng.randrange(len(rounds))
        self._offset = 0
        self._rng = rng
        reached = sum(1 for r in rounds if r.proposed)
        self._rate = sum(1 for r in rounds if r.correct) / reached if reached else 0.0

    def next_round(self, num_steps: int) -> tuple[int, int]:
        """Return (proposed, correct) of a round at this depth from here, and move past what it yields."""
        recorded = self._rounds[self._round]
        left = recorded.correct - self._offset
        proposed = min(num_steps, recorded.proposed - self._offset)
        if left <= 0 and self._offset == recorded.proposed and self._offset > 0 and num_steps > 0:
            # The place after a fully accepted run: one draft of unknown outcome.
            proposed, left = 1, int(self._rng.random() < self._rate)
            correct = min(left, 1)
            self._move(1 + correct, recorded)
            return proposed, correct
        correct = max(0, min(num_steps, left))
        self._move(correct + 1, recorded)
        return max(proposed, 0), correct

    def _move(self, tokens: int, recorded: RecordedRound) -> None:
        self._offset += tokens
        while self._offset > recorded.correct:
            self._offset -= recorded.correct + 1
            self._round = (self._round + 1) % len(self._rounds)
            recorded = self._rounds[self._round]
