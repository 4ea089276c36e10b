"""Text to token ids and back, for one model directory.

Wraps the Hugging Face tokenizer: prompts, chat templates, and text that grows token by token. Knows nothing about
requests, HTTP or tensors. Every method may be called from any thread.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_HOLD = 3
"""An unfinished character is at most three bytes, so at most three replacement marks."""
REBASE_TOKENS = 16
"""Tokens in a detokenizer's window before it moves on: a few, so that most pushes decode once."""


class TokenizationError(ValueError):
    """A prompt or model directory that cannot be tokenized; the message is for the client."""


class Tokenizer:
    """The tokenizer of one model, its chat template and its end-of-sequence ids."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        """Take a transformers tokenizer that has a `tokenizers` backend (TokenizationError otherwise)."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizationError("the model directory has no fast tokenizer (tokenizer.json)")
        own = getattr(tokenizer, "eos_token_id", None)
        self.eos_token_ids = eos_token_ids | (frozenset() if own is None else {own})
        self._tokenizer = tokenizer
        # The backend itself, not the wrapper: the wrapper changes shared settings on each call, which
        # fails when two threads do so at once.
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids that `decode` leaves out."""
        self._token_count = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Load from a Hugging Face directory, offline.

        Raises:
            worker.models.config.ModelError: the directory's files are missing or refused.
            TokenizationError: there is no fast tokenizer.
        """
        from worker.models.config import read_config
        from worker.models.loader import load_tokenizer

        return cls(load_tokenizer(directory), read_config(directory).eos_token_ids)

    @property
    def directory(self) -> str:
        """Where it was loaded from."""
        return str(self._tokenizer.name_or_path)

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to this, exclusive; added tokens and holes included."""
        return self._token_count

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain prompt, with the special tokens that the model puts in front."""
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation, ending where the assistant's answer begins.

        Raises:
            TokenizationError: no chat template, or the template refuses the messages.
        """
        from jinja2 import TemplateError

        if not getattr(self._tokenizer, "chat_template", None):
            raise TokenizationError("this model has no chat template; use /generate with plain text")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise TokenizationError(f"the model's chat template refuses the messages: {error}") from None
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def detokenizer(self) -> "Detokenizer":
        """Return a fresh incremental decoder."""
        return Detokenizer(self)


class Detokenizer:
    """Text of a growing list of ids; the pieces joined equal `decode` of all ids.

    A character whose bytes are spread over tokens is held back until it is whole: at most three replacement
    marks at the end wait, so bytes that are really invalid never stall the stream. Exact for byte-level
    tokenizers. A byte-fallback tokenizer judges a run of byte tokens as a whole, so there an invalid byte right
    after a valid character may leave that character in place where the full decode would not.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        """The newest tokens, after one delivered piece as context (leading spaces depend on it)."""
        self._delivered = 0
        """Characters of the window's text that were handed out."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; return the text that became certain."""
        read = len(self._window)
        # A window of tokens without text could never move on.
        self._window.extend(i for i in token_ids if i not in self._tokenizer.special_token_ids)
        text = self._tokenizer.decode(self._window)
        stable = len(text) - _unfinished(text)
        piece = text[self._delivered : stable]
        self._delivered = max(self._delivered, stable)
        if stable == len(text) and len(self._window) > REBASE_TOKENS:
            self._rebase(read, text)
        return piece

    def finish(self) -> str:
        """Return what was held back; nothing can complete it any more."""
        text = self._tokenizer.decode(self._window)
        piece = text[self._delivered :]
        self._delivered = len(text)
        return piece

    def _rebase(self, read: int, text: str) -> None:
        """Drop the tokens before `read`, unless that would split a character; all of `text` is delivered."""
        kept = self._window[read:]
        context = self._tokenizer.decode(kept)
        if context and not context.startswith(REPLACEMENT) and text.endswith(context):
            self._window = kept
            self._delivered = len(context)


def _unfinished(text: str) -> int:
    """Number of characters at the end that may still change: replacement marks, up to `LONGEST_HOLD`."""
    held = 0
    while held < min(LONGEST_HOLD, len(text)) and text[len(text) - 1 - held] == REPLACEMENT:
        held += 1
    return held
