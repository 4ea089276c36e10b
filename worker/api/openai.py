"""What OpenAI's two completion APIs have in common on the wire: fields, usage, the answer and its chunks.

Pure functions between JSON and the engine's nouns; starts nothing and waits for nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from worker.api.generation import Generation, Piece
from worker.api.sampling import (
    UNSUPPORTED_SAMPLING,
    PositiveInt,
    RequestBody,
    RequestId,
    SamplingFields,
    Seed,
    is_falsy,
    is_number,
)
from worker.api.speculation import acceptance_metrics
from worker.config import MetricsLevel

UNSUPPORTED_OPENAI: Mapping[str, Callable[[Any], bool]] = {
    **UNSUPPORTED_SAMPLING,
    "prompt_logprobs": is_falsy,
    "structured_outputs": is_falsy,
    "guided_json": is_falsy,
    "guided_regex": is_falsy,
    "guided_choice": is_falsy,
    "guided_grammar": is_falsy,
    "best_of": is_number(1),
    "echo": is_falsy,
}


class StreamOptions(RequestBody):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    """A last chunk without choices carries the usage."""
    continuous_usage_stats: bool | None = None
    """Every chunk carries the usage so far."""


class OpenAIFields(SamplingFields):
    """Fields of both bodies beside the prompt."""

    model: str | None = None
    max_tokens: PositiveInt | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """No end-of-sequence or stop token is drawn before this many tokens; stop strings hold at once."""
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: RequestId | None = None
    """An id of the client's own, for aborting; it is the answer's `id` then."""
    per_request_spec_decode_metrics: MetricsLevel | None = None
    """Speculation statistics in the answer, or in a stream's last chunk: `metrics.speculative_decoding`."""


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """Return the token counts so far."""
    prompt = sum(len(generation.request.prompt_ids) for generation in generations)
    output = sum(len(generation.output_ids) for generation in generations)
    cached = sum(generation.request.cached_tokens for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class OpenAIAnswer(ABC):
    """Builds the answer of one body, whole or in chunks with the same id; one choice per prompt."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        generations: Sequence[Generation],
        *,
        id: str,
        model: str,
        created: int,
        options: StreamOptions,
        metrics_level: MetricsLevel,
    ) -> None:
        self.generations = generations
        self.id = id
        self._head = {"id": id, "created": created, "model": model}
        self._options = options
        self._metrics_level = metrics_level

    @abstractmethod
    def whole_choice(self, index: int, generation: Generation) -> dict[str, Any]:
        """Return a choice of the whole answer, but for what every choice has."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the chunk before the first text, if there is one."""

    @abstractmethod
    def piece(self, index: int, text: str) -> dict[str, Any]:
        """Return a chunk of text."""

    @abstractmethod
    def closing(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the chunk that ends a choice."""

    def whole(self) -> dict[str, Any]:
        """Return the answer to a body without `stream`."""
        choices = [
            {"index": index, **self.whole_choice(index, generation), **self._ending(index, generation.finish)}
            for index, generation in enumerate(self.generations)
        ]
        answer = {**self._head, "object": self.whole_object, "choices": choices}
        return {**answer, "usage": usage(self.generations), **self._metrics()}

    def trailing(self) -> dict[str, Any] | None:
        """Return the chunk without choices after all others, if something was asked for that goes there."""
        if not self._options.include_usage and not self._metrics():
            return None
        chunk = {**self._head, "object": self.chunk_object, "choices": []}
        counts = usage(self.generations) if self._options.include_usage else None
        return {**chunk, "usage": counts, **self._metrics()}

    def chunk(self, index: int, content: Mapping[str, Any], end: Piece | None = None) -> dict[str, Any]:
        """Return a chunk of one choice."""
        choice = {"index": index, **content, **self._ending(index, end)}
        chunk = {**self._head, "object": self.chunk_object, "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage(self.generations)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _ending(self, index: int, finish: Piece | None) -> dict[str, Any]:
        """Return why a choice ended; `stop_reason` is the client's own stop, or "timeout" beside "abort"."""
        reason = finish.finish_reason if finish else None
        stop: int | str | None = "timeout" if reason == "abort" else finish.matched_stop if finish else None
        is_own = isinstance(stop, str) or stop in self.generations[index].request.params.stop_token_ids
        return {"logprobs": None, "finish_reason": reason, "stop_reason": stop if is_own else None}

    def _metrics(self) -> dict[str, Any]:
        """Return the statistics where they were asked for; several prompts have none in common."""
        if self._metrics_level == "none":
            return {}
        if len(self.generations) != 1:
            return {"metrics": None}
        spec = self.generations[0].request.spec
        return {"metrics": {"speculative_decoding": acceptance_metrics(spec, self._metrics_level)}}
