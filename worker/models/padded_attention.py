"""Decode rows in a shape that does not depend on what they hold: the same rows per request, filled up.

Everything that differs from one round to the next is a tensor (`PaddedInputs`), so a captured graph can be replayed
over it. A request that has fewer rows, and a request that only fills the batch up, store what they compute in the
cache's padding slot, which nobody reads. Attention copies each request's KV out of its slot, since a graph cannot be
told another address; what is read is bounded by `context` and masked by position.

Rows are computed like `DecodePlan`'s without the exact grade's blocks: the same up to rounding (DESIGN §7, GPU). Knows
nothing about graphs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kv_cache import KVCache
from worker.models.attention import Placement, causal_mask


@dataclass(frozen=True)
class PaddedInputs:
    """What one forward reads; written in place before every replay."""

    tokens: Tensor  # [bucket, width] int64; any valid id where there is no row
    spans: Tensor  # [bucket, 3] int64: slot, first position, rows; a filling request has the padding slot and no row
    context: int
    """Tokens of every slot that attention reads; at least the end of every span."""
    hidden: Tensor | None = None  # [bucket, width, hidden_size]: what a draft head reads beside the tokens

    @property
    def last_rows(self) -> Tensor:  # [bucket] int64
        """Each request's last row, among all rows."""
        bucket, width = self.tokens.shape
        first = torch.arange(0, bucket * width, width, device=self.tokens.device)
        return first + (self.spans[:, 2] - 1).clamp(min=0)


@dataclass(frozen=True)
class PaddedRows:
    """Where the rows of padded inputs lie, `[bucket * width]` int64 each."""

    positions: Tensor
    """Absolute; of a filling row some position within the context."""
    slots: Tensor
    cells: Tensor
    """Where in its slot a row's keys and values are stored."""

    @classmethod
    def of(cls, inputs: PaddedInputs, padding_slot: int) -> "PaddedRows":
        """Lay the rows out."""
        bucket, width = inputs.tokens.shape
        slots, starts, counts = inputs.spans.unsqueeze(-1).unbind(1)  # [bucket, 1] each
        columns = torch.arange(width, device=inputs.tokens.device).expand(bucket, width)
        is_row = columns < counts
        positions = (starts + columns).clamp(max=inputs.context - 1)
        return cls(
            positions.flatten(),
            # Not where(): it would fetch the number from the host, which a graph cannot.
            slots.expand(bucket, width).masked_fill(~is_row, padding_slot).flatten(),
            torch.where(is_row, positions, columns).flatten(),
        )

    def among_all(self, max_tokens: int) -> Tensor:  # [bucket * width] int64
        """Return each row's cell among those of all slots, one after another."""
        return self.slots * max_tokens + self.cells


def place(inputs: PaddedInputs, kv: KVCache, heads_per_kv: int, window: int | None = None) -> Placement:
    """Return the placement of a padded forward."""
    rows = PaddedRows.of(inputs, kv.padding_slot)
    plan = _PaddedPlan(inputs, rows.positions, kv.layers[0].dtype, heads_per_kv, window)
    return Placement(rows.positions, kv.rows_of(rows.slots, rows.cells), plan)


class _PaddedPlan:
    """Attends all rows in one kernel call: a block per request and KV head."""

    def __init__(
        self,
        inputs: PaddedInputs,
        positions: Tensor,
        dtype: torch.dtype,
        heads_per_kv: int,
        window: int | None,
    ) -> None:
        self._shape = inputs.tokens.shape
        self._slots = inputs.spans[:, 0].contiguous()
        self._context = inputs.context
        mask = causal_mask(positions.view(self._shape), inputs.context, dtype, window)
        # [bucket, 1, width * heads_per_kv, context]: a block's queries are the rows' heads, row after row
        self._mask = mask.repeat_interleave(heads_per_kv, dim=1).unsqueeze(1)

    def attend(self, queries: Tensor, layer_kv: Tensor) -> Tensor:
        """See `AttentionPlan`."""
        bucket, width = self._shape
        kv_heads, head_dim = layer_kv.shape[2], layer_kv.shape[4]
        blocks = queries.view(bucket, width, kv_heads, -1, head_dim).transpose(1, 2)
        # [2, bucket, kv_heads, context, head_dim]
        past = layer_kv[:, :, :, : self._context].index_select(1, self._slots)
        out = F.scaled_dot_product_attention(
            blocks.reshape(bucket, kv_heads, -1, head_dim), past[0], past[1], attn_mask=self._mask
        )
        return out.reshape(bucket, kv_heads, width, -1, head_dim).transpose(1, 2).reshape(bucket * width, -1)
