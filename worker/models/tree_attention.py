"""Attention of rows that branch: each sees the text of its slot and its own path through a draft tree.

The order of summation decides a row's last bits. So a row's keys and values are gathered in the order of positions, as
they would lie in a chain, and the kernel sees the shapes that `DecodePlan` gives it: a node's result is bit for bit
what plain decoding of its path gives (DESIGN §7). The price is a copy of what each row reads, in every layer. A path
that is accepted afterwards has only to be moved (`KVCache.compact`). Knows nothing about where trees come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kv_cache import KVCache
from worker.models.attention import (
    EXACT_BLOCK_ROWS,
    AttentionPlan,
    DecodePlan,
    Segment,
    aligned,
    causal_mask,
)
from worker.transfer import to_device

MAX_GATHERED_TOKENS = 1 << 16
"""KV tokens that one kernel call gathers at most: bounds the copy's memory (50 MB with 3 bfloat16 KV heads of 64)."""


@dataclass(frozen=True)
class TreeSegment(Segment):
    """Rows of one request's draft tree: row i is stored in cell `start + i`, at a position that its depth gives.

    A row sees the cells below `trunk`, then those of its path. Cells from `trunk` to `start` hold earlier nodes.
    """

    trunk: int
    paths: tuple[tuple[int, ...], ...]
    """Of each row the cells from the trunk on, its own last."""

    def __post_init__(self) -> None:
        """Raise ValueError unless every path ends in its row's own cell."""
        if [path[-1] for path in self.paths] != list(range(self.start, self.stop)):
            raise ValueError(f"{self}: paths must end in their rows' own cells")

    @property
    def positions(self) -> Sequence[int]:
        """Absolute position of each row: trunk and path laid end to end."""
        return [self.trunk + len(path) - 1 for path in self.paths]


def decode_plan(
    segments: Sequence[Segment], kv: KVCache, heads_per_kv: int, window: int | None = None
) -> AttentionPlan:
    """Return the plan of a decode forward: gathered rows only where a segment branches."""
    if any(isinstance(segment, TreeSegment) for segment in segments):
        return TreePlan(segments, kv, heads_per_kv, window)
    return DecodePlan(segments, kv, heads_per_kv, window)


class _View(NamedTuple):
    """What one row sees: cells `0 … trunk - 1` of its slot, then its path."""

    slot: int
    trunk: int
    path: Sequence[int]

    @property
    def position(self) -> int:
        return self.trunk + len(self.path) - 1


_Member = tuple[int, _View]
"""A row of the forward and what it sees."""


class _Group(NamedTuple):
    """Rows that read the same length of KV: one kernel call."""

    rows: Tensor  # [n] int64: of the forward
    places: Tensor  # [2 * n * num_kv_heads * length] int64: keys, then values, in a layer as a list of heads
    mask: Tensor  # [n * num_kv_heads, 1, EXACT_BLOCK_ROWS * heads_per_kv, length]


class TreePlan:
    """Rows of running requests, some of them in trees; plain segments may be among them."""

    def __init__(
        self, segments: Sequence[Segment], kv: KVCache, heads_per_kv: int, window: int | None = None
    ) -> None:
        self._heads_per_kv = heads_per_kv
        by_length: dict[int, list[_Member]] = {}
        views = (view for segment in segments for view in _views(segment))
        for row, view in enumerate(views):
            by_length.setdefault(aligned(view.position + 1), []).append((row, view))
        self._groups = [
            _group(part, length, kv, heads_per_kv, window)
            for length, members in by_length.items()
            for part in _parts(members, max(1, MAX_GATHERED_TOKENS // length))
        ]

    def attend(self, queries: Tensor, layer_kv: Tensor) -> Tensor:
        """See `AttentionPlan`."""
        rows, num_heads, head_dim = queries.shape
        outputs = queries.new_empty(rows, num_heads * head_dim)
        stored = layer_kv.view(-1, head_dim)
        for group in self._groups:
            batch, length = group.mask.shape[0], group.mask.shape[-1]
            keys, values = stored.index_select(0, group.places).view(2, batch, 1, length, head_dim)
            block = queries.index_select(0, group.rows).view(batch, 1, self._heads_per_kv, head_dim)
            block = block.repeat(1, 1, EXACT_BLOCK_ROWS, 1)
            out = F.scaled_dot_product_attention(block, keys, values, attn_mask=group.mask)
            outputs[group.rows] = out[:, 0, : self._heads_per_kv].reshape(len(group.rows), -1)
        return outputs


def _parts(members: Sequence[_Member], size: int) -> list[Sequence[_Member]]:
    return [members[start : start + size] for start in range(0, len(members), size)]


def _views(segment: Segment) -> list[_View]:
    if isinstance(segment, TreeSegment):
        return [_View(segment.slot, segment.trunk, path) for path in segment.paths]
    return [_View(segment.slot, position, [position]) for position in segment.positions]


def _group(
    members: Sequence[_Member], length: int, kv: KVCache, heads_per_kv: int, window: int | None
) -> _Group:
    dtype, device = kv.layers[0].dtype, kv.layers[0].device
    cells = torch.arange(length).repeat(len(members), 1)
    for seen, (_, view) in zip(cells, members, strict=True):
        seen[view.trunk : view.position] = torch.tensor(view.path[:-1], dtype=torch.long)
        seen[view.position :] = view.path[-1]  # behind its own cell the mask hides everything
    slots = torch.tensor([view.slot for _, view in members]).repeat_interleave(length)
    places = kv.rows_of(to_device(slots, device), to_device(cells.flatten(), device))
    places = places.view(len(members), length, 2, kv.num_kv_heads).permute(2, 0, 3, 1).flatten()
    positions = to_device([view.position for _, view in members], device)
    shape = (len(members), kv.num_kv_heads, EXACT_BLOCK_ROWS * heads_per_kv, length)
    mask = causal_mask(positions[:, None, None], length, dtype, window).expand(shape)
    rows = to_device([row for row, _ in members], device)
    return _Group(rows, places, mask.reshape(-1, 1, *shape[2:]))
