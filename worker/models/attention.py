"""Causal attention of segments of rows against their slots of the KV cache.

Arrangements are chosen by phase and dtype, never by the number of rows; KV is read in multiples of `TOKEN_ALIGNMENT`
under an explicit mask, and KV heads are never repeated. In `decode` a few rows of many requests share a kernel call.
With bfloat16 the kernel sees the same shapes for a row whatever rows and requests come with it, so its result is the
same bit for bit: a query block is always `EXACT_BLOCK_ROWS` rows of the `g` query heads that share a KV head, filled up
with repeated rows, and the KV length follows from a row's own position. With float32 and float64, whose matrix products
depend on the number of rows anyway, a request's rows form one query block that reads as much KV as the longest request
next to it: half the time at several rows. In `prefill` every segment is a call of its own.

A plan is built once per forward and used by every layer. Knows nothing about projections or rotary embeddings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kv_cache import TOKEN_ALIGNMENT, KVCache
from worker.transfer import to_device

ROW_EXACT_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes whose decode attention gives a row the same bits in any company, on a CPU."""

EXACT_BLOCK_ROWS = 2
"""Rows of a query block in these dtypes: on AVX2 two rows cost what one costs (docs/decisions-model.md)."""


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

    @property
    def positions(self) -> Sequence[int]:
        """Absolute position of each row: what its keys and queries are rotated by."""
        return range(self.start, self.stop)


def addresses(segments: Sequence[Segment], device: torch.device) -> Tensor:  # [3, rows] int64
    """Return slot, cell (where its keys and values are stored) and position of every row."""
    slots = [segment.slot for segment in segments for _ in range(segment.count)]
    cells = [cell for segment in segments for cell in range(segment.start, segment.stop)]
    positions = [position for segment in segments for position in segment.positions]
    return to_device((slots, cells, positions), device, torch.int64)


class AttentionPlan(Protocol):
    """What one forward needs to attend, the same for all layers."""

    def attend(self, queries: Tensor, layer_kv: Tensor) -> Tensor:
        """Attend `queries` `[rows, num_heads, head_dim]` → `[rows, num_heads * head_dim]`.

        `layer_kv` is one layer of the cache, `[2, num_slots, num_kv_heads, max_tokens, head_dim]`, which holds the
        rows' own keys and values already.
        """


class Placement(NamedTuple):
    """Where the rows of one forward lie, and what they see."""

    positions: Tensor  # [rows] int64: absolute, what queries and keys are turned by
    places: Tensor  # [rows * 2 * num_kv_heads] int64: where keys and values are stored (`KVCache.rows_of`)
    plan: AttentionPlan


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


# ---- decode: a few rows of many requests ----


@dataclass(frozen=True)
class _Group:
    """Requests in neighbouring slots that share one kernel call."""

    first_slot: int
    length: int
    mask: Tensor  # [num_slots * num_kv_heads, blocks_per_slot, queries of a block, length]
    num_queries: int
    """Of all blocks together, `num_slots * num_kv_heads * blocks_per_slot * queries of a block`."""


