"""Drafting with an EAGLE head: `draft_extend` over what was committed since, then num_steps - 1 forwards.

Row t of the head's KV was computed from the target's features at position t and the token at t + 1, so after
`draft_extend` its length is committed - 1, at partial and at full acceptance. The rows of the drafting steps, computed
from the head's own hidden states, are overwritten by the next `draft_extend`. The target's features lie beside its KV
(`ModelRunner.keep_features`): `len(feature_layers) * hidden_size` numbers per token. Knows nothing about verify.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worker.model_runner import ModelRunner
from worker.models.attention import Segment
from worker.request import Request
from worker.sampling import Draw
from worker.spec.cached_draft import CachedDrafter
from worker.spec.eagle_head import EagleHead
from worker.spec.tree import DraftTree
from worker.spec.tree_steps import Branches, Frontier, grow_branches


class EagleDrafter(CachedDrafter):
    """Runs the head over the slots of the target's cache."""

    def __init__(
        self,
        head: EagleHead,
        target: ModelRunner,
        *,
        topk: int = 1,
        max_rows: int,
        max_tokens: int,
        deepest_num_steps: int,
        use_fast_path: bool = True,
        catch_up_chunk_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make the target keep what the head reads; before it has stored anything.

        Args:
            head: the network.
            target: stores the features.
            topk: see `ChainDrafter`.
            max_rows: see `ChainDrafter`.
            max_tokens: rows per slot of the head's cache.
            deepest_num_steps: the deepest tier: a round commits at most one token more.
            use_fast_path: see `ChainDrafter`.
            catch_up_chunk_tokens: rows of one catch-up forward.
            clock: monotonic seconds.
        """
        super().__init__(
            head.new_kv_cache(target.kv.num_slots, max_tokens),
            max_context_tokens=head.config.layer.max_position_embeddings,
            topk=topk,
            max_rows=max_rows,
            device=target.device,
            use_fast_path=use_fast_path,
            catch_up_chunk_tokens=catch_up_chunk_tokens,
            clock=clock,
        )
        target.keep_features(head.config.feature_layers)
        self._head = head
        self._target = target
        self._most_extended = deepest_num_steps + 1
        self._segments: Sequence[Segment] = ()
        self._extended = torch.empty(0)  # [rows, hidden_size]: the head's, of the root's row
        self._hidden = self._extended  # the same of the latest step; [rows, topk, hidden_size] of a tree's
        self._growing: Sequence[Branches] = ()

    def draft_extend(self, requests: Sequence[Request]) -> Tensor:  # [rows, vocab_size]
        """Store the rows of what was committed since the last round; return the logits after the root.

        `draft_forward` goes on from here, as often as it is called.
        """
        segments = [self._missing(request) for request in requests]
        hidden = self._run(requests, segments, is_prefill=False)
        ends = torch.tensor([segment.count for segment in segments], device=self.device).cumsum(0) - 1
        self._extended = hidden.index_select(0, ends)
        self._segments = [Segment(r.held_slot, r.committed - 1, 1) for r in requests]
        return self._head.logits(self._extended)

    def _missing(self, request: Request) -> Segment:
        length = self.kv_length(request.held_slot)
        return Segment(request.held_slot, length, request.committed - 1 - length)

    @torch.inference_mode()
    def _catch_up(self, request: Request) -> None:
        """Store what is more than a round's tokens in chunks; at least one row is left for `draft_extend`."""
        while (missing := self._missing(request)).count > self._most_extended:
            chunk = Segment(missing.slot, missing.start, min(self._chunk, missing.count - 1))
            self._run([request], [chunk], is_prefill=True)

    def _run(self, requests: Sequence[Request], segments: Sequence[Segment], *, is_prefill: bool) -> Tensor:
        """Compute rows from the target's features → `[rows, hidden_size]`."""
        tokens = [
            token
            for request, segment in zip(requests, segments, strict=True)
            for token in request.tokens(segment.start + 1, segment.stop + 1)
        ]
        hidden = self._head.forward(
            torch.tensor(tokens, device=self.device),
            self._head.fuse(self._target.features(segments)),
            segments,
            self._kv,
            phase="prefill" if is_prefill else "decode",
        )
        for segment in segments:
            self._kv_lengths[segment.slot] = segment.stop
        return hidden

    @torch.inference_mode()
    def _draft_rows(self, requests: Sequence[Request]) -> DraftTree:
        logits = self.draft_extend(requests)
        self._growing = [Branches(s.slot, s.start) for s in self._segments]
        draws = [[Draw.at(r, r.committed + step) for r in requests] for step in range(self.num_steps)]
        return self.draft_forward(logits, draws)

    def _forward_step(self, tokens: Tensor, step: int) -> Tensor:
        segments = [Segment(s.slot, s.start + step, 1) for s in self._segments]
        before = self._hidden if step else self._extended
        self._hidden = self._head.forward(tokens, before, segments, self._kv, phase="decode")
        return self._head.logits(self._hidden)

    def _forward_frontier(self, frontier: Frontier, step: int) -> Tensor:
        before = self._hidden if step else self._extended.unsqueeze(1)
        came_from = frontier.parents.unsqueeze(-1).expand(-1, -1, before.shape[-1])
        hidden = self._head.forward(
            frontier.tokens.flatten(),
            before.gather(1, came_from).flatten(0, 1),
            grow_branches(self._growing, frontier),
            self._kv,
            phase="decode",
        )
        self._hidden = hidden.view(*frontier.tokens.shape, -1)
        return self._head.logits(hidden).view(*frontier.tokens.shape, -1)
