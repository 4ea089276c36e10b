"""Models of real sizes with seeded random weights, made where they are used: nothing is read or fetched."""

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.fast_path import write_random_head
from worker.models.config import parse_config
from worker.models.decoder import Decoder, DecoderLayer, DecoderWeights
from worker.models.linear import Linear, make_linear
from worker.models.norm import RmsNorm
from worker.models.packed import RefinedHead
from worker.spec.eagle_head import EagleHead
from worker.spec.eagle_layouts import load_head


class Sizes(NamedTuple):
    """Of a decoder with tied embeddings."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int


SIZES = {
    "135M": Sizes(49152, 576, 1536, 30, 9, 3),  # SmolLM2-135M
    "1B": Sizes(128256, 2048, 8192, 16, 32, 8),  # Llama-3.2-1B
    "tiny": Sizes(258, 64, 128, 2, 4, 2),  # for rehearsals
}


def random_decoder(sizes: Sizes, *, seed: int, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Make a decoder; equal arguments give equal weights."""
    generator = torch.Generator(device).manual_seed(seed)
    head_dim = sizes.hidden_size // sizes.num_heads
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    width = (sizes.num_heads + 2 * sizes.num_kv_heads) * head_dim

    def weight(out_features: int, in_features: int) -> Tensor:
        drawn = torch.randn(
            out_features, in_features, generator=generator, dtype=torch.float32, device=device
        )
        return (drawn * in_features**-0.5).to(dtype)

    def linear(out_features: int, in_features: int) -> Linear:
        return make_linear(weight(out_features, in_features), None, dtype, device)

    def norm() -> RmsNorm:
        return RmsNorm(torch.ones(hidden, dtype=dtype, device=device), 1e-5)

    layers = [
        DecoderLayer(
            input_norm=norm(),
            head_norm=None,
            qkv=linear(width, hidden),
            output=linear(hidden, sizes.num_heads * head_dim),
            post_attention_norm=norm(),
            gate_up=linear(2 * inner, hidden),
            down=linear(hidden, inner),
        )
        for _ in range(sizes.num_layers)
    ]
    embedding = weight(sizes.vocab_size, hidden)
    head = make_linear(embedding, None, dtype, device)
    return Decoder(
        parse_config(_config(sizes), Path("config.json")),
        DecoderWeights(
            embedding, layers, norm(), RefinedHead(head, embedding) if dtype == torch.bfloat16 else head
        ),
        dtype,
    )


def random_head(sizes: Sizes, target: Decoder) -> EagleHead:
    """Make an EAGLE head of the sizes that `train-draft` gives it; its output weights are rows of the target's."""
    with tempfile.TemporaryDirectory() as made:
        path, target_path = Path(made) / "head", Path(made) / "target"
        path.mkdir()
        target_path.mkdir()
        (target_path / "config.json").write_text(json.dumps(_config(sizes)), encoding="utf-8")
        embedding = target.embed(torch.arange(sizes.vocab_size, device=target.device)).cpu()
        save_file({"model.embed_tokens.weight": embedding}, target_path / "model.safetensors")
        write_random_head(target.config, path)
        return load_head(path, target, target_path, num_tokens=sizes.vocab_size, packing=None)


def _config(sizes: Sizes) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    }
