"""A Llama-family decoder (Llama, Mistral, Qwen2, Qwen3) with this worker's attention and KV cache.

`Decoder.forward` computes rows of any mix of requests: it writes their keys and values into their slots and returns
hidden states; `Decoder.logits` is apart because most rows of a prefill need none. Knows nothing about sampling,
scheduling or speculation: verify is a forward with several rows per segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kv_cache import KVCache
from worker.models.attention import AttentionPlan, Placement, PrefillPlan, Segment, addresses
from worker.models.basis import Basis
from worker.models.config import DecoderConfig
from worker.models.linear import Linear, Phase
from worker.models.norm import RmsNorm
from worker.models.rope import TurnTable, turn
from worker.models.tree_attention import decode_plan

PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer; q, k, v are one projection (in this order), gate and up another.

    Heads of queries and keys are in the layout of pairs (`worker.models.rope`).
    """

    input_norm: RmsNorm | None  # None: `qkv` norms its input itself
    head_norm: (
        Tensor | None
    )  # [num_heads + num_kv_heads, head_dim], the architectures that norm queries and keys
    qkv: Linear
    output: Linear
    post_attention_norm: RmsNorm | None  # None: `gate_up` does
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder, placed on their device."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: list[DecoderLayer]
    final_norm: RmsNorm
    head: Linear
    basis: Basis | None = None
    """What the layers' weights are made for; None: the model's own."""


class FeatureTap:
    """Keeps hidden states that a forward passes by: what a draft head is fed with."""

    def __init__(self, layers: Sequence[int]) -> None:
        """Ask for the hidden states after `layers` layers each, before any norm; a layer may be named twice."""
        self._layers = list(layers)
        self._wanted = frozenset(layers)
        self._states: dict[int, Tensor] = {}

    def wants(self, num_layers: int) -> bool:
        """Whether the hidden states after so many layers were asked for."""
        return num_layers in self._wanted

    def keep(self, num_layers: int, hidden: Tensor) -> None:
        """Called by a forward, `hidden` `[rows, hidden_size]`."""
        self._states[num_layers] = hidden

    def take(self) -> list[Tensor]:
        """Return the latest forward's states in the order asked for, `[rows, hidden_size]` each."""
        return [self._states[layer] for layer in self._layers]


