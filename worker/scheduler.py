"""Who runs: the waiting queue, admission to KV slots, and which prefill chunks fit the next step.

First come, first served. A request is admitted only with a slot, and a slot holds a whole context plus the deepest
tier's drafts, so a running request never runs out of KV. Knows nothing about models or depths in force. Owned by
the engine thread, but for `submit`, which any thread may call.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from worker.kv_cache import KVCache
from worker.prefix_cache import PrefixCache
from worker.request import Phase, PromptTooLong, QueueFull, Request


class PrefillChunk(NamedTuple):
    """Prompt tokens `[start, stop)` of one request, to be stored in this step."""

    request: Request
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after it."""
        return self.stop == len(self.request.prompt_ids)


class StepPlan(NamedTuple):
    """What one engine step does."""

    prefill: Sequence[PrefillChunk]
    decode: Sequence[Request]
    preempted_slots: Sequence[int] = ()
    """Slots taken away before this step."""


class Scheduler:
    """Keeps `running × num_draft_tokens + prefill <= max_num_batched_tokens` in every step.

    `num_draft_tokens` is the deepest tier's: the most rows that a round takes per request.

    `max_kv_tokens` bounds what running requests hold together; who outgrows it is preempted. At its default (a whole
    context for every slot) that never happens.
    """

    def __init__(
        self,
        kv: KVCache,
        *,
        max_running_requests: int,
        max_waiting_requests: int,
        max_context_tokens: int,
        prefill_chunk_tokens: int,
        max_num_batched_tokens: int,
        num_draft_tokens: int,
        max_kv_tokens: int,
    ) -> None:
        self._kv = kv
        self._prefixes = PrefixCache(kv, prefill_chunk_tokens)
        self._max_kv_tokens = max_kv_tokens
        self._max_running = max_running_requests
        self._max_waiting = max_waiting_requests
        self._max_context = max_context_tokens
        self._chunk = prefill_chunk_tokens
        self._max_batched = max_num_batched_tokens
        self._rows_per_request = num_draft_tokens
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # admitted, in order of admission: prefilling or decoding
        self.num_preemptions = 0

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            PromptTooLong: the prompt leaves no room for one token, or the answer may become longer than the context.
            QueueFull: as many wait as may.
        """
        if len(request.prompt_ids) >= self._max_context:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt_ids)} tokens; "
                f"at most {self._max_context - 1} leave room for an answer"
            )
        if len(request.prompt_ids) + request.params.max_tokens > self._max_context:
            raise PromptTooLong(
                f"{len(request.prompt_ids)} tokens of prompt and max_tokens {request.params.max_tokens} pass the "
                f"context of {self._max_context}"
            )
        with self._lock:
            # Requests that the next step will admit do not count as waiting.
            free = self._max_running - len(self._running)
            if len(self._waiting) >= self._max_waiting + free:
                raise QueueFull(f"{len(self._waiting)} requests are waiting already", retry_after_seconds=1.0)
            self._waiting.append(request)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting)

    def requests(self) -> Iterator[Request]:
        """Every request that is not finished, running first; a copy, so it may be finished while iterating."""
        with self._lock:
            return iter([*self._running, *self._waiting])

    def schedule(self) -> StepPlan:
        """Make room, admit what fits, then return this step's work."""
        preempted_slots = self._preempt()
        self._admit()
        decode = [request for request in self._running if request.phase is Phase.RUNNING]
        budget = self._max_batched - len(self._running) * self._rows_per_request
        chunks: list[PrefillChunk] = []
        for request in self._running:
            if request.phase is not Phase.PREFILL:
                continue
            # Chunks end at multiples of the chunk size, whatever else runs: the prompt's KV never depends on load.
            start = request.kv_length
            stop = min((start // self._chunk + 1) * self._chunk, len(request.prompt_ids))
            if stop - start > budget:
                break
            budget -= stop - start
            chunks.append(PrefillChunk(request, start, stop))
            if decode:
                break  # one chunk a step: running streams wait for no more than that
        return StepPlan(chunks, decode, preempted_slots)

    def remove(self, request: Request) -> None:
        """Take a request out, freeing its slot at once."""
        with self._lock:
            if request.slot is None:
                self._waiting.remove(request)
            else:
                self._running.remove(request)
        if request.slot is not None:
            self._kv.free(request.slot)
            request.slot = None

    def stored(self, request: Request) -> None:
        """Note that more of a prompt is stored: others with the same beginning may reuse it."""
        self._prefixes.stored(request.held_slot, request.prompt_ids, request.kv_length)

    def clear_slot(self, request: Request) -> None:
        """Wipe the slot of a request that failed: a NaN behind the mask would poison the slot's next owner."""
        self._prefixes.forget(request.held_slot)
        self._kv.clear(request.held_slot)

    def preempt(self, request: Request) -> int:
        """Take a request's slot away and queue it first; its KV waits in host memory, so nothing is recomputed.

        Returns the slot, for whoever else keeps something by it.
        """
        slot = request.held_slot
        request.swapped_kv = self._kv.swap_out(slot, request.kv_length)
        with self._lock:
            self._running.remove(request)
            request.phase, request.slot = Phase.WAITING, None
            self._waiting.appendleft(request)
        self._kv.free(slot)
        self.num_preemptions += 1
        return slot

    def kv_tokens_used(self) -> int:
        """KV rows that running requests hold, the deepest round's drafts included."""
        # tuple(): asked from other threads as well, while the engine thread changes the list.
        return sum(self._need(request) for request in tuple(self._running))

    def _need(self, request: Request) -> int:
        return request.committed + self._rows_per_request

    def _preempt(self) -> list[int]:
        """Give way, newest first, while running requests outgrow the KV budget. The oldest always stays."""
        slots = []
        while len(self._running) > 1 and self.kv_tokens_used() > self._max_kv_tokens:
            slots.append(self.preempt(self._running[-1]))
        return slots

    def _admit(self) -> None:
        with self._lock:
            while self._waiting and self._kv.num_free_slots and len(self._running) < self._max_running:
                request = self._waiting[0]
                if self._running and self.kv_tokens_used() + self._need(request) > self._max_kv_tokens:
                    break
                self._waiting.popleft()
                self._place(request)
                self._running.append(request)

    def _place(self, request: Request) -> None:
        if request.swapped_kv is not None:
            request.slot = self._prefixes.place([]).slot
            self._kv.swap_in(request.slot, request.swapped_kv)
            request.swapped_kv = None
            is_whole = request.kv_length >= len(request.prompt_ids)
            request.phase = Phase.RUNNING if is_whole else Phase.PREFILL
            return
        request.slot, request.cached_tokens = self._prefixes.place(request.prompt_ids)
        request.kv_length = request.cached_tokens
        request.phase = Phase.PREFILL
