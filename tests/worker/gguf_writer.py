"""Writes a Hugging Face directory as llama.cpp's converter would: names, row order and vocabulary of a GGUF."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

NORMAL, CONTROL, UNUSED, BYTE = 1, 3, 5, 6
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Fields = dict[str, Any]


def gguf_tensors(directory: Path, architecture: str) -> dict[str, np.ndarray]:
    """Return the weights by GGUF name; `llama` stores rotated rows as neighbouring pairs."""
    config = json.loads((directory / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            part = NAMES[part]
            if part in heads and architecture == "llama":
                halves = weight.reshape(heads[part], 2, -1, *weight.shape[1:])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
            tensors[f"blk.{layer}.{part}.{kind}"] = weight
        else:
            short = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            tensors[f"{short[stem]}.{kind}"] = weight
    return tensors


def gguf_fields(directory: Path, architecture: str) -> Fields:
    """Return the metadata: sizes, and the directory's byte-level vocabulary with one merged token more."""
    config = json.loads((directory / "config.json").read_text())
    fields: Fields = {
        f"{architecture}.{name}": config[key]
        for name, key in {
            "block_count": "num_hidden_layers",
            "context_length": "max_position_embeddings",
            "embedding_length": "hidden_size",
            "feed_forward_length": "intermediate_size",
            "attention.head_count": "num_attention_heads",
            "attention.head_count_kv": "num_key_value_heads",
            "attention.key_length": "head_dim",
            "attention.value_length": "head_dim",
            "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        }.items()
    }
    fields[f"{architecture}.rope.freq_base"] = float(config["rope_parameters"]["rope_theta"])
    if config["sliding_window"]:
        fields[f"{architecture}.attention.sliding_window"] = config["sliding_window"]
    stored = json.loads((directory / "tokenizer.json").read_text())
    tokens = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].__getitem__)
    tokens += [token["content"] for token in stored["added_tokens"] if token["content"] not in tokens]
    special = [token["content"] for token in stored["added_tokens"]]
    tokens.append("ab")  # a GGUF cannot hold an empty list of merges
    padding = config["vocab_size"] - len(tokens)
    types = [CONTROL if token in special else NORMAL for token in tokens] + [UNUSED] * padding
    tokens += [f"[PAD{len(tokens) + index}]" for index in range(padding)]
    return fields | vocabulary_fields(tokens, types, merges=["a b"])


def vocabulary_fields(
    tokens: Sequence[str],
    types: Sequence[int],
    *,
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    model: str = "gpt2",
    pre: str = "gpt-2",
) -> Fields:
    """Return the metadata of a vocabulary; the last special token ends texts."""
    last = max((index for index, type_ in enumerate(types) if type_ == CONTROL), default=0)
    fields: Fields = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(types),
        "tokenizer.ggml.eos_token_id": last,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    if merges is not None:
        fields |= {"tokenizer.ggml.merges": list(merges), "tokenizer.ggml.pre": pre}
    if scores is not None:
        fields["tokenizer.ggml.scores"] = list(scores)
    return fields


def write_gguf(
    path: Path,
    directory: Path,
    architecture: str,
    *,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    pack: Callable[[str, np.ndarray], tuple[np.ndarray, Any]] | None = None,
) -> Path:
    """Write `directory` as one file.

    Args:
        path: the file.
        directory: a tiny model of float32 weights, its `vocab_size` at least one above its tokens.
        architecture: `llama`, `qwen2` or `qwen3`.
        fields: metadata to add or replace; None leaves one out.
        tensors: tensors to add or replace.
        pack: name and matrix → stored bytes and their type; None keeps float32.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (gguf_fields(directory, architecture) | dict(fields or {})).items():
        _add_field(writer, name, value)
    for name, weight in (gguf_tensors(directory, architecture) | dict(tensors or {})).items():
        if pack is not None and weight.ndim == 2:
            data, kind = pack(name, weight)
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_string(name, value)
