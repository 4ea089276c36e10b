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


class ModelDrafter(CachedDrafter):
    """Runs num_steps forwards a round, the first over one or two tokens (after full acceptance its KV lacks one)."""

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
    def _draft_rows(self, requests: Sequence[Request]) -> torch.Tensor:  # [rows, num_steps]
        # The root, and before it the last draft where the previous round was accepted whole.
        first = [
            Segment(r.held_slot, self.kv_length(r.held_slot), r.committed - self.kv_length(r.held_slot))
            for r in requests
        ]
        tokens = [
            token for r, s in zip(requests, first, strict=True) for token in r.tokens(s.start, r.committed)
        ]
        logits = self._runner.decode(torch.tensor(tokens, device=self.device), first, last_only=True)
        self._segments = [Segment(r.held_slot, r.committed, 1) for r in requests]
        draws = [[Draw.at(r, r.committed + step) for r in requests] for step in range(self.num_steps)]
        tree = self.draft_forward(logits, draws)
        for request in requests:
            self._kv_lengths[request.held_slot] = request.committed + self.num_steps - 1
        return tree.draft_tokens

    def _forward_step(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        segments = [Segment(s.slot, s.start + step, 1) for s in self._segments]
        return self._runner.decode(tokens, segments)
