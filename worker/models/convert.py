"""One GGUF file of a Llama model with a GPT-2 style tokenizer → a Hugging Face directory (safetensors, float32).

Weights are dequantised exactly as the GGUF defines them; float32 holds every such value. Knows nothing about where the
file comes from. Only the tokenizer flavour of the default model (`smollm`) is known; another one is refused.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from worker.models.config import ModelError

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
CONTROL_TOKEN = 3
"""GGUF token type of special tokens."""


def convert_gguf(source: Path, directory: Path) -> None:
    """Write config, generation config, weights and tokenizer of `source` into an existing directory.

    Raises:
        ModelError: the file is of another architecture or tokenizer, or holds a tensor of unknown name.
    """
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, expected in {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }.items():
        if fields.get(name) != expected:
            raise ModelError(f"{source}: {name} is {fields.get(name)!r}, only {expected!r} can be converted")
    weights = dict(_tensors(reader, fields))
    config = _config(fields, tied="lm_head.weight" not in weights)
    _write_json(directory / "config.json", config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", ids)
    _write_tokenizer(directory, fields)
    target = directory / "model.safetensors"
    save_file(weights, target, metadata={"format": "pt"})
    target.chmod((directory / "config.json").stat().st_mode)  # safetensors writes it for the owner only


def _tensors(reader: gguf.GGUFReader, fields: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, float32 weight) of every tensor."""
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        stem, _, kind = tensor.name.rpartition(".")
        block, _, part = stem.rpartition(".")
        if block.startswith("blk.") and part in LAYER_TENSORS:
            name = f"model.layers.{block.removeprefix('blk.')}.{LAYER_TENSORS[part]}"
        elif stem in MODEL_TENSORS:
            name = MODEL_TENSORS[stem]
        else:
            raise ModelError(f"GGUF tensor {tensor.name} is unknown")
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if part in heads:
            weight = _pair_halves(weight, heads[part])
        yield f"{name}.{kind}", np.ascontiguousarray(weight)


def _pair_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's row order: it rotates neighbouring dimensions, Hugging Face pairs i with i + head_dim / 2."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # Stored as float32: 1e-05 comes out as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _write_tokenizer(directory: Path, fields: dict[str, Any]) -> None:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # `smollm`: every digit is a token of its own, the rest is split as in GPT-2.
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
