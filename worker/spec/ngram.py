"""Prompt lookup: propose what followed the last time the text ended like this.

Costs no forward and no memory on the device. It pays where a text repeats itself (code, lists, quotes) and often
has nothing to propose elsewhere, which counts as a failure at that position. Outside the fast path: it has no scores.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from worker.batch import DecodeBatch
from worker.request import Request
from worker.spec.draft import DraftOutput
from worker.spec.runtime_state import SpecRuntimeState
from worker.transfer import to_device


class SuffixIndex:
    """Where each n-gram of one text was last followed by something. Grows with the text; never shrinks."""

    def __init__(self, *, ngram_min: int, ngram_max: int) -> None:
        self._sizes = range(ngram_max, ngram_min - 1, -1)  # longest first: it is the better evidence
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that followed it

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens. An n-gram is indexed once a token follows it, so no text matches itself."""
        tokens, ends = self._tokens, self._ends
        for token in token_ids:
            position = len(tokens)
            for size in self._sizes:
                if size <= position:
                    ends[tuple(tokens[position - size : position])] = position
            tokens.append(token)

    def propose(self, limit: int) -> list[int]:
        """Return up to `limit` tokens that may follow, none if the ending is new.

        A match close to the end runs into its own proposals, which continues a period (a, b, a, b, …).
        """
        tokens = self._tokens
        for size in self._sizes:
            if size > len(tokens):
                continue
            position = self._ends.get(tuple(tokens[-size:]))
            if position is not None:
                text = tokens[position:]
                while len(text) < limit:
                    text = text + text
                return text[:limit]
        return []


class NgramDrafter:
    """Prompt lookup over prompt and output of each request."""

    fast_path: Literal["on", "off", "not applicable"] = "not applicable"
    max_context_tokens: int | None = None

    def __init__(self, *, ngram_min: int, ngram_max: int, device: torch.device) -> None:
        self._sizes = {"ngram_min": ngram_min, "ngram_max": ngram_max}
        self._device = device
        self._indexes: dict[int, SuffixIndex] = {}
        self.num_steps = 0

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        """Adopt a tier: the width of what is proposed."""
        self.num_steps = state.num_steps

    def draft(self, batch: DecodeBatch) -> DraftOutput:
        """Look up every request; what is not proposed stays 0 and is not verified."""
        rows = [
            self.propose(request, budget) if budget else []
            for request, budget in zip(batch.requests, batch.row_budgets, strict=True)
        ]
        padded = [row + [0] * (self.num_steps - len(row)) for row in rows]
        draft_tokens = to_device(padded, self._device, torch.long)
        return DraftOutput(draft_tokens, [len(row) for row in rows])

    def propose(self, request: Request, limit: int) -> list[int]:
        """Look one request up; up to `limit` tokens, none if its ending is new."""
        return self._index(request).propose(limit)

    def commit(self, request: Request) -> None:
        """Nothing to take back: only committed tokens are indexed, when they are next needed."""

    def recover(self, slot: int) -> None:
        """Drop the slot's index; what it proposes are tokens always."""
        self.release(slot)

    def release(self, slot: int) -> None:
        """Drop the slot's index."""
        self._indexes.pop(slot, None)

    def _index(self, request: Request) -> SuffixIndex:
        index = self._indexes.setdefault(request.held_slot, SuffixIndex(**self._sizes))
        index.extend(request.tokens(len(index), request.committed))
        return index
