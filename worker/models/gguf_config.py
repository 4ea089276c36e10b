"""A GGUF file's metadata → the content of a Hugging Face `config.json` and `generation_config.json`.

Knows the keys of the architectures that `worker.models.config` can read. A key of the architecture's own that is not
known is refused by name: it may change the arithmetic. Knows nothing about tokenizers but the special ids.
"""

from typing import Any

import numpy as np
import torch

from worker.models.config import ModelError, RopeConfig
from worker.models.gguf_file import GgufFile
from worker.models.rope import inverse_frequencies

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Mistral models come as `llama`."""
KNOWN_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",  # tells history, changes nothing
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "vocab_size",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3.1's frequency scaling, as a divisor for each pair of dimensions."""
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def read_gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return what `config.json` shall hold.

    Raises:
        ModelError: the architecture or one of its fields is missing, bad or not supported.
    """
    architecture = _architecture(file)
    hidden, heads = _size(file, "embedding_length"), _size(file, "attention.head_count")
    head_dim = file.integer(file.own("attention.key_length"), hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if file.integer(file.own(name), head_dim) != head_dim:
            raise ModelError(
                f"{file.path}: {file.own(name)} {file.integer(file.own(name))} differs from the head size {head_dim}"
            )
    context = _size(file, "context_length")
    config = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": _size(file, "feed_forward_length"),
        "num_hidden_layers": _size(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(file.own("attention.head_count_kv"), heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": file.number(file.own("attention.layer_norm_rms_epsilon")),
        **_rope(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "bos_token_id": _token_id(file, "bos"),
        "eos_token_id": _token_id(file, "eos"),
        "pad_token_id": _token_id(file, "padding"),
        "dtype": "float32",
    }
    if file.has(file.own("attention.sliding_window")):
        config["sliding_window"] = _window(file, architecture, context)
    return config


def read_gguf_generation_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return what `generation_config.json` shall hold: every id that ends a text, the turn's end included."""
    ends = [config["eos_token_id"], _token_id(file, "eot"), _token_id(file, "eom")]
    distinct = list(dict.fromkeys(id_ for id_ in ends if id_ is not None))
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return ids | {"eos_token_id": distinct} if len(distinct) > 1 else ids


def _architecture(file: GgufFile) -> str:
    if file.architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: general.architecture {file.architecture!r} is not supported; "
            f"supported: {list(ARCHITECTURES)}"
        )
    if file.integer(file.own("expert_count"), 0):
        raise ModelError(f"{file.path}: {file.own('expert_count')} is not supported (mixture of experts)")
    for name in file.names(file.own("")):
        if name.removeprefix(file.own("")) not in KNOWN_KEYS:
            raise ModelError(f"{file.path}: {name} is not supported")
    windowed = file.architecture == "llama" and file.has(file.own("attention.sliding_window"))
    return "MistralForCausalLM" if windowed else ARCHITECTURES[file.architecture]


def _size(file: GgufFile, name: str) -> int:
    value = file.integer(file.own(name))
    if value < 1:
        raise ModelError(f"{file.path}: {file.own(name)} must be at least 1, got {value}")
    return value


def _vocab_size(file: GgufFile) -> int:
    """Return the rows of the embedding, padding included."""
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    return int(file.tensors["token_embd.weight"].shape[-1])


def _token_id(file: GgufFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return file.integer(key) if file.has(key) else None


def _window(file: GgufFile, architecture: str, context: int) -> int | None:
    window = _size(file, "attention.sliding_window")
    if architecture == "MistralForCausalLM":
        return window
    if window < context:
        raise ModelError(f"{file.path}: {file.own('attention.sliding_window')} {window} is not supported")
    return None


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    theta = file.number(file.own("rope.freq_base"), 10000.0)
    kind = file.text(file.own("rope.scaling.type"), "none")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise ModelError(f"{file.path}: {file.own('rope.scaling.type')} {kind!r} beside {ROPE_FACTORS}")
        return {"rope_theta": theta, "rope_scaling": _llama3_scaling(file, theta, head_dim)}
    if kind == "linear":
        factor = file.number(file.own("rope.scaling.factor"))
        return {"rope_theta": theta, "rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind != "none":
        raise ModelError(
            f"{file.path}: {file.own('rope.scaling.type')} {kind!r} is not supported; supported: 'none', 'linear'"
        )
    return {"rope_theta": theta}


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Find the `llama3` scaling behind stored divisors: only the factor varies between models; the rest is checked."""
    factors = file.weight(ROPE_FACTORS).astype(np.float64)
    original = file.integer(file.own("rope.scaling.original_context_length"), LLAMA3_ORIGINAL)
    factor = float(f"{factors.max():.6g}")
    scaled = RopeConfig(theta, "llama3", factor, LLAMA3_LOW, LLAMA3_HIGH, original)
    expected = inverse_frequencies(RopeConfig(theta), head_dim) / inverse_frequencies(scaled, head_dim)
    found = torch.from_numpy(factors)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-4, atol=0):
        raise ModelError(f"{file.path}: {ROPE_FACTORS} is no scaling of type llama3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": original,
    }
