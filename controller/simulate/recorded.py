"""Recorded texts, played back at any depth up to the one they were recorded at.

Decoding is lossless and a chain's drafts at a place of the text depend on the text only. `spec-worker record` has
noted for every place how many drafts were proposed there and how many of them were right, so a round that starts
anywhere, at any smaller depth, is known exactly.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """What a round that starts at a place of the text meets."""

    proposed: int
    correct: int


def load_streams(path: Path) -> list[list[Place]]:
    """Read a trace: `{"num_steps": K, "streams": [[[proposed, correct], …], …], …}`, a pair for every place.

    Raises:
        OSError, ValueError: the file cannot be read, or a count is out of bounds (the place is named).
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    deepest = int(content["num_steps"])
    streams = []
    for number, stream in enumerate(content["streams"]):
        places = [Place(*pair) for pair in stream]
        for index, place in enumerate(places):
            if not 0 <= place.correct <= place.proposed <= deepest:
                raise ValueError(f"{path}: streams[{number}][{index}] is {list(place)}, deepest {deepest}")
        if places:
            streams.append(places)
    if not streams:
        raise ValueError(f"{path}: no recorded places")
    return streams


class RecordedStream:
    """Where a request is in its text; starts over at the end."""

    def __init__(self, places: Sequence[Place], rng: random.Random) -> None:
        self._places = places
        self._place = rng.randrange(len(places))

    def next_round(self, num_steps: int) -> tuple[int, int]:
        """Return (proposed, correct) of a round at this depth from here, and move past what it yields."""
        place = self._places[self._place]
        proposed, correct = min(num_steps, place.proposed), min(num_steps, place.correct)
        self._place = (self._place + correct + 1) % len(self._places)
        return proposed, correct
