"""Text that grows token by token: the pieces joined are the whole, and no character is broken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from worker.tokenization import TokenizationError, Tokenizer

TEXT = "naïve 日本語 👩‍👩‍👧 e\u0301 \N{REPLACEMENT CHARACTER} ende"


def pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    found = [detokenizer.push(ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return [*found, detokenizer.finish()]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_split_characters_are_never_broken(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode(TEXT * 3)
    assert len(ids) == len((TEXT * 3).encode())
    found = pieces(tokenizer, ids, list(range(0, len(ids), size)))
    assert "".join(found) == TEXT * 3
    assert "".join(found).count("\N{REPLACEMENT CHARACTER}") == 3


@given(data=st.binary(max_size=80), cuts=st.lists(st.integers(0, 80), max_size=80))
def test_any_bytes_in_any_rounds_join_to_the_decode_of_all(
    tokenizer: Tokenizer, data: bytes, cuts: list[int]
) -> None:
    ids = list(data)  # the tiny tokenizer's ids below 256 are bytes
    assert "".join(pieces(tokenizer, ids, cuts)) == tokenizer.decode(ids) == data.decode(errors="replace")


def test_invalid_bytes_do_not_stall_the_stream(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    text = "".join(detokenizer.push([0xFF]) for _ in range(20))
    assert len(text) >= 17


def test_a_long_stream_keeps_a_short_window(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode(TEXT * 40)
    joined = ""
    for token in ids:
        joined += detokenizer.push([token])
        assert len(detokenizer._window) < 64
    assert joined + detokenizer.finish() == TEXT * 40


def test_a_run_of_special_tokens_does_not_widen_the_window(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.push([token]) for token in [72, *[257] * 200, 105]) == "Hi"
    assert len(detokenizer._window) == 2


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, [72, 257, 105, 257], [1, 2, 3])) == "Hi"


def test_leading_spaces_of_a_sentencepiece_vocabulary_survive() -> None:
    words = ["▁Hello", "▁big", "▁world", "!"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="!"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), frozenset())
    # A special token has no text: it must never be all the context that a window starts with.
    ids = [0, 1, 2, 3, 4] * 20
    assert "".join(pieces(tokenizer, ids, list(range(len(ids))))) == tokenizer.decode(ids)
    assert tokenizer.decode(ids).startswith("Hello big world! Hello")


def test_chat_template_ends_where_the_answer_begins(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    text = tokenizer._backend.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_ids == {257}
    assert tokenizer.vocab_size == 258


def test_a_template_that_refuses_is_a_clear_error(tokenizer: Tokenizer) -> None:
    strict = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._backend, chat_template="{{ raise_exception('roles must alternate') }}"
    )
    with pytest.raises(TokenizationError, match="roles must alternate"):
        Tokenizer(strict, frozenset()).encode_chat([{"role": "user", "content": "Hi"}])
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend)
    with pytest.raises(TokenizationError, match="no chat template"):
        Tokenizer(bare, frozenset()).encode_chat([{"role": "user", "content": "Hi"}])


def test_a_tokenizer_without_backend_is_refused() -> None:
    with pytest.raises(TokenizationError, match="fast tokenizer"):
        Tokenizer(object(), frozenset())


def test_ids_above_a_hole_are_in_the_vocabulary() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "!": 9}, unk_token="!"))
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), frozenset())
    assert tokenizer.vocab_size == 10
