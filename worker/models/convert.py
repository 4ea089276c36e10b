"""One GGUF file of a Llama-family model → a Hugging Face directory (safetensors, float32).

Weights are dequantised exactly as the GGUF defines them; float32 holds every such value. They are written part by
part, so a large model needs no more memory than its largest part. Knows nothing about where the file comes from.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from worker.models.config import ModelError
from worker.models.gguf_config import ROPE_FACTORS, read_gguf_config, read_gguf_generation_config
from worker.models.gguf_file import GgufFile
from worker.models.gguf_tokenizer import write_gguf_tokenizer

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
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
PAIRED_ROWS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
PART_BYTES = 1 << 30
"""Size from which a file of weights is closed and the next one begun."""
FLOAT32_BYTES = 4


def convert_gguf(source: Path, directory: Path) -> None:
    """Write config, generation config, weights and tokenizer of `source` into an existing directory.

    Raises:
        ModelError: the file is damaged, of another architecture or tokenizer, lacks a part, or the disk is too small.
    """
    file = GgufFile(source)
    config = read_gguf_config(file)
    names = {name: _hugging_face_name(file, name) for name in file.tensors if name != ROPE_FACTORS}
    _check_disk(file, directory)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", read_gguf_generation_config(file, config))
    write_gguf_tokenizer(file, directory)
    _write_weights(file, config, names, directory)


def _hugging_face_name(file: GgufFile, tensor: str) -> str:
    stem, _, kind = tensor.rpartition(".")
    block, _, part = stem.rpartition(".")
    if block.startswith("blk.") and part in LAYER_TENSORS:
        return f"model.layers.{block.removeprefix('blk.')}.{LAYER_TENSORS[part]}.{kind}"
    if stem in MODEL_TENSORS:
        return f"{MODEL_TENSORS[stem]}.{kind}"
    raise ModelError(f"{file.path}: tensor {tensor} is unknown")


def _check_disk(file: GgufFile, directory: Path) -> None:
    need = FLOAT32_BYTES * sum(int(tensor.n_elements) for tensor in file.tensors.values())
    free = shutil.disk_usage(directory).free
    if need > free:
        raise ModelError(
            f"{file.path}: converted to float32 it takes {need / 1e9:.1f} GB, and {directory.parent} has "
            f"{free / 1e9:.1f} GB free"
        )


def _write_weights(file: GgufFile, config: dict[str, Any], names: dict[str, str], directory: Path) -> None:
    parts = list(_parts(file, names))
    whole = len(parts) == 1
    weight_map: dict[str, str] = {}
    for number, members in enumerate(parts, start=1):
        name = "model.safetensors" if whole else f"model-{number:05}-of-{len(parts):05}.safetensors"
        weights = {names[member]: _weight(file, config, member) for member in members}
        save_file(weights, directory / name, metadata={"format": "pt"})
        # safetensors writes it for the owner only
        (directory / name).chmod((directory / "config.json").stat().st_mode)
        weight_map |= dict.fromkeys(weights, name)
    if not whole:
        _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _parts(file: GgufFile, names: dict[str, str]) -> Iterator[list[str]]:
    """Yield the GGUF names of each file of weights."""
    part: list[str] = []
    size = 0
    for name in names:
        part.append(name)
        size += FLOAT32_BYTES * int(file.tensors[name].n_elements)
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _weight(file: GgufFile, config: dict[str, Any], name: str) -> np.ndarray:
    weight = file.weight(name)
    part = name.split(".")[-2]
    if part in PAIRED_ROWS and file.architecture == "llama":
        weight = _pair_halves(file, name, weight, config[PAIRED_ROWS[part]])
    return np.ascontiguousarray(weight)


def _pair_halves(file: GgufFile, name: str, weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's row order: it rotates neighbouring dimensions, Hugging Face pairs i with i + head_dim / 2."""
    rows = weight.shape[0]
    if rows % (2 * num_heads):
        raise ModelError(f"{file.path}: tensor {name} has {rows} rows, no even number for {num_heads} heads")
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
