"""A GGUF file's vocabulary → `tokenizer.json` and `tokenizer_config.json`.

Knows two kinds: byte-level BPE (`gpt2`) with the word patterns named below, and sentencepiece BPE (`llama`), whose
merges follow from its scores. Another kind or pattern is refused: it would silently give other tokens.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from worker.models.config import ModelError
from worker.models.gguf_file import GgufFile

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""GGUF token types: special tokens, tokens that are never split, padding of the embedding."""

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = {
    "llama-bpe": LLAMA3_WORDS,
    "qwen2": LLAMA3_WORDS.replace("{1,3}", ""),
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""How words are split before merging, by `tokenizer.ggml.pre`; besides `smollm` and `gpt-2`, see `_words`."""
PATTERNS = ("smollm", "gpt-2", *WORDS)
TAKES_WHOLE_WORDS = ("llama-bpe", "tekken")
"""A word that is a token is taken without merging."""
BEGINS_TEXTS = ("llama-bpe", "tekken")
"""The begin token goes in front unless the file says otherwise."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def write_gguf_tokenizer(file: GgufFile, directory: Path) -> None:
    """Write the two files of the tokenizer.

    Raises:
        ModelError: the kind or pattern is not supported, or a part is missing.
    """
    tokens = _tokens(file)
    kind = file.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, begins = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer, begins = _sentencepiece(file, tokens), True
    else:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; supported: 'gpt2', 'llama'"
        )
    types = file.array("tokenizer.ggml.token_type", int)
    special = [token for token, type_ in zip(tokens, types, strict=False) if type_ == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    whole = [token for token, type_ in zip(tokens, types, strict=False) if type_ == USER_DEFINED]
    if whole:
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in whole])
    _frame(file, tokenizer, tokens, begins)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = json.dumps(_settings(file, tokens), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")


def _tokens(file: GgufFile) -> list[str]:
    """Return the token strings, without those that only pad the embedding at its end."""
    tokens = file.array("tokenizer.ggml.tokens", str)
    types = file.array("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    end = len(tokens)
    while end and types[end - 1] == UNUSED:
        end -= 1
    return tokens[:end]


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and whether texts begin with the begin token by default."""
    pattern = file.text("tokenizer.ggml.pre")
    if pattern not in PATTERNS:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.pre {pattern!r} is not supported; supported: {list(PATTERNS)}"
        )
    merges: list[tuple[str, str]] = []
    for merge in file.array("tokenizer.ggml.merges", str):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise ModelError(f"{file.path}: tokenizer.ggml.merges holds {merge!r}, which is no pair")
        merges.append((left, right))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    whole = pattern in TAKES_WHOLE_WORDS
    tokenizer = Tokenizer(_bpe(file, vocab=vocabulary, merges=merges, ignore_merges=whole))
    tokenizer.pre_tokenizer = _words(pattern)
    if pattern == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pattern in BEGINS_TEXTS


def _words(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pattern == "smollm":  # every digit is a token of its own, the rest is split as in GPT-2
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([digits, words])
    split = pre_tokenizers.Split(Regex(WORDS[pattern]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    scores = file.array("tokenizer.ggml.scores", (int, float))
    if len(scores) < len(tokens):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[_id(file, "unknown", len(tokens), default=0)]
    bpe = _bpe(
        file,
        vocab=vocabulary,
        merges=_merges(vocabulary, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    prefixed = file.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    # A text begins with a space, also behind a special token.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the merges that give what sentencepiece gives: the best-scored joined piece first."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, id_ in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[id_], id_, cut, (left, right)))
    return [pair for *_, pair in sorted(found)]


def _bpe(file: GgufFile, **arguments: Any) -> models.BPE:
    try:
        return models.BPE(**arguments)
    except Exception as error:  # tokenizers raises bare exceptions, for a merge of unknown tokens
        raise ModelError(f"{file.path}: the vocabulary and its merges do not fit: {error}") from error


def _frame(file: GgufFile, tokenizer: Tokenizer, tokens: list[str], begins: bool) -> None:
    """Put the begin and end tokens around texts, where the file wants them."""
    before, after = "", ""
    ids: list[tuple[str, int]] = []
    if file.flag("tokenizer.ggml.add_bos_token", begins) and file.has("tokenizer.ggml.bos_token_id"):
        begin = _id(file, "bos", len(tokens))
        before, ids = f"{tokens[begin]}:0 ", [(tokens[begin], begin)]
    if file.flag("tokenizer.ggml.add_eos_token", False):
        end = _id(file, "eos", len(tokens))
        after, ids = f" {tokens[end]}:0", [*ids, (tokens[end], end)]
    if ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before}$A:0{after}",
            pair=f"{before}$A:0{after} {before.replace(':0', ':1')}$B:1{after.replace(':0', ':1')}",
            special_tokens=list(dict(ids).items()),
        )


def _settings(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        if file.has(f"tokenizer.ggml.{key}_token_id"):
            settings[f"{name}_token"] = tokens[_id(file, key, len(tokens))]
    settings["model_max_length"] = file.integer(file.own("context_length"))
    settings["clean_up_tokenization_spaces"] = False
    if file.has("tokenizer.chat_template"):
        settings["chat_template"] = file.text("tokenizer.chat_template")
    return settings


def _id(file: GgufFile, name: str, count: int, default: int | None = None) -> int:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.integer(key, default)
    if value >= count:
        raise ModelError(f"{file.path}: {key} {value} is outside 0..{count - 1}")
    return value
