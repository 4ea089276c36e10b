"""GGUF files against the directories that they were written from, and the errors of those that cannot be served."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch import Tensor

from worker.models import convert, locate, store
from worker.models.attention import Segment
from worker.models.config import ModelError, read_config
from worker.models.gguf_file import GgufFile
from worker.models.loader import load_decoder, load_tokenizer
from worker.models.locate import locate_model, model_name

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-bias": ("llama", {"tied": True, "bias": True}),
    "mistral": ("llama", {"architecture": "MistralForCausalLM", "sliding_window": 24}),
    "qwen2": ("qwen2", {"architecture": "Qwen2ForCausalLM", "tied": True}),
    "qwen3": ("qwen3", {"architecture": "Qwen3ForCausalLM", "head_dim": 16}),
}
Quantisation = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def models_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.MODELS_DIR_VARIABLE, str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def source(tiny_model_dir: Callable[..., Path]) -> Callable[..., Path]:
    """A directory to write a GGUF from: float32, with room for padding."""
    return lambda **parameters: tiny_model_dir(vocab_size=266, dtype=torch.float32, **parameters)


def silent(_: str) -> None:
    pass


def logits_of(directory: Path) -> Tensor:
    decoder = load_decoder(directory, dtype=torch.float64, device=torch.device("cpu"))
    kv = decoder.new_kv_cache(1, 64)
    ids = torch.arange(60) * 7 % 256
    return decoder.logits(decoder.forward(ids, [Segment(0, 0, 60)], kv, phase="prefill"))


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_what_its_directory_gives(
    name: str, source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path
) -> None:
    architecture, parameters = MODELS[name]
    original = source(**parameters)
    directory = locate_model(str(gguf_writer.write_gguf(tmp_path / "m.gguf", original, architecture)))
    assert torch.equal(logits_of(directory), logits_of(original))
    tokenizer = load_tokenizer(directory)
    text = "héllo <|im_end|> cab"
    assert tokenizer(text)["input_ids"] == [*"héllo ".encode(), 257, *b" c", 258]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 259, "padding of the embedding is no token"
    assert tokenizer.eos_token_id == 257
    assert read_config(directory).eos_token_ids == {257}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


def test_llama3_frequencies_are_found_behind_their_divisors(
    source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path
) -> None:
    original = source(rope=LLAMA3_ROPE, hidden_size=128)
    from worker.models.rope import RopeConfig, inverse_frequencies

    divisors = inverse_frequencies(RopeConfig(500000.0), 32) / inverse_frequencies(
        read_config(original).rope, 32
    )
    path = gguf_writer.write_gguf(
        tmp_path / "m.gguf", original, "llama", tensors={"rope_freqs.weight": divisors.float().numpy()}
    )
    directory = locate_model(str(path))
    assert read_config(directory).rope == read_config(original).rope
    assert torch.equal(logits_of(directory), logits_of(original))
    wrong = divisors.float().numpy()[::-1].copy()
    path = gguf_writer.write_gguf(
        tmp_path / "n.gguf", original, "llama", tensors={"rope_freqs.weight": wrong}
    )
    with pytest.raises(ModelError, match=r"rope_freqs.weight is no scaling of type llama3"):
        locate_model(str(path))


def quantised(kind: Any) -> Callable[[str, np.ndarray], tuple[np.ndarray, Any]]:
    """Real quantisation where the package has it, else bytes that decode to finite numbers."""

    def pack(name: str, weight: np.ndarray) -> tuple[np.ndarray, Any]:
        try:
            return gguf.quantize(weight, kind), kind
        except NotImplementedError:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            generator = np.random.default_rng(len(name))
            shape = (weight.shape[0], weight.shape[1] // block * size)
            return generator.integers(0, 60, shape, dtype=np.uint8), kind

    return pack


@pytest.mark.parametrize(
    "kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"]
)
def test_quantised_weights_are_those_the_file_defines(
    kind: str, source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path
) -> None:
    original = source(hidden_size=256, num_layers=1)
    pack = quantised(Quantisation[kind])
    path = gguf_writer.write_gguf(tmp_path / "m.gguf", original, "llama", pack=pack)
    converted = load_file(locate_model(str(path)) / "model.safetensors")
    stored = gguf_writer.gguf_tensors(original, "llama")
    for theirs, ours, heads in [
        ("token_embd.weight", "model.embed_tokens.weight", None),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight", None),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", 4),
        ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", 2),
    ]:
        expected = gguf.dequantize(*pack(theirs, stored[theirs]))
        if heads:
            even, odd = expected.reshape(heads, -1, 2, 256).swapaxes(0, 2)
            expected = np.stack((even, odd)).transpose(2, 0, 1, 3).reshape(expected.shape)
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(converted[ours], expected)


def test_large_models_are_written_in_parts(
    source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "PART_BYTES", 20_000)
    original = source()
    directory = locate_model(str(gguf_writer.write_gguf(tmp_path / "m.gguf", original, "llama")))
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    assert torch.equal(logits_of(directory), logits_of(original))


# ---- converted once ----


def test_content_is_converted_once_whatever_its_name(
    source: Callable[..., Path],
    gguf_writer: ModuleType,
    tmp_path: Path,
    models_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = gguf_writer.write_gguf(tmp_path / "first.gguf", source(), "llama")
    directory = locate_model(str(path), say=silent)
    assert directory.parent == models_directory
    assert model_name(str(path)) == "first"

    def refuse(*_: object) -> None:
        raise AssertionError("converted again")

    with monkeypatch.context() as patched:
        patched.setattr(convert, "convert_gguf", refuse)
        renamed = shutil.copy(path, tmp_path / "second.bin")
        assert locate_model(str(renamed), say=silent) == directory
    gguf_writer.write_gguf(path, source(seed=1), "llama")
    other = locate_model(str(path), say=silent)
    assert other != directory
    assert torch.equal(logits_of(other), logits_of(source(seed=1)))
    # An earlier conversion, or half of one, is made anew.
    (other / store.ORIGIN_FILE).write_text("{}")
    (other / "config.json").write_text("{}")
    assert locate_model(str(path), say=silent) == other
    assert read_config(other).hidden_size == 32


def test_a_failed_conversion_leaves_nothing(
    source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path, models_directory: Path
) -> None:
    path = gguf_writer.write_gguf(
        tmp_path / "m.gguf", source(), "llama", tensors={"blk.0.unheard_of.weight": np.ones(3, np.float32)}
    )
    with pytest.raises(ModelError, match="tensor blk.0.unheard_of.weight is unknown"):
        locate_model(str(path), say=silent)
    assert [entry.name for entry in models_directory.iterdir() if not entry.name.endswith(".lock")] == []


def test_a_disk_that_is_too_small_is_noticed_before(
    source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_writer.write_gguf(tmp_path / "m.gguf", source(), "llama")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ModelError, match=r"converted to float32 it takes 0.0 GB.* 0.0 GB free"):
        locate_model(str(path), say=silent)


def test_other_paths(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = tiny_model_dir()
    assert locate_model(str(directory)) == directory
    assert model_name(str(directory / ".")) == directory.name
    with pytest.raises(ModelError, match=r"nowhere.gguf: no such file or directory"):
        locate_model(str(tmp_path / "nowhere.gguf"))
    (tmp_path / "text.gguf").write_text("GG")
    with pytest.raises(ModelError, match=r"text.gguf: not a GGUF file"):
        locate_model(str(tmp_path / "text.gguf"))


# ---- refused by name ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is not supported"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn' is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count 4 differs from the head size 8"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count must be of type int"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count must be at least 1"),
        ({"llama.attention.head_count": 3}, "differs from the head size|no even number|no multiple"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"split.count": 3}, "split.count is 3"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not supported; supported: 'gpt2', 'llama'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "tokenizer.ggml.pre 'unheard-of' is not supported.*'smollm'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type has 1 entries for 266 tokens"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges holds 'ab'"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "the vocabulary and its merges do not fit"),
        ({"tokenizer.ggml.eos_token_id": 259}, "tokenizer.ggml.eos_token_id 259 is outside 0..258"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)  # fmt: skip
def test_fields_are_refused_by_name(
    fields: dict[str, Any], message: str, source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path
) -> None:
    path = gguf_writer.write_gguf(tmp_path / "m.gguf", source(), "llama", fields=fields)
    with pytest.raises(ModelError, match=message):
        load_decoder(locate_model(str(path), say=silent), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("architecture", ["gemma3", "llama4", "mamba"])
def test_architectures_are_refused_by_name(
    architecture: str, source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path
) -> None:
    path = gguf_writer.write_gguf(tmp_path / "m.gguf", source(), architecture)
    with pytest.raises(ModelError, match=f"general.architecture '{architecture}' is not supported.*'llama'"):
        locate_model(str(path), say=silent)


def test_a_quantisation_that_cannot_be_undone_is_named(
    source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path
) -> None:
    def pack(name: str, weight: np.ndarray) -> tuple[np.ndarray, Any]:
        return np.zeros((weight.shape[0], weight.shape[1] // 32 * 40), np.uint8), Quantisation.Q8_1

    path = gguf_writer.write_gguf(tmp_path / "m.gguf", source(), "llama", pack=pack)
    with pytest.raises(ModelError, match=r"tensor .* is of type Q8_1, which cannot be dequ"):
        locate_model(str(path), say=silent)


def test_a_file_cut_off_anywhere_is_a_model_error(
    source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path
) -> None:
    whole = gguf_writer.write_gguf(tmp_path / "m.gguf", source(num_layers=1), "llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 64, 3), *range(64, len(whole) - 1, len(whole) // 40)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="cut.gguf"):
            locate_model(str(cut), say=silent)


# ---- vocabularies ----


def tokenizer_of(fields: dict[str, Any], original: Path, writer: ModuleType, tmp_path: Path) -> Any:
    return load_tokenizer(
        locate_model(
            str(writer.write_gguf(tmp_path / "v.gguf", original, "llama", fields=fields)), say=silent
        )
    )


BYTES = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # Digits: three at a time, one by one, any number; a word that is a token needs no merges.
        ("llama-bpe", "1234 ab", ["<s>", "123", "4", "Ġab"]),
        ("qwen2", "1234 ab", ["1", "2", "3", "4", "Ġ", "ab"]),
        ("gpt-2", "1234 ab", ["12", "3", "4", "Ġ", "ab"]),
        ("smollm", "1234 ab", ["1", "2", "3", "4", "Ġ", "ab"]),
        ("tekken", "1234 ab", ["<s>", "1", "2", "3", "4", "Ġab"]),
        # qwen2 composes characters first.
        ("qwen2", "e\N{COMBINING ACUTE ACCENT}", ["Ã", "©"]),
        ("llama-bpe", "e\N{COMBINING ACUTE ACCENT}", ["<s>", "e", "Ì", "ģ"]),
    ],
)
def test_words_are_split_by_the_pattern_that_the_file_names(
    pre: str,
    text: str,
    expected: list[str],
    source: Callable[..., Path],
    gguf_writer: ModuleType,
    tmp_path: Path,
) -> None:
    tokens = ["<s>", *BYTES, "ab", "12", "123", "Ġab"]
    types = [gguf_writer.CONTROL] + [gguf_writer.NORMAL] * (len(tokens) - 1)
    fields = gguf_writer.vocabulary_fields(tokens, types, merges=["a b", "1 2"], pre=pre)
    fields["tokenizer.ggml.bos_token_id"] = 0
    tokenizer = tokenizer_of(fields, source(), gguf_writer, tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == expected


def test_tokens_defined_by_the_user_are_never_split_and_are_text(
    source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path
) -> None:
    tokens = ["<s>", *BYTES, "ab", "<think>"]
    types = [gguf_writer.CONTROL] + [gguf_writer.NORMAL] * (len(tokens) - 2) + [4]
    fields = gguf_writer.vocabulary_fields(tokens, types, merges=["a b"], pre="qwen2")
    tokenizer = tokenizer_of(fields, source(), gguf_writer, tmp_path)
    ids = tokenizer("<think>a<s>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<think>", "a", "<s>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a"


def sentencepiece_reference(text: str, scores: dict[str, float]) -> list[str]:
    """Join the neighbours whose joined piece has the best score, the first of equals, until none is left."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(-scores[pair], index) for index in range(len(pieces) - 1)
                  if (pair := pieces[index] + pieces[index + 1]) in scores]  # fmt: skip
        if not joined:
            return pieces
        _, index = min(joined)
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]


