"""Keys and values of running requests: one contiguous region (slot) per request, and a draft head's features there.

Knows nothing about requests, rollback or schedules. How many tokens of a slot are valid is a length kept by the
caller: rollback moves that length and touches nothing here, and stale rows behind it are overwritten or masked.
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from worker.transfer import to_device

TOKEN_ALIGNMENT = 64
"""Attention reads KV in multiples of this many tokens, so a row's result does not depend on its neighbours' lengths."""


class KVCacheFull(RuntimeError):
    """No slot is free. Admission must keep this from happening; it is not a client's error."""


def kv_cache_bytes(
    *,
    num_layers: int,
    num_slots: int,
    num_kv_heads: int,
    head_dim: int,
    max_tokens: int,
    dtype: torch.dtype,
) -> int:
    """Return what a cache of these sizes takes, before it is made."""
    return 2 * num_layers * num_slots * num_kv_heads * _aligned(max_tokens) * head_dim * dtype.itemsize


def _aligned(tokens: int) -> int:
    return -(-tokens // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT


class KVCache:
    """A fixed number of slots of `max_tokens` tokens each. Owned by the engine thread.

    `layers[i]` is `[2, num_slots, num_kv_heads, max_tokens, head_dim]`: keys at index 0, values at index 1. All
    memory is taken and zeroed at construction: a masked row is multiplied by an attention weight of 0, so it must
    never hold NaN.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_slots": num_slots,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_tokens": max_tokens,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"KVCache: {name} must be at least 1, got {size}")
        self.num_slots = num_slots
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.max_tokens = _aligned(max_tokens)
        """Room per slot, rounded up to `TOKEN_ALIGNMENT`."""
        self._slots_stored = num_slots
        shape = (2, num_slots, num_kv_heads, self.max_tokens, head_dim)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.features: Tensor | None = None  # [1, num_slots, 1, max_tokens, width]
        """What `keep_features` made room for: it is copied, swapped and cleared with keys and values."""
        self._free = list(range(num_slots))  # a heap: low slots first keeps running requests side by side
        self._is_free = [True] * num_slots

    def keep_features(self, width: int) -> None:
        """Make room for `width` numbers per token beside keys and values, of the same dtype."""
        layer = self.layers[0]
        shape = (1, self._slots_stored, 1, self.max_tokens, width)
        self.features = torch.zeros(shape, dtype=layer.dtype, device=layer.device)

    @property
    def _stored(self) -> list[Tensor]:
        """Everything kept per token, `[…, num_slots, …, max_tokens, …]` each."""
        return self.layers if self.features is None else [*self.layers, self.features]

    def add_padding_slot(self) -> None:
        """Make room for one slot more, which is never handed out: what only fills a shape up is stored there.

        Before anything is stored: the contents are made anew, all zeros.
        """
        self._slots_stored = self.num_slots + 1
        for index, layer in enumerate(self.layers):
            self.layers[index] = layer.new_zeros(2, self._slots_stored, *layer.shape[2:])
        if self.features is not None:
            self.keep_features(self.features.shape[-1])

    @property
    def padding_slot(self) -> int:
        """The slot that belongs to no request; RuntimeError where `add_padding_slot` was not called."""
        if self._slots_stored == self.num_slots:
            raise RuntimeError("this cache has no padding slot")
        return self.num_slots

    @property
    def num_free_slots(self) -> int:
        """Slots that `allocate` can still hand out."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and features of all slots."""
        return sum(tensor.nbytes for tensor in self._stored)

    def keys(self, layer: int) -> Tensor:
        """Return the keys of one layer, a view `[num_slots, num_kv_heads, max_tokens, head_dim]`."""
        return self.layers[layer][0]

    def values(self, layer: int) -> Tensor:
        """Return the values of one layer, a view `[num_slots, num_kv_heads, max_tokens, head_dim]`."""
        return self.layers[layer][1]

    def rows_of(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return where tokens lie in a layer taken as a list of heads, `layer.view(-1, head_dim)`.

        Args:
            slots: `[rows]` int64.
            positions: `[rows]` int64.

        Returns:
            `[rows * 2 * num_kv_heads]`: of each row its keys head by head, then its values.
        """
        heads = torch.arange(self.num_kv_heads, device=slots.device)
        sides = torch.arange(2, device=slots.device)[None, :, None] * self._slots_stored  # keys, values
        head = (sides + slots[:, None, None]) * self.num_kv_heads + heads  # [rows, 2, num_kv_heads]
        return (head * self.max_tokens + positions[:, None, None]).flatten()

    def is_free(self, slot: int) -> bool:
        """Whether `allocate` could hand this slot out."""
        return self._is_free[slot]

    def allocate(self, slot: int | None = None) -> int:
        """Take a slot, the lowest free one if none is named. Its old content stays.

        Raises:
            KVCacheFull: every slot is taken, or the named one is.
        """
        if not self._free or (slot is not None and not self._is_free[slot]):
            raise KVCacheFull(
                f"all {self.num_slots} KV slots are taken" if slot is None else f"slot {slot} is taken"
            )
        if slot is None:
            slot = heapq.heappop(self._free)
        else:
            self._free.remove(slot)
            heapq.heapify(self._free)
        self._is_free[slot] = False
        return slot

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        for layer in self._stored:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def compact(self, slot: int, start: int, cells: Sequence[int]) -> None:
        """Move the tokens at `cells` to `start`, `start + 1`, …: an accepted path of a draft tree becomes a chain.

        Keys are rotated by their position, not by their cell, so moving them is a copy, bit for bit.
        """
        if list(cells) == list(range(start, start + len(cells))):
            return
        index = to_device(list(cells), self.layers[0].device)
        for layer in self._stored:
            # Indexing copies first, so a target may be another token's source.
            layer[:, slot, :, start : start + len(cells)] = layer[:, slot].index_select(2, index)

    def swap_out(
        self, slot: int, length: int
    ) -> list[Tensor]:  # per layer [2, num_kv_heads, length, head_dim], then features [1, 1, length, width]
        """Return a copy of the first `length` tokens in host memory, for `swap_in` later: bit for bit the same."""
        return [layer[:, slot, :, :length].to("cpu", copy=True) for layer in self._stored]

    def swap_in(self, slot: int, stored: list[Tensor]) -> None:
        """Put back what `swap_out` returned, into any slot."""
        for layer, content in zip(self._stored, stored, strict=True):
            layer[:, slot, :, : content.shape[2]] = content.to(layer.device)

    def free(self, slot: int) -> None:
        """Give a slot back.

        Raises:
            ValueError: no such slot, or it is free already.
        """
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} is outside 0..{self.num_slots - 1}")
        if self._is_free[slot]:
            raise ValueError(f"slot {slot} is free already")
        self._is_free[slot] = True
        heapq.heappush(self._free, slot)

    def clear(self, slot: int) -> None:
        """Zero a slot's content: after an error it may hold NaN, which a mask does not hide."""
        for layer in self._stored:
            layer[:, slot].zero_()

    def check_integrity(self) -> None:
        """Check an idle cache: every slot free exactly once, no NaN or infinity stored.

        Raises:
            RuntimeError: a slot leaked or was freed twice, or a value is not finite.
        """
        if sorted(self._free) != list(range(self.num_slots)) or not all(self._is_free):
            taken = sorted(set(range(self.num_slots)) - set(self._free))
            raise RuntimeError(f"KV slots not given back: {taken}; free list: {sorted(self._free)}")
        for index, layer in enumerate(self._stored):
            if not bool(torch.isfinite(layer).all()):
                name = f"KV of layer {index}" if index < len(self.layers) else "a feature"
                raise RuntimeError(f"{name} holds NaN or infinity")
