"""Stop strings: finding the earliest one in text that grows, and holding back only what may become one.

The engine asks `StopStrings` after every token, so ids, counts and text end at the same token; the edge runs a
`StopScanner` of its own over the same text to know which characters are safe to send. Knows no tokens' meaning but
through the decoder it is given.
"""

from collections.abc import Sequence
from typing import Protocol


class TextDecoder(Protocol):
    """Turns a growing list of ids into text (`worker.tokenization.Detokenizer`)."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; return the text that became certain."""


class StopScanner:
    """Passes text on until a stop string is complete; the stop and all behind it is dropped."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Take the stop strings; empty ones are an error of the caller."""
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text and return what is safe to show: all but a proper prefix of a stop at the end.

        The earliest match wins, by where it begins, then the longer one.
        """
        if self.matched is not None:
            return ""
        self._held += text
        found = [(self._held.find(stop), -len(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            begin, _, self.matched = min(found)
            safe, self._held = self._held[:begin], ""
            return safe
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def finish(self) -> str:
        """Return what was held back; nothing can complete it any more."""
        safe, self._held = self._held, ""
        return safe

    def _overlap(self, stop: str) -> int:
        """Length of the longest proper prefix of `stop` that ends the held text."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0


class StopStrings:
    """The stop strings of one request, asked on the engine's thread."""

    def __init__(self, stops: Sequence[str], decoder: TextDecoder) -> None:
        self._scanner = StopScanner(stops)
        self._decoder = decoder

    def push(self, token_id: int) -> str | None:
        """Add one emitted token; return the stop string that it completed, if any."""
        self._scanner.push(self._decoder.push([token_id]))
        return self._scanner.matched
