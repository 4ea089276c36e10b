"""A trained head as a directory that `spec.draft_model_path` takes: weights, config, model card.

The layout is EAGLE-1's with fused features, an input norm and a draft vocabulary; the output head is the target's own
rows, so it is not stored. Knows nothing about training.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from worker.models.config import DecoderConfig, RopeConfig
from worker.train.network import TrainedHead


def export_head(
    head: TrainedHead, vocabulary: Tensor, feature_layers: tuple[int, ...], directory: Path, card: str
) -> None:
    """Write `model.safetensors` (bfloat16), `config.json` and `README.md`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in _named(head).items()}
    tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
    tensors["t2d"] = torch.zeros(head.layer.vocab_size, dtype=torch.bool).index_fill(0, vocabulary, True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    config = _config(head.layer, feature_layers, len(vocabulary))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "README.md").write_text(card, encoding="utf-8")


def _named(head: TrainedHead) -> Mapping[str, Tensor]:
    layer = head.layer
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    q, k, v = torch.split(head.qkv.detach(), [queries, keys, keys])
    gate, up = head.gate_up.detach().chunk(2)
    return {
        "fuse_norm.weight": head.fuse_norm.detach(),
        "fuse.weight": head.fuse.detach(),
        "fc.weight": head.join.detach(),
        "layers.0.input_layernorm.weight": head.input_norm.detach(),
        "layers.0.self_attn.q_proj.weight": q,
        "layers.0.self_attn.k_proj.weight": k,
        "layers.0.self_attn.v_proj.weight": v,
        "layers.0.self_attn.o_proj.weight": head.output.detach(),
        "layers.0.post_attention_layernorm.weight": head.post_attention_norm.detach(),
        "layers.0.mlp.gate_proj.weight": gate,
        "layers.0.mlp.up_proj.weight": up,
        "layers.0.mlp.down_proj.weight": head.down.detach(),
    }


def _config(layer: DecoderConfig, feature_layers: tuple[int, ...], draft_vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "max_position_embeddings": layer.max_position_embeddings,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_parameters": _rope_parameters(layer.rope),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(feature_layers),
    }


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        fields["factor"] = rope.factor
    if rope.kind == "llama3":
        fields |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    return fields
