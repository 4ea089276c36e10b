"""Two drafters in one: what the text itself foretells where its ending was there before, else an EAGLE head.

A long match is better evidence than a head has, and costs no forward. A request that lookup serves leaves the head's KV
behind; what is missing is stored when the head's turn comes again. Knows nothing about how either drafts.
"""

from typing import Literal

import torch

from worker.batch import DecodeBatch
from worker.request import Request
from worker.spec.cached_draft import CachedDrafter
from worker.spec.draft import Drafter, DraftOutput
from worker.spec.ngram import NgramDrafter
from worker.spec.runtime_state import SpecRuntimeState
from worker.transfer import to_device


class CompositeDrafter:
    """Asks the lookup first, request by request, and runs the head for those that it has nothing for."""

    max_context_tokens: int | None = None
    """Lookup has no limit; the head's own is kept here."""

    def __init__(self, lookup: NgramDrafter, head: CachedDrafter) -> None:
        """Take both; `lookup` should know long endings only."""
        self._lookup = lookup
        self.head = head

    @property
    def fast_path(self) -> Literal["on", "off", "not applicable"]:
        """The head's."""
        return self.head.fast_path

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        """Both adopt the tier."""
        self._lookup.apply_runtime_state(state)
        self.head.apply_runtime_state(state)

    @torch.inference_mode()
    def draft(self, batch: DecodeBatch) -> DraftOutput:
        """Look every request up, then draft for the rest in one batch."""
        found = [
            self._lookup.propose(request, budget) if budget else []
            for request, budget in zip(batch.requests, batch.row_budgets, strict=True)
        ]
        budgets = [
            0 if tokens else self._head_budget(request, budget)
            for request, budget, tokens in zip(batch.requests, batch.row_budgets, found, strict=True)
        ]
        output = self.head.draft(DecodeBatch(batch.requests, batch.num_steps, budgets))
        proposed = [len(tokens) or budget for tokens, budget in zip(found, budgets, strict=True)]
        rows = [row for row, tokens in enumerate(found) if tokens]
        if rows:
            padded = [found[row] + [0] * (batch.num_steps - len(found[row])) for row in rows]
            device = output.draft_tokens.device
            output.draft_tokens.index_copy_(0, to_device(rows, device), to_device(padded, device))
        return output._replace(num_proposed=proposed)

    def commit(self, request: Request) -> None:
        """Both follow the outcome."""
        self._lookup.commit(request)
        self.head.commit(request)

    def recover(self, slot: int) -> None:
        """Both."""
        self._lookup.recover(slot)
        self.head.recover(slot)

    def release(self, slot: int) -> None:
        """Both forget the slot."""
        self._lookup.release(slot)
        self.head.release(slot)

    def _head_budget(self, request: Request, budget: int) -> int:
        limit = self.head.max_context_tokens
        return budget if limit is None else max(0, min(budget, limit - request.committed + 1))


def model_part(drafter: Drafter | None) -> CachedDrafter | None:
    """Return the part of a drafter that runs a network, None where nothing does."""
    part = drafter.head if isinstance(drafter, CompositeDrafter) else drafter
    return part if isinstance(part, CachedDrafter) else None
