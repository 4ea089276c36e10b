"""Drafters that keep keys and values of their own: lengths by slot, catching up, rolling back.

Their KV follows the target's committed tokens lazily: at depth 0 nothing runs, and on the way back up what is missing
is caught up first. Rollback is a length pointer. Knows nothing about what a forward computes.
"""

import time
from collections.abc import Callable, Sequence

import torch

from worker.batch import DecodeBatch
from worker.kv_cache import KVCache
from worker.request import Request
from worker.spec.draft import ChainDrafter, DraftOutput
from worker.spec.tree import DraftTree, Topology, kept_parents
from worker.transfer import to_device


class CachedDrafter(ChainDrafter):
    """Base of drafters with a KV cache; its slots are the target's."""

    def __init__(
        self,
        kv: KVCache,
        *,
        max_context_tokens: int | None,
        topk: int,
        max_rows: int,
        device: torch.device,
        use_fast_path: bool,
        catch_up_chunk_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(topk=topk, max_rows=max_rows, device=device, use_fast_path=use_fast_path)
        self._kv = kv
        self.max_context_tokens = max_context_tokens
        self._chunk = catch_up_chunk_tokens
        self._clock = clock
        self._kv_lengths: dict[int, int] = {}  # by slot

    @property
    def kv(self) -> KVCache:
        """Its own cache."""
        return self._kv

    def kv_length(self, slot: int) -> int:
        """Valid tokens in the drafter's KV of a slot."""
        return self._kv_lengths.get(slot, 0)

    @torch.inference_mode()
    def draft(self, batch: DecodeBatch) -> DraftOutput:
        """Catch up, then draft for every request with a budget."""
        started = self._clock()
        rows = [row for row, budget in enumerate(batch.row_budgets) if budget > 0]
        requests = [batch.requests[row] for row in rows]
        for request in requests:
            self._catch_up(request)
        caught_up = self._clock()
        draft_tokens = torch.zeros(
            batch.size, self.num_draft_tokens - 1, dtype=torch.long, device=self.device
        )
        trees = [Topology.chain(0)] * batch.size
        if rows:
            tree = self._draft_rows(requests)
            draft_tokens.index_copy_(0, to_device(rows, self.device), tree.draft_tokens)
            if self.topk > 1:
                for row, parents in zip(rows, kept_parents(tree, self.topk), strict=True):
                    trees[row] = Topology.tree(parents, batch.row_budgets[row])
        output = DraftOutput(draft_tokens, batch.row_budgets, catch_up_seconds=caught_up - started)
        if self.topk == 1:
            return output
        return output._replace(num_proposed=[tree.num_drafts for tree in trees], trees=trees)

    def commit(self, request: Request) -> None:
        """Keep the KV of what was committed; the drafts behind it were wrong."""
        self.rewind(request.held_slot, request.committed - 1)

    def rewind(self, slot: int, length: int) -> None:
        """Keep at most `length` tokens of a slot's KV."""
        if slot in self._kv_lengths:
            self._kv_lengths[slot] = min(self._kv_lengths[slot], length)

    def recover(self, slot: int) -> None:
        """Wipe the slot: a NaN behind the mask would poison what is stored there next."""
        self._kv.clear(slot)
        self.release(slot)

    def release(self, slot: int) -> None:
        """Forget the slot's KV."""
        self._kv_lengths.pop(slot, None)

    def _catch_up(self, request: Request) -> None:
        """Store, in chunks, what the KV lacks beyond what the round's first forward takes along."""
        raise NotImplementedError

    def _draft_rows(self, requests: Sequence[Request]) -> DraftTree:
        """Draft num_steps levels for each request."""
        raise NotImplementedError
