"""OpenAI's text completions on the wire: what is accepted, and the shapes of the answers.

Pure functions between JSON and the engine's nouns; starts nothing and waits for nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any

from worker.api.generation import Generation, Piece
from worker.api.openai import UNSUPPORTED_OPENAI, OpenAIAnswer, OpenAIFields
from worker.api.prompts import PromptField
from worker.api.sampling import is_falsy

DEFAULT_TOKENS = 16

UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    **UNSUPPORTED_OPENAI,
    "logprobs": lambda value: value is False,  # 0 asks for the drawn tokens' own
    "suffix": is_falsy,
}


class CompletionRequest(OpenAIFields):
    """Body of `POST /v1/completions`. A list of prompts gives one choice for each."""

    prompt: PromptField

    @property
    def token_limit(self) -> int:
        """Tokens that the client allows."""
        return self.max_tokens or DEFAULT_TOKENS


class CompletionAnswer(OpenAIAnswer):
    """Text completions, whole or in chunks."""

    whole_object = chunk_object = "text_completion"

    def whole_choice(self, index: int, generation: Generation) -> dict[str, Any]:
        """Return the text."""
        return {"text": generation.text}

    def opening(self, index: int) -> None:
        """There is nothing to say before the text."""

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """Return a chunk of text."""
        return self.chunk(index, {"text": text})

    def closing(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the chunk that ends a text."""
        return self.chunk(index, {"text": ""}, piece)
