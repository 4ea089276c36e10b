"""Published draft heads from a local directory: EAGLE-1, EAGLE-3 and `speculators` layouts, and our own.

Ours is EAGLE-1's with a draft vocabulary (`d2t`) whose head is
made of the target's own rows. Everything is checked against the target; a mismatch names the tensor or the field.
Never touches the network. Knows nothing about drafting.
"""

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.model_runner import POST_NORM
from worker.models.config import DecoderConfig, ModelError, parse_config, read_json
from worker.models.decoder import Decoder
from worker.models.loader import tensor_files
from worker.models.packed import Packing
from worker.spec.eagle_file import EAGLE_1, EAGLE_3, SPECULATORS_EAGLE, SPECULATORS_EAGLE_3, HeadFile, Layout
from worker.spec.eagle_head import EagleHead, HeadConfig

LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
"""What `speculators` leaves out of a layer's configuration: it stores differences from transformers' defaults."""
SPECULATORS = {"eagle": SPECULATORS_EAGLE, "eagle3": SPECULATORS_EAGLE_3}


def load_head(
    path: Path, target: Decoder, target_path: Path, *, num_tokens: int, packing: Packing | None
) -> EagleHead:
    """Load the head in a directory for a target.

    Args:
        path: directory with `config.json` and `model.safetensors` (or `pytorch_model.bin`).
        target: the loaded target: dtype and device are taken from it, embedding and head where the head has none.
        target_path: the target's directory.
        num_tokens: ids the target may draw.
        packing: how projections are packed, None for not at all.

    Raises:
        ModelError: a file, field or tensor is missing, unsupported, or does not fit the target.
    """
    config_path = path / "config.json"
    raw = read_json(config_path)
    tensors = _read_tensors(path)
    layout = _layout(raw, tensors, path)
    config = _config(raw, config_path, layout, target.config)
    with torch.no_grad():
        file = HeadFile(path, layout, tensors, target, packing)
        weights = file.weights(config, target_path)
    wide = target.dtype if packing is None else torch.float32
    return EagleHead(config, weights, target, num_tokens=num_tokens, wide=wide)


class HeadSizes(NamedTuple):
    """What a head takes, before it is loaded."""

    num_weights: int
    numbers_per_token: int
    """Keys and values of the one layer, and the target's features."""


def read_head_sizes(path: Path, target: DecoderConfig) -> HeadSizes:
    """Read a head's configuration and count its weights. Raises ModelError as `load_head` does."""
    config_path = path / "config.json"
    raw = read_json(config_path)
    counts = _count_weights(path)
    config = _config(raw, config_path, _layout(raw, counts, path), target)
    layer = config.layer
    num_weights = sum(counts.values())
    if "d2t" in counts and "lm_head.weight" not in counts:
        num_weights += counts["d2t"] * layer.hidden_size
    features = len(config.feature_layers) * target.hidden_size
    return HeadSizes(num_weights, 2 * layer.num_kv_heads * layer.head_dim + features)


def _count_weights(path: Path) -> dict[str, int]:
    if _is_binary(path):
        return {name: tensor.numel() for name, tensor in _read_tensors(path).items()}
    counts: dict[str, int] = {}
    for name, file in tensor_files(path).items():
        try:
            with safe_open(str(file), framework="pt") as opened:
                counts[name] = math.prod(opened.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: tensor {name} cannot be read: {error}") from error
    return counts


def _is_binary(path: Path) -> bool:
    return (path / "pytorch_model.bin").exists() and not (path / "model.safetensors").exists()


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if _is_binary(path):
        binary = path / "pytorch_model.bin"
        try:
            loaded = torch.load(binary, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise ModelError(f"{binary}: cannot be read: {error}") from error
        if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise ModelError(f"{binary}: must hold tensors by name")
        return loaded
    tensors: dict[str, Tensor] = {}
    for name, file in tensor_files(path).items():
        try:
            with safe_open(str(file), framework="pt") as opened:
                tensors[name] = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: tensor {name} cannot be read: {error}") from error
    return tensors


def _layout(raw: Mapping[str, Any], tensors: Mapping[str, object], path: Path) -> Layout:
    kind = raw.get("speculators_model_type")
    if kind is not None:
        if kind not in SPECULATORS:
            raise ModelError(
                f"{path}/config.json: speculators_model_type {kind!r} is not supported; "
                f"supported: {list(SPECULATORS)}"
            )
        return SPECULATORS[kind]
    if any(name.startswith("midlayer.") for name in tensors):
        return EAGLE_3
    if "layers.0.hidden_norm.weight" in tensors:
        return SPECULATORS_EAGLE_3
    if "fc.weight" in tensors:
        return EAGLE_1
    raise ModelError(
        f"{path}: no draft head: tensor fc.weight is missing (EAGLE-1, EAGLE-3), and config.json has no "
        "speculators_model_type"
    )


def _config(raw: dict[str, Any], path: Path, layout: Layout, target: DecoderConfig) -> HeadConfig:
    layer_raw: Any = raw
    if "transformer_layer_config" in raw:
        if not isinstance(raw["transformer_layer_config"], dict):
            raise ModelError(f"{path}: transformer_layer_config must be an object")
        layer_raw = LLAMA_DEFAULTS | raw["transformer_layer_config"]
    layers = layer_raw.get("num_hidden_layers", 1)
    if "speculators_model_type" not in raw and layers != 1:
        raise ModelError(f"{path}: num_hidden_layers {layers} is not supported; a head has 1")
    vocab_size = layer_raw.get("vocab_size", target.vocab_size)
    layer = parse_config(
        {
            **layer_raw,
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "vocab_size": vocab_size,
            "eos_token_id": None,
        },
        path,
    )
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(layer, name), getattr(target, name)
        if ours != theirs:
            raise ModelError(f"{path}: {name} {ours} does not fit the target's {theirs}")
    return HeadConfig(
        style=layout.style,
        layer=layer,
        feature_layers=_feature_layers(raw, path, layout, target.num_layers),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
    )


def _feature_layers(raw: Mapping[str, Any], path: Path, layout: Layout, num_layers: int) -> tuple[int, ...]:
    own = raw.get("eagle_config") or {}
    named = raw.get("eagle_aux_hidden_state_layer_ids", own.get("eagle_aux_hidden_state_layer_ids"))
    if named is None:
        named = [POST_NORM] if layout.style == "eagle" else [2, num_layers // 2, num_layers - 3]
    allowed = set(range(1, num_layers + 1)) | ({POST_NORM} if layout.style == "eagle" else set())
    if not isinstance(named, list) or not named or any(layer not in allowed for layer in named):
        raise ModelError(
            f"{path}: eagle_aux_hidden_state_layer_ids {named} does not fit the target's {num_layers} layers"
        )
    return tuple(named)
