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


class Scheduler:
    """Keeps `running × (deepest tier + 1) + prefill <= max_num_batched_tokens` in every step."""

    def __init__(
        self,
        kv: KVCache,
        *,
        max_running_requests: int,
        max_waiting_requests: int,
        max_context_tokens: int,
        prefill_chunk_tokens: int,
        max_num_batched_tokens: int,
        deepest_num_steps: int,
    ) -> None:
        self._kv = kv
        self._max_running = max_running_requests
        self._max_waiting = max_waiting_requests
        self._max_context = max_context_tokens
        self._chunk = prefill_chunk_tokens
        self._max_batched = max_num_batched_tokens
        self._rows_per_request = deepest_num_steps + 1
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # admitted, in order of admission: prefilling or decoding

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            PromptTooLong: the prompt leaves no room for one token.
            QueueFull: as many wait as may.
        """
        if len(request.prompt_ids) >= self._max_context:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt_ids)} tokens; "
                f"at most {self._max_context - 1} leave room for an answer"
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
        """Admit what fits, then return this step's work."""
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
        return StepPlan(chunks, decode)

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

    def _admit(self) -> None:
        with self._lock:
            while self._waiting and self._kv.num_free_slots and len(self._running) < self._max_running:
                request = self._waiting.popleft()
                request.slot = self._kv.allocate()
                request.phase = Phase.PREFILL
                self._running.append(request)
