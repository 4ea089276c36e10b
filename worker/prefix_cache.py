"""Prefix reuse: which slot already holds the beginning of a prompt.

A prompt's KV is stored in fixed chunks at absolute positions, so an equal chunk behind equal chunks has the very same
KV: only whole chunks that the prefill path stored are reused, and a reused prefix gives bit for bit what a cold one
gives (DESIGN §7). Generated tokens are never taken for a prompt: the decode path stored them. Slots that are free keep
their content until they are needed. Knows nothing about requests or schedules; owned by the engine thread.
"""

from collections.abc import Sequence
from typing import NamedTuple

from worker.kv_cache import KVCache


class Placement(NamedTuple):
    """A slot taken for a prompt, and how much of the prompt it holds already."""

    slot: int
    cached_tokens: int


class PrefixCache:
    """Allocates slots so that prompts find their beginnings."""

    def __init__(self, kv: KVCache, chunk_tokens: int) -> None:
        self._kv = kv
        self._chunk = chunk_tokens
        self._stored: dict[int, list[int]] = {}  # slot -> prompt tokens of whole chunks, oldest use first

    def place(self, prompt_ids: Sequence[int]) -> Placement:
        """Take the free slot with the longest stored beginning; copy it from a busy slot if only that has it.

        At least the last prompt token is left to compute: its logits are needed.

        Raises:
            KVCacheFull: no slot is free.
        """
        usable = (len(prompt_ids) - 1) // self._chunk * self._chunk
        best, length = -1, 0
        for slot, stored in self._stored.items():
            common = self._common(stored, prompt_ids, usable)
            # Of equal matches a free slot is better: nothing needs to be copied.
            if common > length or (common == length > 0 and self._kv.is_free(slot)):
                best, length = slot, common
        if length and self._kv.is_free(best):
            slot = self._kv.allocate(best)
        else:
            slot = self._kv.allocate(self._least_recently_used())
            if length:
                self._kv.copy(best, slot, length)
        self._stored.pop(slot, None)
        self._stored[slot] = list(prompt_ids[:length])
        return Placement(slot, length)

    def stored(self, slot: int, prompt_ids: Sequence[int], length: int) -> None:
        """Note that the first `length` prompt tokens of a slot are stored now; whole chunks of them count."""
        whole = length // self._chunk * self._chunk
        if whole > len(self._stored[slot]):
            self._stored[slot] = list(prompt_ids[:whole])

    def forget(self, slot: int) -> None:
        """The slot's content is not to be trusted (an error), or was cleared."""
        self._stored.pop(slot, None)

    def _common(self, stored: Sequence[int], prompt_ids: Sequence[int], usable: int) -> int:
        length = 0
        limit = min(len(stored), usable)
        while length + self._chunk <= limit:
            end = length + self._chunk
            if stored[length:end] != prompt_ids[length:end]:
                break
            length = end
        return length

    def _least_recently_used(self) -> int | None:
        """A free slot, an empty one first; None if there is none (then `allocate` says so)."""
        free = [slot for slot in range(self._kv.num_slots) if self._kv.is_free(slot)]
        empty = [slot for slot in free if not self._stored.get(slot)]
        if empty:
            return empty[0]
        return next((slot for slot in self._stored if self._kv.is_free(slot)), None)
