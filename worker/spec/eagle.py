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

from worker.graphs.forward import GraphedForward
from worker.model_runner import ModelRunner, last_rows
from worker.models.attention import Segment
from worker.models.padded_attention import PaddedInputs, PaddedRows, place
from worker.request import Request
from worker.sampling import Draw
from worker.spec.cached_draft import CachedDrafter
from worker.spec.eagle_head import EagleHead
from worker.spec.tree import DraftTree
from worker.spec.tree_steps import Branches, Frontier, grow_branches
from worker.transfer import to_device


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
        self.extend_graphs: GraphedForward | None = None
        self.step_graphs: GraphedForward | None = None
        self._segments: Sequence[Segment] = ()
        self._extended = torch.empty(0)  # [rows, hidden_size]: the head's, of the root's row
        self._hidden = self._extended  # the same of the latest step; [rows, topk, hidden_size] of a tree's
        self._growing: Sequence[Branches] = ()

    def draft_extend(self, requests: Sequence[Request]) -> Tensor:  # [rows, vocab_size]
        """Store the rows of what was committed since the last round; return the logits after the root.

        `draft_forward` goes on from here, as often as it is called.
        """
        segments = [self._missing(request) for request in requests]
        self._segments = [Segment(r.held_slot, r.committed - 1, 1) for r in requests]
        tokens = self._tokens_behind(requests, segments)
        replayed = self._replay(self.extend_graphs, tokens, segments, None)
        if replayed is not None:
            self._note_stored(segments)
            logits, self._extended = replayed
            return logits
        hidden = self._run(tokens, segments, is_prefill=False)
        self._extended = hidden.index_select(0, last_rows(segments, self.device))
        return self._head.logits(self._extended)

    def extend_padded(self, inputs: PaddedInputs) -> tuple[Tensor, Tensor]:
        """`draft_extend` without anything from the host: logits and hidden states of each request's last row."""
        if self._target.kv.features is None:
            raise RuntimeError("features are read, but keep_features was not called")
        stored = self._target.kv.features.view(-1, self._target.kv.features.shape[-1])
        cells = PaddedRows.of(inputs, self._kv.padding_slot).among_all(self._target.kv.max_tokens)
        hidden = self._compute_padded(inputs, self._head.fuse(stored.index_select(0, cells)))
        hidden = hidden.index_select(0, inputs.last_rows)
        return self._head.logits(hidden), hidden

    def step_padded(self, inputs: PaddedInputs) -> tuple[Tensor, Tensor]:
        """One drafting step of one row per request: logits and hidden states."""
        if inputs.hidden is None:
            raise RuntimeError("a step reads hidden states")
        hidden = self._compute_padded(inputs, inputs.hidden.flatten(0, 1))
        return self._head.logits(hidden), hidden

    def no_hidden(self) -> Tensor:  # [0, hidden_size]
        """Return a tensor with the dtype and the width of the hidden states."""
        return self._head.no_hidden()

    def _compute_padded(self, inputs: PaddedInputs, hidden: Tensor) -> Tensor:
        layer = self._head.config.layer
        placement = place(inputs, self._kv, layer.num_heads // layer.num_kv_heads)
        return self._head.compute(inputs.tokens.flatten(), hidden, placement, self._kv, phase="decode")

    def _replay(
        self,
        graphs: GraphedForward | None,
        tokens: Tensor,
        segments: Sequence[Segment],
        hidden: Tensor | None,
    ) -> Sequence[Tensor] | None:
        replayed = graphs.replay(tokens, segments, hidden) if graphs is not None else None
        if replayed is None:
            self._target.launches.eager += 1
        else:
            self._target.launches.replayed += 1
        return replayed

    def _missing(self, request: Request) -> Segment:
        length = self.kv_length(request.held_slot)
        return Segment(request.held_slot, length, request.committed - 1 - length)

    @torch.inference_mode()
    def _catch_up(self, request: Request) -> None:
        """Store what is more than a round's tokens in chunks; at least one row is left for `draft_extend`."""
        while (missing := self._missing(request)).count > self._most_extended:
            chunk = Segment(missing.slot, missing.start, min(self._chunk, missing.count - 1))
            self._run(self._tokens_behind([request], [chunk]), [chunk], is_prefill=True)

    def _tokens_behind(self, requests: Sequence[Request], segments: Sequence[Segment]) -> Tensor:  # [rows]
        """Return the token behind each row's position."""
        tokens = [
            token
            for request, segment in zip(requests, segments, strict=True)
            for token in request.tokens(segment.start + 1, segment.stop + 1)
        ]
        return to_device(tokens, self.device)

    def _run(self, tokens: Tensor, segments: Sequence[Segment], *, is_prefill: bool) -> Tensor:
        """Compute rows from the target's features → `[rows, hidden_size]`."""
        hidden = self._head.forward(
            tokens,
            self._head.fuse(self._target.features(segments)),
            segments,
            self._kv,
            phase="prefill" if is_prefill else "decode",
        )
        self._note_stored(segments)
        return hidden

    def _note_stored(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._kv_lengths[segment.slot] = segment.stop

    @torch.inference_mode()
    def _draft_rows(self, requests: Sequence[Request]) -> DraftTree:
        logits = self.draft_extend(requests)
        self._growing = [Branches(s.slot, s.start) for s in self._segments]
        draws = [[Draw.at(r, r.committed + step) for r in requests] for step in range(self.num_steps)]
        return self.draft_forward(logits, draws)

    def _forward_step(self, tokens: Tensor, step: int) -> Tensor:
        segments = [Segment(s.slot, s.start + step, 1) for s in self._segments]
        before = self._hidden if step else self._extended
        replayed = self._replay(self.step_graphs, tokens, segments, before)
        if replayed is not None:
            logits, self._hidden = replayed
            return logits
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
