"""The shape of a decoder, read from a Hugging Face `config.json`.

Knows the fields of the Llama family, old and new spelling (transformers 5 moved `rope_theta` and `rope_scaling` into
`rope_parameters`). A field that would change the arithmetic and is not implemented is refused by name; nothing is
silently ignored. Loads no weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("LlamaForCausalLM",)
ROPE_TYPES = ("default", "linear", "llama3")


class ModelError(ValueError):
    """A model directory cannot be served; the message names the file and the field or tensor."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency and its scaling (`factor` 1 for `default`)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and flags of one decoder. `vocab_size` is the width of the logits."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: frozenset[int]


def read_config(directory: Path) -> DecoderConfig:
    """Read and check `config.json` (and the EOS ids of `generation_config.json`, if there is one).

    Raises:
        ModelError: a file is missing or unreadable, a field is missing, has a bad value, or is not supported.
    """
    path = directory / "config.json"
    raw = _read_json(path)
    _check_supported(raw, path)
    hidden_size = _positive(raw, "hidden_size", path)
    num_heads = _positive(raw, "num_attention_heads", path)
    num_kv_heads = _positive(raw, "num_key_value_heads", path, default=num_heads)
    head_dim = _positive(raw, "head_dim", path, default=hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{path}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ModelError(f"{path}: head_dim must be even for rotary embeddings, got {head_dim}")
    max_positions = _positive(raw, "max_position_embeddings", path)
    vocab_size = _positive(raw, "vocab_size", path)
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size", path),
        num_layers=_positive(raw, "num_hidden_layers", path),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=_number(raw, "rms_norm_eps", path, 1e-6),
        rope=_read_rope(raw, path, max_positions),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        eos_token_ids=_read_eos(raw, directory, vocab_size),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; expected a local Hugging Face model directory") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return raw


def _check_supported(raw: dict[str, Any], path: Path) -> None:
    architectures = raw.get("architectures") or []
    if not set(architectures) & set(ARCHITECTURES):
        raise ModelError(
            f"{path}: architectures {architectures} is not supported; supported: {ARCHITECTURES}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; supported: 'silu'")
    for name in ("sliding_window", "quantization_config"):
        if raw.get(name):
            raise ModelError(f"{path}: {name} is not supported, got {raw[name]!r}")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{path}: partial_rotary_factor {raw['partial_rotary_factor']} is not supported")


def _positive(raw: dict[str, Any], name: str, path: Path, default: int | None = None) -> int:
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise ModelError(f"{path}: field {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{path}: {name} must be a positive integer, got {value!r}")
    return value


def _number(raw: dict[str, Any], name: str, path: Path, default: float | None = None) -> float:
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise ModelError(f"{path}: field {name} is missing")
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelError(f"{path}: {name} must be a positive number, got {value!r}")
    return float(value)


def _read_rope(raw: dict[str, Any], path: Path, max_positions: int) -> RopeConfig:
    fields: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):  # transformers before and since 5
        part = raw.get(name) or {}
        if not isinstance(part, dict):
            raise ModelError(f"{path}: {name} must be an object, got {part!r}")
        fields |= part
    theta = _number({"rope_theta": raw.get("rope_theta"), **fields}, "rope_theta", path, 10_000.0)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(f"{path}: rope_type {kind!r} is not supported; supported: {ROPE_TYPES}")
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{path}: partial_rotary_factor {fields['partial_rotary_factor']} is not supported")
    if kind == "default":
        return RopeConfig(theta)
    factor = _number(fields, "factor", path)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low = _number(fields, "low_freq_factor", path)
    high = _number(fields, "high_freq_factor", path)
    if high <= low:
        raise ModelError(f"{path}: rope high_freq_factor {high} must be above low_freq_factor {low}")
    original = _positive(fields, "original_max_position_embeddings", path, default=max_positions)
    return RopeConfig(theta, kind, factor, low, high, original)


def _read_eos(raw: dict[str, Any], directory: Path, vocab_size: int) -> frozenset[int]:
    """Return the ids that end a text: those of generation_config.json win over config.json's."""
    path = directory / "generation_config.json"
    value = raw.get("eos_token_id")
    if path.exists():
        value = _read_json(path).get("eos_token_id", value)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise ModelError(f"{directory}: eos_token_id {token_id!r} is outside 0..{vocab_size - 1}")
    return frozenset(ids)
