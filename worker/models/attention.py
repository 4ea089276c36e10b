"""Causal attention of segments of rows against their slots of the KV cache.

Arrangements are chosen by phase and dtype, never by the number of rows; KV is read in multiples of `TOKEN_ALIGNMENT`
under an explicit mask, and KV heads are never repeated. In `decode` a few rows of many requests share a kernel call.
With bfloat16 every row is its own query block of the `g` query heads that share a KV head, so a row's result is bit for
bit the same whatever rows and requests come with it. With float32 and float64, whose matrix products depend on the
number of rows anyway, a request's rows form one query block: half the time at several rows. In `prefill` every segment
is a call of its own.

A plan is built once per forward and used by every layer. Knows nothing about projections or rotary embeddings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kv_cache import TOKEN_ALIGNMENT, KVCache

ROW_EXACT_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes whose decode attention treats every row on its own."""


@dataclass(frozen=True)
class Segment:
    """Rows of one request at absolute positions `start … start + count - 1`, in KV slot `slot`."""

    slot: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        """First position behind the segment."""
        return self.start + self.count


class AttentionPlan(Protocol):
    """What one forward needs to attend, the same for all layers."""

    def attend(self, queries: Tensor, layer_kv: Tensor) -> Tensor:
        """Attend `queries` `[rows, num_heads, head_dim]` → `[rows, num_heads * head_dim]`.

        `layer_kv` is one layer of the cache, `[2, num_slots, num_kv_heads, max_tokens, head_dim]`, which holds the
        rows' own keys and values already.
        """


def aligned(tokens: int) -> int:
    """Round a length up to the multiple that attention reads."""
    return -(-tokens // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT


def causal_mask(
    positions: Tensor, length: int, dtype: torch.dtype, window: int | None = None
) -> Tensor:  # positions.shape + [length]
    """Return 0 where a key position is at most the row's, and less than `window` before it, else −inf."""
    keys, rows = torch.arange(length, device=positions.device), positions.unsqueeze(-1)
    hidden = keys > rows
    if window is not None:
        hidden |= keys <= rows - window
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)


# ---- decode: every row on its own ----


@dataclass(frozen=True)
class _Group:
    """Requests in neighbouring slots that share one kernel call."""

    first_slot: int
    num_slots: int
    rows_per_slot: int
    length: int
    first_row: int
    """Where the group's rows begin in the padded row order."""
    blocks_per_slot: int
    """1: a request's rows are one query block; `rows_per_slot`: each row is its own."""
    mask: Tensor  # [num_slots * num_kv_heads, blocks_per_slot, queries of a block, length]


class DecodePlan:
    """Rows of running requests: a few per request, all with their own view of the past."""

    def __init__(
        self, segments: Sequence[Segment], kv: KVCache, heads_per_kv: int, window: int | None = None
    ) -> None:
        dtype, device = kv.layers[0].dtype, kv.layers[0].device
        offsets = _offsets(segments)
        order = sorted(range(len(segments)), key=lambda index: segments[index].slot)
        gather: list[int] = []  # padded order -> row of the forward
        scatter = [0] * sum(segment.count for segment in segments)  # row of the forward -> padded order
        self._groups: list[_Group] = []
        for run in _neighbours([segments[index] for index in order]):
            members = [order.pop(0) for _ in run]
            width = max(segment.count for segment in run)
            positions: list[int] = []
            first_row = len(gather)
            for index, segment in zip(members, run, strict=True):
                for column in range(width):
                    # Padding repeats the segment's last row; its result is dropped.
                    real = min(column, segment.count - 1)
                    if column == real:
                        scatter[offsets[index] + real] = len(gather)
                    gather.append(offsets[index] + real)
                    positions.append(segment.start + real)
            length = aligned(max(segment.stop for segment in run))
            rows = torch.tensor(positions, device=device).view(len(run), 1, width, 1)
            blocks = width if dtype in ROW_EXACT_DTYPES else 1
            shape = (len(run), kv.num_kv_heads, width, heads_per_kv, length)
            mask = causal_mask(rows, length, dtype, window).expand(shape)
            mask = mask.reshape(len(run) * kv.num_kv_heads, blocks, -1, length)
            self._groups.append(_Group(run[0].slot, len(run), width, length, first_row, blocks, mask))
        in_order = gather == list(range(len(scatter)))
        self._gather = None if in_order else torch.tensor(gather, device=device)
        self._scatter = None if in_order else torch.tensor(scatter, device=device)

    def attend(self, queries: Tensor, layer_kv: Tensor) -> Tensor:
        """See `AttentionPlan`."""
        if self._gather is not None:
            queries = queries.index_select(0, self._gather)
        outputs = [_attend_group(group, queries, layer_kv) for group in self._groups]
        result = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return result if self._scatter is None else result.index_select(0, self._scatter)


