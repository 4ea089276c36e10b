"""The standalone draft model: a small decoder with the target's tokenizer and a KV cache of its own.

Invariant after a round's catch-up: draft KV length = committed - 1. Knows nothing about verify.
"""

import time
from collections.abc import Callable, Sequence

import torch

from worker.model_runner import ModelRunner
from worker.models.attention import Segment
from worker.request import Request
from worker.sampling import Draw
from worker.spec.cached_draft import CachedDrafter
from worker.spec.tree import DraftTree
from worker.spec.tree_steps import Branches, Frontier, grow_branches
from worker.transfer import to_device


class ModelDrafter(CachedDrafter):
    """Runs num_steps forwards a round, the first over one or two tokens (after full acceptance its KV lacks one).

    A tree's nodes lie behind the root in the order of their expansion; the last accepted one may not be among them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        topk: int = 1,
        max_rows: int,
        use_fast_path: bool = True,
        catch_up_chunk_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(
            runner.kv,
            max_context_tokens=runner.decoder.config.max_position_embeddings,
            topk=topk,
            max_rows=max_rows,
            device=runner.device,
            use_fast_path=use_fast_path,
            catch_up_chunk_tokens=catch_up_chunk_tokens,
            clock=clock,
        )
        self._runner = runner
        self._segments: Sequence[Segment] = ()
        self._growing: Sequence[Branches] = ()
        self._branches: dict[int, Branches] = {}  # by slot: of trees whose outcome is not known yet

    def commit(self, request: Request) -> None:
        """Keep the KV of what was committed; of a tree the accepted path, moved to where a chain's lies."""
        slot = request.held_slot
        if (branches := self._branches.pop(slot, None)) is not None:
            start = self._kv_lengths[slot]
            # Up to the root of the next round, which has no KV yet.
            cells = branches.along(request.tokens(start, request.committed - 1))
            self._kv.compact(slot, start, cells)
            self._kv_lengths[slot] = start + len(cells)
        super().commit(request)

    def release(self, slot: int) -> None:
        """Forget the slot's KV."""
        self._branches.pop(slot, None)
        super().release(slot)

    @property
    def runner(self) -> ModelRunner:
        """The draft model."""
        return self._runner

    def _catch_up(self, request: Request) -> None:
        """Prefill, in chunks, all but the last two committed tokens that the KV may lack."""
        slot = request.held_slot
        length = self.kv_length(slot)
        while request.committed - length > 2:
            stop = min(length + self._chunk, request.committed - 1)
            self._runner.prefill(slot, length, request.tokens(length, stop))
            length = stop
        self._kv_lengths[slot] = length

    @torch.inference_mode()
    def _draft_rows(self, requests: Sequence[Request]) -> DraftTree:
        # The root, and before it the last draft where the previous round was accepted whole.
        first = [
            Segment(r.held_slot, self.kv_length(r.held_slot), r.committed - self.kv_length(r.held_slot))
            for r in requests
        ]
        tokens = [
            token for r, s in zip(requests, first, strict=True) for token in r.tokens(s.start, r.committed)
        ]
        logits = self._runner.decode(to_device(tokens, self.device), first, last_only=True)
        self._segments = [Segment(r.held_slot, r.committed, 1) for r in requests]
        self._growing = [Branches(r.held_slot, r.committed) for r in requests]
        draws = [[Draw.at(r, r.committed + step) for r in requests] for step in range(self.num_steps)]
        tree = self.draft_forward(logits, draws)
        for request, branches in zip(requests, self._growing, strict=True):
            if self.topk == 1:
                self._kv_lengths[request.held_slot] = request.committed + self.num_steps - 1
            else:
                self._kv_lengths[request.held_slot] = request.committed
                self._branches[request.held_slot] = branches
        return tree

    def _forward_step(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        segments = [Segment(s.slot, s.start + step, 1) for s in self._segments]
        return self._runner.decode(tokens, segments)

    def _forward_frontier(self, frontier: Frontier, step: int) -> torch.Tensor:
        segments = grow_branches(self._growing, frontier)
        logits = self._runner.decode(frontier.tokens.flatten(), segments)
        return logits.view(*frontier.tokens.shape, -1)