class DecodePlan:
    """Rows of running requests: a few per request, all with their own view of the past.

    A query is one head of one row. Kernels want those that share a KV head side by side, so queries are put in that
    order by one index and results back by another.
    """

    def __init__(
        self, segments: Sequence[Segment], kv: KVCache, heads_per_kv: int, window: int | None = None
    ) -> None:
        dtype, device = kv.layers[0].dtype, kv.layers[0].device
        # Rows cannot be made independent of their company on a GPU, where the kernels are others: no padding there.
        is_exact = dtype in ROW_EXACT_DTYPES and device.type == "cpu"
        pieces = _pieces(segments, split=is_exact)
        self._groups: list[_Group] = []
        layout: list[_RunLayout] = []
        for run in _runs(pieces, of_one_length=is_exact):
            width, blocks = max(piece.count for piece in run), 1
            if is_exact:
                blocks = -(-width // EXACT_BLOCK_ROWS)
                width = blocks * EXACT_BLOCK_ROWS
            layout.append((width, tuple((piece.first_row, piece.count) for piece in run)))
            length = max(piece.length for piece in run)
            rows = [[piece.start + min(i, piece.count - 1) for i in range(width)] for piece in run]
            positions = to_device(rows, device)[:, None, :, None]
            shape = (len(run), kv.num_kv_heads, width, heads_per_kv, length)
            mask = causal_mask(positions, length, dtype, window).expand(shape)
            mask = mask.reshape(len(run) * kv.num_kv_heads, blocks, -1, length)
            self._groups.append(_Group(run[0].slot, length, mask, mask.shape[:3].numel()))
        gather, places = _query_order(tuple(layout), kv.num_kv_heads, heads_per_kv)
        self._gather = None if gather is None else to_device(gather, device)
        self._places = None if places is None else to_device(places, device)

    def attend(self, queries: Tensor, layer_kv: Tensor) -> Tensor:
        """See `AttentionPlan`."""
        rows, num_heads, head_dim = queries.shape
        flat = queries.reshape(rows * num_heads, head_dim)
        if self._gather is not None:
            flat = flat.index_select(0, self._gather)
        if len(self._groups) == 1:
            result = _attend_group(self._groups[0], flat, layer_kv)
        else:
            parts = torch.split(flat, [group.num_queries for group in self._groups])
            result = torch.cat(
                [_attend_group(*each, layer_kv) for each in zip(self._groups, parts, strict=True)]
            )
        if self._places is not None:
            result = result.index_select(0, self._places)
        return result.view(rows, num_heads * head_dim)


_RunLayout = tuple[int, tuple[tuple[int, int], ...]]
"""Rows that each slot of a run takes up, and of each its first row in the forward and how many are real."""


@lru_cache(maxsize=256)  # rounds of the same shape follow one another, and only positions differ
def _query_order(
    layout: tuple[_RunLayout, ...], num_kv_heads: int, heads_per_kv: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the query of the forward (row · heads + head) at each place of the blocks, and its place for each query.

    Padding repeats a slot's last row; its result is dropped. None for both where queries are in that order already.
    """
    heads = torch.arange(num_kv_heads * heads_per_kv).view(1, num_kv_heads, 1, heads_per_kv)
    queries, reals = [], []
    for width, slots in layout:
        begins = torch.tensor(slots)  # [num_slots, 2]
        columns = torch.arange(width).expand(len(slots), -1)  # [num_slots, width]
        rows = begins[:, :1] + torch.minimum(columns, begins[:, 1:] - 1)
        queries.append((rows[:, None, :, None] * heads.numel() + heads).flatten())
        is_real = columns < begins[:, 1:]
        reals.append(is_real[:, None, :, None].expand(-1, num_kv_heads, -1, heads_per_kv).flatten())
    gather, is_real = torch.cat(queries), torch.cat(reals)
    places = torch.empty(int(is_real.sum()), dtype=torch.long)
    places[gather[is_real]] = is_real.nonzero().squeeze(1)
    is_in_order = gather.tolist() == list(range(len(places)))
    return (None, None) if is_in_order else (gather, places)


def _attend_group(group: _Group, queries: Tensor, layer_kv: Tensor) -> Tensor:
    """Attend `queries` `[num_queries, head_dim]` of one group, in the order of its blocks → the same shape."""
    _, num_slots, kv_heads, max_tokens, head_dim = layer_kv.shape
    per_head = max_tokens * head_dim
    batch, blocks, _, length = group.mask.shape
    # Slots and KV heads collapse into one batch dimension without a copy; blocks share KV by a stride of 0.
    size, stride = (batch, blocks, length, head_dim), (per_head, 0, head_dim, 1)
    begin = layer_kv.storage_offset() + group.first_slot * kv_heads * per_head
    keys = layer_kv.as_strided(size, stride, begin)
    values = layer_kv.as_strided(size, stride, begin + num_slots * kv_heads * per_head)
    # Contiguous, or the kernel would be chosen by the layout that the projection left.
    queries = queries.contiguous().view(batch, blocks, -1, head_dim)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
    return out.reshape(-1, head_dim)


@dataclass(frozen=True)
class _Piece:
    """Rows of one segment that read the same stretch of KV."""

    length: int
    slot: int
    start: int
    count: int
    first_row: int
    """Of the forward."""


def _pieces(segments: Sequence[Segment], *, split: bool) -> list[_Piece]:
    """Return the segments as pieces; with `split` cut where the KV length that a row needs grows."""
    pieces: list[_Piece] = []
    row = 0
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            length = aligned(start + 1 if split else segment.stop)
            stop = min(length, segment.stop)
            pieces.append(_Piece(length, segment.slot, start, stop - start, row))
            row += stop - start
            start = stop
    return pieces


def _runs(pieces: Sequence[_Piece], *, of_one_length: bool) -> list[list[_Piece]]:
    """Sort pieces into runs of consecutive slots, of one length each if so asked."""
    runs: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda p: (p.length if of_one_length else 0, p.slot)):
        last = runs[-1][-1] if runs else None
        if last and last.slot + 1 == piece.slot and (not of_one_length or last.length == piece.length):
            runs[-1].append(piece)
        else:
            runs.append([piece])
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