class Decoder:
    """A loaded model; used by one thread. Its weights never change."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, dtype: torch.dtype) -> None:
        """Take weights as they are placed; `dtype` is that of caches and attention.

        Embedding and norms may be of a wider dtype: then the sum of the layers' outputs is kept in it.
        """
        self.config = config
        self.dtype = dtype
        self.device = weights.embedding.device
        self._weights = weights
        self._turns = TurnTable(config.rope, config.head_dim, self.dtype, self.device)

    def new_kv_cache(self, num_slots: int, max_tokens: int) -> KVCache:
        """Allocate a cache that fits this model.

        `max_tokens` may pass `max_position_embeddings` by the rows that a drafter overshoots; keeping texts within
        the model's limit is the caller's.

        Raises:
            ValueError: a size is below 1.
        """
        kv = KVCache(
            num_layers=self.config.num_layers,
            num_slots=num_slots,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            max_tokens=max_tokens,
            dtype=self.dtype,
            device=self.device,
        )
        self._turns.reserve(kv.max_tokens)
        return kv

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,
        segments: Sequence[Segment],
        kv: KVCache,
        *,
        phase: Phase,
        tap: FeatureTap | None = None,
    ) -> Tensor:
        """Compute rows and store their keys and values.

        Each row attends to positions 0 up to its own in its own slot (a row of a `TreeSegment`: along its own path),
        so a segment's earlier positions must be in the cache already. Two segments must not share a slot.

        Args:
            token_ids: `[rows]` int64, the rows of all segments one after another.
            segments: where the rows belong; rows = Σ count.
            kv: a cache made by `new_kv_cache`.
            phase: `prefill` for prompts, `decode` for plain decoding, verify and draft steps alike: it selects
                kernels, and only rows of the same phase are comparable bit for bit.
            tap: is offered the hidden states after every layer.

        Returns:
            Hidden states after the final norm, `[rows, hidden_size]`.

        Raises:
            ValueError: segments do not fit the rows, the cache, or one another.
        """
        _check_rows(token_ids, segments, kv, phase)
        slots, cells, positions = addresses(segments, self.device)  # [rows] each
        placement = Placement(positions, kv.rows_of(slots, cells), self._plan(segments, kv, phase))
        return self.compute(token_ids, placement, kv, phase=phase, tap=tap)

    @torch.no_grad()
    def compute(
        self,
        token_ids: Tensor,  # [rows] int64
        placement: Placement,
        kv: KVCache,
        *,
        phase: Phase,
        tap: FeatureTap | None = None,
    ) -> Tensor:  # [rows, hidden_size]
        """Compute rows that have been placed: `forward` without its checks, and without anything from the host."""
        config, rows, basis = self.config, len(token_ids), self._weights.basis
        num_heads, num_turning = config.num_heads, config.num_heads + config.num_kv_heads
        positions, places, plan = placement
        turns = self._turns.at(positions, num_turning, num_turning + config.num_kv_heads)
        x = self._weights.embedding.index_select(0, token_ids)  # [rows, hidden_size]
        if basis is not None:
            x = basis.enter(x)
        for index, (layer, layer_kv) in enumerate(zip(self._weights.layers, kv.layers, strict=True)):
            normed = x if layer.input_norm is None else layer.input_norm(x)
            heads = layer.qkv(normed, phase).view(rows, -1, config.head_dim)
            if layer.head_norm is not None:
                turning = norm_heads(heads[:, :num_turning], layer.head_norm, config.rms_norm_eps)
                heads = torch.cat((turning, heads[:, num_turning:]), dim=1)
            heads = turn(heads, turns, self.dtype)
            stored = heads[:, num_heads:].reshape(len(places), config.head_dim)
            layer_kv.view(-1, config.head_dim).index_copy_(0, places, stored)
            x = x + layer.output(plan.attend(heads[:, :num_heads], layer_kv), phase)
            normed = x if layer.post_attention_norm is None else layer.post_attention_norm(x)
            gate, up = layer.gate_up(normed, phase).chunk(2, dim=1)
            x = x + layer.down(F.silu(gate).mul_(up), phase)
            if tap is not None and tap.wants(index + 1):
                tap.keep(index + 1, x if basis is None else basis.leave(x))
        return self._weights.final_norm(x if basis is None else basis.leave(x))

    def _plan(self, segments: Sequence[Segment], kv: KVCache, phase: Phase) -> AttentionPlan:
        window = self.config.sliding_window
        if phase == "prefill":
            return PrefillPlan(segments, kv, window)
        return decode_plan(segments, kv, self.config.num_heads // self.config.num_kv_heads, window)

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings `[n, hidden_size]` of tokens `[n]`."""
        return self._weights.embedding.index_select(0, token_ids)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits `[n, vocab_size]` of hidden states `[n, hidden_size]`."""
        return self._weights.head(hidden, "decode")


def norm_heads(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of every head by itself: `heads` `[rows, n, head_dim]`, `weight` `[n, head_dim]` → the same shape."""
    return F.rms_norm(heads, heads.shape[-1:], None, eps) * weight


def _check_rows(token_ids: Tensor, segments: Sequence[Segment], kv: KVCache, phase: Phase) -> None:
    if phase not in PHASES:
        raise ValueError(f"phase must be one of {PHASES}, got {phase!r}")
    rows = sum(segment.count for segment in segments)
    if token_ids.shape != (rows,) or rows == 0:
        raise ValueError(f"token_ids has shape {tuple(token_ids.shape)}, segments have {rows} rows")
    if len({segment.slot for segment in segments}) != len(segments):
        raise ValueError(f"two segments share a slot: {[segment.slot for segment in segments]}")
    for segment in segments:
        fits = 0 <= segment.slot < kv.num_slots and segment.start >= 0 and segment.stop <= kv.max_tokens
        if not fits or segment.count < 1:
            raise ValueError(f"{segment} does not fit {kv.num_slots} slots of {kv.max_tokens} tokens")
