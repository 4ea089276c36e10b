"""One generation as the event loop sees it: tokens from the engine's thread in, pieces of text out.

The bridge between the two worlds. The engine's thread only appends to a list and wakes the loop; a reader that is
slow finds several chunks merged into one piece, so what waits is never more than the request's own tokens.
A stop string never reaches the reader: of the text only what may still become one is held back. Whatever ends the
reading (a finish, a disconnect, an error) the engine is told at once. Knows no wire format.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from uuid import uuid4

from worker.api.errors import ApiError
from worker.api.served import ServingEngine
from worker.metrics import ServerMetrics, TokenTimes
from worker.request import (
    EngineStopped,
    FinishReason,
    PromptTooLong,
    QueueFull,
    Request,
    RequestRejected,
    SamplingParams,
    TokenChunk,
)
from worker.stopping import StopScanner, StopStrings
from worker.tokenization import Tokenizer

CLIENT_CLOSED_REQUEST = 499
"""Status of an answer whose client asked for its end, or has left."""


@dataclass(frozen=True)
class Piece:
    """What became certain since the last piece."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    matched_stop: int | str | None = None


class Generation:
    """A submitted request and its output so far. Lives on the event loop; only `_sink` runs elsewhere."""

    def __init__(
        self,
        engine: ServingEngine,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        stops: Sequence[str] = (),
        timeout_seconds: float | None = None,
        metrics: ServerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = uuid4().hex
        self.names: tuple[str, ...] = ()
        """The ids under which clients know it; given before submission."""
        self.was_aborted = False
        """Whether a client asked for its end."""
        self.request = Request(
            id=self.id,
            prompt_ids=prompt_ids,
            params=params,
            sink=self._sink,
            eos_token_ids=tokenizer.eos_token_ids,
            # The engine looks for stops itself, so that ids and counts end where the text does.
            stop_strings=StopStrings(stops, tokenizer.detokenizer()) if stops else None,
            timeout_seconds=timeout_seconds,
        )
        self.text = ""
        self.output_ids: list[int] = []
        self.finish: Piece | None = None
        """The last piece, once there is one."""
        self._engine = engine
        self._detokenizer = tokenizer.detokenizer()
        self._scanner = StopScanner(stops)
        self._metrics = metrics
        self._clock = clock
        self._started = clock()
        self._times = TokenTimes(metrics, self._started)
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._pending: list[TokenChunk] = []
        self._open = False  # between submission and close

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since submission."""
        return self._clock() - self._started

    def submit(self) -> None:
        """Hand the request to the engine.

        Raises:
            ApiError: 429 the queue is full, 400 the prompt is too long, 503 the engine is stopping.
        """
        self._open = True
        try:
            self._engine.submit(self.request)
        except RequestRejected as rejected:
            self._open = False
            raise _refusal(rejected) from None

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the output as it grows; the last piece has a finish reason."""
        while self.finish is None:
            await self._arrived.wait()
            self._arrived.clear()
            chunks, self._pending = self._pending, []
            if not chunks:
                continue
            piece = self._assemble(chunks)
            self.text += piece.text
            self.output_ids += piece.token_ids
            if piece.finish_reason is not None:
                self.finish = piece
                self._metrics.request_duration.observe(self.elapsed_seconds)
            yield piece

    async def collect(self) -> None:
        """Read to the end; then `text`, `output_ids` and `finish` are complete."""
        async for _ in self.pieces():
            pass

    def abort(self) -> bool:
        """End it because a client says so; False if it has ended already. Its reader gets the end as a piece."""
        if self.finish is None and self._open and self._engine.abort(self.id):
            self.was_aborted = True
            return True
        return False

    def close(self) -> None:
        """Tell the engine that nobody reads any more; does nothing before submission, after the end, or twice."""
        if self.finish is None and self._open:
            self._engine.abort(self.id)
        self._open = False

    def _sink(self, chunk: TokenChunk) -> None:
        """Take a chunk on the engine's thread."""
        # A closed loop means that the server is gone: there is nobody to tell.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, chunk)

    def _receive(self, chunk: TokenChunk) -> None:
        if self._open:
            self._times.arrived(len(chunk.token_ids), self._clock())
            self._pending.append(chunk)
            self._arrived.set()

    def _assemble(self, chunks: list[TokenChunk]) -> Piece:
        """Merge chunks into one piece. The stop token that ended the request has an id but no text."""
        last = chunks[-1]
        token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        has_text = token_ids[:-1] if isinstance(last.matched_stop, int) else token_ids
        text = self._scanner.push(self._detokenizer.push(has_text))
        if last.finish_reason is not None:
            text += self._scanner.push(self._detokenizer.finish()) + self._scanner.finish()
        return Piece(text, token_ids, last.finish_reason, last.error, last.matched_stop)


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yield (index, piece) of several generations as they come, until all have ended."""
    readers = [generation.pieces() for generation in generations]
    waiting = {asyncio.ensure_future(anext(reader)): index for index, reader in enumerate(readers)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                piece = task.result()
                if piece.finish_reason is None:
                    waiting[asyncio.ensure_future(anext(readers[index]))] = index
                yield index, piece
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for reader in readers:
            await reader.aclose()


def failure_of(generation: Generation) -> ApiError | None:
    """Return the error that a generation's end amounts to, None for an ordinary end.

    An answer that its own deadline cut short is an answer; without a token it is an error.
    """
    finish = generation.finish
    if finish is None or finish.finish_reason in ("stop", "length"):
        return None
    if finish.finish_reason == "error":
        return ApiError(500, finish.error or "the generation failed", code="generation_failed")
    if generation.was_aborted:
        return ApiError(CLIENT_CLOSED_REQUEST, "the request was aborted by its id", code="aborted")
    if finish.error:
        if generation.output_ids:
            return None
        # OpenAI's clients try a 408 again of themselves, unless they are told that it would be the same again.
        return ApiError(408, finish.error, code="timeout", headers={"x-should-retry": "false"})
    return ApiError(503, "the server is stopping; the answer ends early", code="stopping")


def _refusal(rejected: RequestRejected) -> ApiError:
    message = str(rejected)
    if isinstance(rejected, QueueFull):
        seconds = max(1, round(rejected.retry_after_seconds))
        return ApiError(429, message, code="queue_full", headers={"Retry-After": str(seconds)})
    if isinstance(rejected, PromptTooLong):
        return ApiError(400, message, code="context_length_exceeded")
    code = "stopping" if isinstance(rejected, EngineStopped) else None
    return ApiError(503, message, code=code, headers={"Retry-After": "5"})