PIECES = ["▁", "a", "b", "c", "d", "ab", "▁a", "bc", "abc", "▁ab", "cd", "▁▁", "abcd", "da", "▁abc", "▁▁▁▁"]


@pytest.fixture
def sentencepiece(source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path) -> Any:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(200)), *PIECES]
    scores = [0.0] * 203 + [-float(PIECES.index(piece)) for piece in PIECES]
    types = [2, 3, 3] + [6] * 200 + [1] * len(PIECES)
    fields = gguf_writer.vocabulary_fields(tokens, types, scores=scores, model="llama")
    fields |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    fields |= {
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
    }
    return tokenizer_of(fields, source(), gguf_writer, tmp_path)


def test_sentencepiece_vocabularies_merge_by_score(sentencepiece: Any) -> None:
    scores = {piece: -float(index) for index, piece in enumerate(PIECES)}

    @settings(deadline=None, max_examples=300)
    @given(st.text("abcd ", min_size=1, max_size=24))
    def equal(text: str) -> None:
        tokens = sentencepiece.convert_ids_to_tokens(sentencepiece(text)["input_ids"])
        assert tokens == ["<s>", *sentencepiece_reference(text, scores)]
        assert sentencepiece.decode(sentencepiece(text)["input_ids"], skip_special_tokens=True) == text

    equal()


def test_sentencepiece_falls_back_to_bytes(sentencepiece: Any) -> None:
    ids = sentencepiece("aé")["input_ids"]
    assert sentencepiece.convert_ids_to_tokens(ids) == ["<s>", "▁a", "<0xC3>", "<0xA9>"]
    assert sentencepiece.decode(ids, skip_special_tokens=True) == "aé"


def test_every_end_of_a_turn_ends_a_text(
    source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path
) -> None:
    fields = {"tokenizer.ggml.eos_token_id": 256, "tokenizer.ggml.eot_token_id": 257}
    path = gguf_writer.write_gguf(tmp_path / "m.gguf", source(), "llama", fields=fields)
    assert read_config(locate_model(str(path), say=silent)).eos_token_ids == {256, 257}


def test_numbers_lose_nothing_on_the_way(
    source: Callable[..., Path], gguf_writer: ModuleType, tmp_path: Path
) -> None:
    path = gguf_writer.write_gguf(tmp_path / "m.gguf", source(), "llama")
    assert GgufFile(path).number("llama.attention.layer_norm_rms_epsilon") == 1e-5
    directory = locate_model(str(path), say=silent)
    assert json.loads((directory / "config.json").read_text())["rms_norm_eps"] == 1e-5
    assert json.loads((directory / store.ORIGIN_FILE).read_text())["conversion"] == locate.CONVERSION
