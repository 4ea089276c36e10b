"""OpenAI's chat completions on the wire: what is accepted, and the shapes of the answers.

Pure functions between JSON and the engine's nouns; starts nothing and waits for nothing.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from worker.api.generation import Generation
from worker.api.sampling import (
    UNSUPPORTED_SAMPLING,
    PositiveInt,
    RequestBody,
    SamplingFields,
    Seed,
    is_falsy,
    is_number,
)


def _is_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    **UNSUPPORTED_SAMPLING,
    "logprobs": is_falsy,
    "top_logprobs": is_number(0),
    "prompt_logprobs": is_falsy,
    "response_format": _is_text_format,
    "structured_outputs": is_falsy,
    "guided_json": is_falsy,
    "guided_regex": is_falsy,
    "guided_choice": is_falsy,
    "guided_grammar": is_falsy,
    "tools": is_falsy,
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": is_falsy,
    "function_call": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value == ["text"],
    "audio": is_falsy,
    "best_of": is_number(1),
    "echo": is_falsy,
    "chat_template": is_falsy,
    "chat_template_kwargs": is_falsy,
    "add_generation_prompt": lambda value: value is True,
    "continue_final_message": is_falsy,
}


def _join_parts(content: Any) -> Any:
    """Turn a list of text parts into one string, joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f'part {index} must be {{"type": "text", "text": "…"}}, no other type is supported'
            )
        texts.append(part["text"])
    return "\n".join(texts)


class ChatMessage(RequestBody):
    """One turn. `developer` is another word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_join_parts)]

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates know it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class StreamOptions(RequestBody):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatRequest(SamplingFields):
    """Body of `POST /v1/chat/completions`."""

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    """The newer name; it wins over `max_tokens`."""
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def token_limit(self) -> int | None:
        """Tokens that the client allows, None for as many as the context leaves."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def usage(generation: Generation) -> dict[str, Any]:
    """Return the token counts so far."""
    prompt, output = len(generation.request.prompt_ids), len(generation.output_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


class ChatAnswer:
    """Builds the answer of one request, whole or in chunks with the same id."""

    def __init__(self, generation: Generation, *, model: str, created: int, options: StreamOptions) -> None:
        self._generation = generation
        self._head = {"id": f"chatcmpl-{generation.id}", "created": created, "model": model}
        self._options = options

    def whole(self) -> dict[str, Any]:
        """Return the answer to a request without `stream`."""
        finish = self._generation.finish
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self._generation.text, "refusal": None},
            "logprobs": None,
            "finish_reason": finish.finish_reason if finish else None,
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(self._generation),
        }

    def opening(self) -> dict[str, Any]:
        """Return the first chunk: the role."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> dict[str, Any]:
        """Return a chunk of text."""
        return self._chunk({"content": text}, None)

    def closing(self, finish_reason: str) -> dict[str, Any]:
        """Return the chunk that ends the text."""
        return self._chunk({}, finish_reason)

    def trailing_usage(self) -> dict[str, Any] | None:
        """Return the chunk without choices that carries the usage, if it was asked for."""
        if not self._options.include_usage:
            return None
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": []}
        return {**chunk, "usage": usage(self._generation)}

    def _chunk(self, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage(self._generation)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk
