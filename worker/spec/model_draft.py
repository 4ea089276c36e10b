"""The standalone draft model: a small decoder with the target's tokenizer and a KV cache of its own.

Its KV follows the target's committed tokens lazily: at depth 0 nothing runs, and on the way back up the missing
tokens are caught up first. Invariant after a round's catch-up: draft KV length = committed - 1; rollback is a
length pointer. Knows nothing about verify.
"""

import time
from collections.abc import Callable, Sequence

import torch

from worker.batch import DecodeBatch
from worker.model_runner import ModelRunner
from worker.models.attention import Segment
from worker.request import Request
from worker.sampling import Draw
from worker.spec.draft import ChainDrafter, DraftFailure, DraftOutput


class ModelDrafter(ChainDrafter):
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
        super().__init__(topk=topk, max_rows=max_rows, device=runner.device, use_fast_path=use_fast_path)
        self.max_context_tokens: int | None = runner.decoder.config.max_position_embeddings
        self._runner = runner
        self._chunk = catch_up_chunk_tokens
        self._clock = clock
        self._kv_lengths: dict[int, int] = {}  # by the target's slot, which is the drafter's as well
        self._segments: Sequence[Segment] = ()

    def kv_length(self, slot: int) -> int:
        """Valid tokens in the drafter's KV of a slot."""
        return self._kv_lengths.get(slot, 0)

    def draft(self, batch: DecodeBatch) -> DraftOutput:
        """Catch up, then draft for every request with a budget."""
        started = self._clock()
        rows = [row for row, budget in enumerate(batch.row_budgets) if budget > 0]
        requests = [batch.requests[row] for row in rows]
        for request in requests:
            self._catch_up(request)
        caught_up = self._clock()
        draft_tokens = torch.zeros(batch.size, self.num_steps, dtype=torch.long, device=self.device)
        if rows:
            draft_tokens[rows] = self._draft_rows(requests)
        # The one look at the numbers before verify: -1 marks a row whose logits held NaN.
        if bool((draft_tokens < 0).any()):
            for request in requests:
                self.release(request.held_slot)
            raise DraftFailure("the draft model's logits hold NaN")
        return DraftOutput(draft_tokens, batch.row_budgets, catch_up_seconds=caught_up - started)

    def commit(self, request: Request) -> None:
        """Keep the KV of what was committed; the drafts behind it were wrong."""
        slot = request.held_slot
        if slot in self._kv_lengths:
            self._kv_lengths[slot] = min(self._kv_lengths[slot], request.committed - 1)

    def release(self, slot: int) -> None:
        """Forget the slot's KV."""
        self._kv_lengths.pop(slot, None)

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
