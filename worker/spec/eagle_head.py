"""The network of an EAGLE head: one decoder layer over a token's embedding and the target's hidden states.

Row t joins the target's hidden state at position t with the embedding of token t + 1 and predicts token t + 2, and its
own hidden state stands in for the target's in the next row. Two styles (the papers' EAGLE-1 and EAGLE-3): `eagle` joins
both by a projection into the residual stream, `eagle3` fuses several layers' hidden states first and lets only the
attention see the embedding. Knows nothing about requests, files or depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kv_cache import KVCache
from worker.models.attention import AttentionPlan, Placement, PrefillPlan, Segment, addresses
from worker.models.config import DecoderConfig
from worker.models.decoder import Decoder
from worker.models.linear import Linear, Phase
from worker.models.norm import RmsNorm
from worker.models.rope import TurnTable, turn
from worker.models.tree_attention import decode_plan

Style = Literal["eagle", "eagle3"]


@dataclass(frozen=True)
class HeadConfig:
    """Sizes and kind of a head. `layer.max_position_embeddings` bounds the texts that it can draft for."""

    style: Style
    layer: DecoderConfig
    """Sizes of the one layer; `vocab_size` is the target's."""
    feature_layers: tuple[int, ...]
    """After how many target layers hidden states are taken (`POST_NORM`: behind the final norm)."""
    norm_before_residual: bool = False
    """eagle3: the residual stream begins behind the norm of the hidden state."""


@dataclass(frozen=True)
class HeadWeights:
    """All weights; what a layout does not have is None. Queries and keys are in the layout of pairs (`rope.py`)."""

    embedding: Tensor | None  # [vocab_size, hidden_size]; None: the target's
    fuse_norm: RmsNorm | None  # over len(feature_layers) * hidden_size
    fuse: Linear | None  # target's features -> hidden_size; None: one feature, taken as it is
    join: Linear | None  # eagle: [embedding, hidden] -> hidden_size
    embedding_norm: RmsNorm | None
    hidden_norm: RmsNorm | None  # eagle3
    input_norm: RmsNorm | None  # before the attention of an eagle head
    qkv: Linear
    output: Linear
    post_attention_norm: RmsNorm
    gate_up: Linear
    down: Linear
    final_norm: RmsNorm | None
    head: Linear | None  # hidden_size -> draft vocabulary; None: the target's own head
    token_ids: Tensor | None  # [draft_vocab_size] int64, target's ids; None: the whole vocabulary


