"""Tiny draft heads in the published layouts, and a target that one of them can follow.

Names and shapes are those of SafeAILab/EAGLE (cnets1.py, cnets.py) and vllm-project/speculators (models/eagle.py,
models/eagle3/core.py, convert/eagle/eagle_converter.py).
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYOUTS = (
    "EAGLE-1",
    "EAGLE-3",
    "speculators eagle",
    "speculators eagle layernorms",
    "speculators eagle3",
    "own",
)
AUX_LAYERS = [1, 1, 2]


def write_calm_target(target: Path, directory: Path, strength: float = 0.2) -> Path:
    """Copy a tiny model with its layers' outputs scaled down: the next token depends mostly on the last one."""
    weights = load_file(target / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = strength * weights[name]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for file in target.iterdir():
        if file.suffix == ".json":
            (directory / file.name).write_bytes(file.read_bytes())
    return directory


def write_head(
    target: Path,
    directory: Path,
    layout: str,
    *,
    seed: int = 0,
    max_positions: int = 512,
    draft_vocab: int = 200,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Write a head of `layout` for the tiny model in `target`.

    An EAGLE-1 head passes the embedding on, so that it often agrees with a calm target; its layer is random, so that
    its drafts depend on everything before. `changes` replaces tensors by name (None leaves one out).
    """
    config = json.loads((target / "config.json").read_text())
    final_norm = load_file(target / "model.safetensors")["model.norm.weight"].double()
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return scale * shape[-1] ** -0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)

    def norm(width: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(width, generator=generator, dtype=torch.float64)

    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    is_eagle3 = layout in ("EAGLE-3", "speculators eagle3")
    read = 2 * hidden if is_eagle3 else hidden
    layer = {
        "self_attn.q_proj.weight": draw(config["num_attention_heads"] * config["head_dim"], read, scale=2.0),
        "self_attn.k_proj.weight": draw(config["num_key_value_heads"] * config["head_dim"], read, scale=2.0),
        "self_attn.v_proj.weight": draw(config["num_key_value_heads"] * config["head_dim"], read, scale=1.0),
        "self_attn.o_proj.weight": draw(hidden, config["num_attention_heads"] * config["head_dim"]),
        "mlp.gate_proj.weight": draw(inner, hidden),
        "mlp.up_proj.weight": draw(inner, hidden),
        "mlp.down_proj.weight": draw(hidden, inner),
        "post_attention_layernorm.weight": norm(hidden),
    }
    ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    vocabulary = {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True),
    }
    join = torch.cat((torch.diag(final_norm), draw(hidden, hidden)), dim=1)
    tensors: dict[str, torch.Tensor] = {}
    settings = {**config, "num_hidden_layers": 1, "max_position_embeddings": max_positions}
    if layout in ("EAGLE-1", "own"):
        tensors = {"fc.weight": join, "fc.bias": draw(hidden)}
        tensors |= {f"layers.0.{name}": value for name, value in layer.items()}
        tensors |= vocabulary if layout == "own" else {}
    elif layout.startswith("speculators eagle") and not is_eagle3:
        tensors = {"fusion_fc.weight": join}
        tensors |= {f"transformer.{name}": value for name, value in layer.items()}
        if layout.endswith("layernorms"):
            tensors |= {
                "embedding_layernorm.weight": norm(hidden),
                "transformer.input_layernorm.weight": norm(hidden),
                "pre_lm_head_layernorm.weight": final_norm,
            }
        settings = {
            "speculators_model_type": "eagle",
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
            "layernorms": layout.endswith("layernorms"),
            "fusion_bias": False,
            "transformer_layer_config": settings,
        }
    else:
        prefix = "midlayer." if layout == "EAGLE-3" else "layers.0."
        layer |= {"hidden_norm.weight": norm(hidden), "input_layernorm.weight": norm(hidden)}
        tensors = {
            "fc.weight": draw(hidden, 3 * hidden, scale=1.0),
            "norm.weight": norm(hidden),
            "lm_head.weight": draw(len(ids), hidden, scale=2.0),
            **vocabulary,
            **{f"{prefix}{name}": value for name, value in layer.items()},
        }
        if layout == "EAGLE-3":
            settings |= {
                "draft_vocab_size": draft_vocab,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS},
            }
        else:
            tensors["embed_tokens.weight"] = draw(vocab, hidden, scale=3.0)
            settings = {
                "speculators_model_type": "eagle3",
                "architectures": ["Eagle3Speculator"],
                "draft_vocab_size": draft_vocab,
                "norm_before_residual": True,
                "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
                "transformer_layer_config": settings,
            }
    for name, value in (changes or {}).items():
        tensors.pop(name, None)
        if isinstance(value, torch.Tensor):
            tensors[name] = value
    (directory / "config.json").write_text(json.dumps(settings, indent=2))
    save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
    return directory
