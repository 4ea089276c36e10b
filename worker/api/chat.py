"""OpenAI's chat completions on the wire: what is accepted, and the shapes of the answers.

Pure functions between JSON and the engine's nouns; starts nothing and waits for nothing.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from worker.api.generation import Generation, Piece
from worker.api.openai import UNSUPPORTED_OPENAI, OpenAIAnswer, OpenAIFields
from worker.api.sampling import PositiveInt, RequestBody, is_falsy, is_number


def _is_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    **UNSUPPORTED_OPENAI,
    "logprobs": is_falsy,
    "top_logprobs": is_number(0),
    "response_format": _is_text_format,
    "tools": is_falsy,
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": is_falsy,
    "function_call": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value == ["text"],
    "audio": is_falsy,
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


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}


class ChatMessage(RequestBody):
    """One turn. `developer` is another word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str,
        BeforeValidator(_join_parts),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}),
    ]

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates know it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(OpenAIFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    """The newer name; it wins over `max_tokens`."""

    @property
    def token_limit(self) -> int | None:
        """Tokens that the client allows, None for as many as the context leaves."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class ChatAnswer(OpenAIAnswer):
    """Chat completions, whole or in chunks."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole_choice(self, index: int, generation: Generation) -> dict[str, Any]:
        """Return the assistant's message."""
        return {"message": {"role": "assistant", "content": generation.text, "refusal": None}}

    def opening(self, index: int) -> dict[str, Any]:
        """Return the first chunk: the role."""
        return self.chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """Return a chunk of text."""
        return self.chunk(index, {"delta": {"content": text}})

    def closing(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the chunk that ends the text."""
        return self.chunk(index, {"delta": {}}, piece)