class EagleHead:
    """A loaded head that goes with one target. Used by one thread; its weights never change."""

    def __init__(
        self, config: HeadConfig, weights: HeadWeights, target: Decoder, *, num_tokens: int, wide: torch.dtype
    ) -> None:
        """Take weights as they are placed.

        Args:
            config: sizes and style.
            weights: the head's own.
            target: lends embedding and head where the head has none.
            num_tokens: ids that may be drawn.
            wide: dtype of norms and of the residual stream.
        """
        self.config = config
        self._weights = weights
        self._target = target
        self._num_tokens = num_tokens
        self._wide = wide
        self._device = target.device
        layer = config.layer
        self._turns = TurnTable(layer.rope, layer.head_dim, target.dtype, target.device)

    def new_kv_cache(self, num_slots: int, max_tokens: int) -> KVCache:
        """Allocate the cache of the head's one layer."""
        layer = self.config.layer
        kv = KVCache(
            num_layers=1,
            num_slots=num_slots,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            max_tokens=max_tokens,
            dtype=self._target.dtype,
            device=self._device,
        )
        self._turns.reserve(kv.max_tokens)
        return kv

    def no_hidden(self) -> Tensor:  # [0, hidden_size]
        """Return a tensor with the dtype and the width of `forward`'s results."""
        return torch.empty(0, self.config.layer.hidden_size, dtype=self._wide, device=self._device)

    def fuse(self, features: Tensor) -> Tensor:
        """Turn the target's features `[rows, len(feature_layers) * hidden_size]` into `[rows, hidden_size]`."""
        weights = self._weights
        features = features.to(self._wide)
        if weights.fuse_norm is not None:
            features = weights.fuse_norm(features)
        return features if weights.fuse is None else weights.fuse(features, "decode").to(self._wide)

    def forward(
        self,
        token_ids: Tensor,  # [rows] int64: of row t the token at t + 1
        hidden: Tensor,  # [rows, hidden_size]: fused features, or what an earlier row returned
        segments: Sequence[Segment],
        kv: KVCache,
        *,
        phase: Phase,
    ) -> Tensor:  # [rows, hidden_size]
        """Compute rows and store their keys and values; see `Decoder.forward` for segments and phase."""
        layer = self.config.layer
        slots, cells, positions = addresses(segments, self._device)  # [rows] each
        plan: AttentionPlan
        if phase == "prefill":
            plan = PrefillPlan(segments, kv)
        else:
            plan = decode_plan(segments, kv, layer.num_heads // layer.num_kv_heads)
        placement = Placement(positions, kv.rows_of(slots, cells), plan)
        return self.compute(token_ids, hidden, placement, kv, phase=phase)

    def compute(
        self, token_ids: Tensor, hidden: Tensor, placement: Placement, kv: KVCache, *, phase: Phase
    ) -> Tensor:  # [rows, hidden_size]
        """Compute rows that have been placed: `forward` without anything from the host."""
        weights, layer, dtype = self._weights, self.config.layer, self._target.dtype
        num_heads, num_turning = layer.num_heads, layer.num_heads + layer.num_kv_heads
        positions, places, plan = placement
        turns = self._turns.at(positions, num_turning, num_turning + layer.num_kv_heads)
        x, joined = self._join(token_ids, hidden, phase)
        heads = weights.qkv(joined, phase).view(len(token_ids), -1, layer.head_dim)
        heads = turn(heads, turns, dtype)
        stored = heads[:, num_heads:].reshape(len(places), layer.head_dim)
        kv.layers[0].view(-1, layer.head_dim).index_copy_(0, places, stored)
        x = x + weights.output(plan.attend(heads[:, :num_heads], kv.layers[0]), phase)
        gate, up = weights.gate_up(weights.post_attention_norm(x), phase).chunk(2, dim=1)
        return x + weights.down(F.silu(gate) * up, phase)

    def logits(self, hidden: Tensor) -> Tensor:  # [rows, hidden_size] -> [rows, num_tokens]
        """Return logits over the target's vocabulary, -inf for tokens outside the draft vocabulary."""
        weights = self._weights
        if weights.final_norm is not None:
            hidden = weights.final_norm(hidden)
        if weights.head is None:
            return self._target.logits(hidden)[:, : self._num_tokens]
        logits = weights.head(hidden, "decode")
        if weights.token_ids is None:
            return logits[:, : self._num_tokens]
        # bfloat16 of a packed head: sampling divides and adds noise, which wants more digits
        wide = torch.full((len(hidden), self._num_tokens), -torch.inf, dtype=self._wide, device=hidden.device)
        wide[:, weights.token_ids] = logits.to(self._wide)
        return wide

    def _join(self, token_ids: Tensor, hidden: Tensor, phase: Phase) -> tuple[Tensor, Tensor]:
        """Return the residual stream `[rows, hidden_size]` and what the attention's projections read."""
        weights = self._weights
        embedded = (
            self._target.embed(token_ids) if weights.embedding is None else weights.embedding[token_ids]
        )
        if weights.embedding_norm is not None:
            embedded = weights.embedding_norm(embedded)
        if weights.join is not None:
            x = weights.join(torch.cat((embedded, hidden), dim=1), phase).to(self._wide)
            return x, x if weights.input_norm is None else weights.input_norm(x)
        if weights.hidden_norm is None:
            raise RuntimeError("an eagle3 head has a hidden_norm")
        normed = weights.hidden_norm(hidden)
        x = normed if self.config.norm_before_residual else hidden
        return x, torch.cat((embedded, normed), dim=1)