def _attend_group(group: _Group, queries: Tensor, layer_kv: Tensor) -> Tensor:
    """Attend the rows of one group → `[num_slots * rows_per_slot, num_heads * head_dim]`."""
    _, num_heads, head_dim = queries.shape
    n, width = group.num_slots, group.rows_per_slot
    kv_heads = layer_kv.shape[2]
    heads_per_kv = num_heads // kv_heads
    blocks = queries[group.first_row : group.first_row + n * width]
    blocks = blocks.reshape(n, width, kv_heads, heads_per_kv, head_dim).transpose(1, 2)
    # Contiguous, or the kernel would be chosen by the layout that the projection left.
    blocks = blocks.reshape(n * kv_heads, group.blocks_per_slot, -1, head_dim).contiguous()
    # Slots and KV heads collapse into one batch dimension without a copy; blocks share KV by a stride of 0.
    past = layer_kv[:, group.first_slot : group.first_slot + n, :, : group.length].flatten(1, 2)
    past = past.unsqueeze(2).expand(-1, -1, group.blocks_per_slot, -1, -1)
    # past: [2, n * kv_heads, blocks_per_slot, length, head_dim]
    out = F.scaled_dot_product_attention(blocks, past[0], past[1], attn_mask=group.mask)
    out = out.view(n, kv_heads, width, heads_per_kv, head_dim).transpose(1, 2)
    return out.reshape(n * width, num_heads * head_dim)


def _neighbours(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Split segments sorted by slot into runs of consecutive slots."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs and runs[-1][-1].slot + 1 == segment.slot:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return runs


# ---- prefill: one block per segment ----


class PrefillPlan:
    """Chunks of prompts: many rows per segment, one kernel call each."""

    def __init__(self, segments: Sequence[Segment], kv: KVCache, window: int | None = None) -> None:
        dtype, device = kv.layers[0].dtype, kv.layers[0].device
        self._segments = list(segments)
        self._masks: list[Tensor] = []  # each [count, length]
        for segment in segments:
            positions = torch.arange(segment.start, segment.stop, device=device)
            self._masks.append(causal_mask(positions, aligned(segment.stop), dtype, window))

    def attend(self, queries: Tensor, layer_kv: Tensor) -> Tensor:
        """See `AttentionPlan`."""
        blocks = torch.split(queries, [segment.count for segment in self._segments])
        outputs = [
            _attend_segment(segment, mask, block, layer_kv)
            for segment, mask, block in zip(self._segments, self._masks, blocks, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_segment(segment: Segment, mask: Tensor, queries: Tensor, layer_kv: Tensor) -> Tensor:
    """Attend the rows of one segment → `[count, num_heads * head_dim]`."""
    count, num_heads, head_dim = queries.shape
    kv_heads = layer_kv.shape[2]
    heads_per_kv = num_heads // kv_heads
    # [kv_heads, heads_per_kv, count, head_dim]: query heads of one KV head are the kernel's heads
    block = queries.transpose(0, 1).contiguous().view(kv_heads, heads_per_kv, count, head_dim)
    past = layer_kv[:, segment.slot, :, None, : mask.shape[1]].expand(-1, -1, heads_per_kv, -1, -1)
    out = F.scaled_dot_product_attention(block, past[0], past[1], attn_mask=mask)
    return out.permute(2, 0, 1, 3).reshape(count, num_heads * head_dim)


def _offsets(segments: Sequence[Segment]) -> list[int]:
    """Return the row of the forward at which each segment begins."""
    offsets, total = [], 0
    for segment in segments:
        offsets.append(total)
        total += segment.count
    return offsets
