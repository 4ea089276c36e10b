"""The shape of a decoder, read from a Hugging Face `config.json`.

Knows the fields of the Llama family (Llama, Mistral, Qwen2, Qwen3), old and new spelling (transformers 5 moved
`rope_theta` and `rope_scaling` into `rope_parameters`). A field that would change the arithmetic and is not implemented
is refused by name; nothing is silently ignored. A missing field means what it means to transformers. Loads no weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROPE_TYPES = ("default", "linear", "llama3")


class ModelError(ValueError):
    """A model directory cannot be served; the message names the file and the field or tensor."""


@dataclass(frozen=True)
class Architecture:
    """What the code of an architecture fixes, and what a field means that its `config.json` leaves out."""

    qkv_bias: bool | None = None
    """Bias of the q, k and v projections alone; None: `attention_bias` decides, for the output projection as well."""
    has_mlp_bias: bool = False
    """`mlp_bias` is a field."""
    qk_norm: bool = False
    """Every query and key head goes through an RMSNorm of its own width before it is rotated."""
    sliding_window: Literal["never", "always", "flagged"] = "never"
    """Whether `sliding_window` counts; `flagged`: with `use_sliding_window`, and then only in some layers."""
    default_kv_heads: int | None = None
    """None: as many as query heads."""
    default_head_dim: int | None = None
    """None: `hidden_size / num_attention_heads`."""


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(has_mlp_bias=True),
    "MistralForCausalLM": Architecture(qkv_bias=False, sliding_window="always", default_kv_heads=8),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, sliding_window="flagged", default_kv_heads=32),
    "Qwen3ForCausalLM": Architecture(
        qk_norm=True, sliding_window="flagged", default_kv_heads=32, default_head_dim=128
    ),
}
MISTRAL_WINDOW = 4096
"""What transformers takes for Mistral's `sliding_window` when the field is missing; null means none."""


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
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Query and key heads have an RMSNorm each."""
    sliding_window: int | None
    """A row sees its own position and the `sliding_window - 1` before it; None: all."""
    eos_token_ids: frozenset[int]


def read_config(directory: Path) -> DecoderConfig:
    """Read and check `config.json` (and the EOS ids of `generation_config.json`, if there is one).

    Raises:
        ModelError: a file is missing or unreadable, a field is missing, has a bad value, or is not supported.
    """
    path = directory / "config.json"
    return parse_config(read_json(path), path)


def parse_config(raw: dict[str, Any], path: Path) -> DecoderConfig:
    """Check the content of a `config.json`; `path` is where it came from. See `read_config`."""
    architecture = _architecture(raw, path)
    hidden_size = _positive(raw, "hidden_size", path)
    num_heads = _positive(raw, "num_attention_heads", path)
    num_kv_heads = _kv_heads(raw, path, architecture, num_heads)
    head_dim = architecture.default_head_dim or hidden_size // num_heads
    head_dim = _positive(raw, "head_dim", path, default=head_dim)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{path}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ModelError(f"{path}: head_dim must be even for rotary embeddings, got {head_dim}")
    max_positions = _positive(raw, "max_position_embeddings", path)
    vocab_size = _positive(raw, "vocab_size", path)
    attention_bias = bool(raw.get("attention_bias", False)) if architecture.qkv_bias is None else False
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
        qkv_bias=attention_bias or bool(architecture.qkv_bias),
        output_bias=attention_bias,
        mlp_bias=architecture.has_mlp_bias and bool(raw.get("mlp_bias", False)),
        qk_norm=architecture.qk_norm,
        sliding_window=_sliding_window(raw, path, architecture, max_positions),
        eos_token_ids=_read_eos(raw, path.parent, vocab_size),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object; ModelError for anything else."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; expected a local Hugging Face model directory") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return raw


def _architecture(raw: dict[str, Any], path: Path) -> Architecture:
    """Return what the named architecture fixes; refuse what no supported one computes."""
    named = raw.get("architectures") or []
    found = next((name for name in named if name in ARCHITECTURES), None) if isinstance(named, list) else None
    if found is None:
        raise ModelError(f"{path}: architectures {named} is not supported; supported: {list(ARCHITECTURES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; supported: 'silu'")
    if raw.get("quantization_config"):
        raise ModelError(f"{path}: quantization_config is not supported, got {raw['quantization_config']!r}")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{path}: partial_rotary_factor {raw['partial_rotary_factor']} is not supported")
    return ARCHITECTURES[found]


def _kv_heads(raw: dict[str, Any], path: Path, architecture: Architecture, num_heads: int) -> int:
    missing = "num_key_value_heads" not in raw  # null is something else: as many as query heads
    default = architecture.default_kv_heads if missing else None
    return _positive(raw, "num_key_value_heads", path, default=default or num_heads)


def _sliding_window(
    raw: dict[str, Any], path: Path, architecture: Architecture, max_positions: int
) -> int | None:
    """Return the window that counts, None if it never hides anything."""
    kinds = raw.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds) and architecture.sliding_window != "always":
        raise ModelError(
            f"{path}: layer_types {sorted(set(kinds))} is not supported; supported: 'full_attention'"
        )
    if architecture.sliding_window == "flagged":
        if raw.get("use_sliding_window"):
            raise ModelError(
                f"{path}: use_sliding_window is not supported, got {raw['use_sliding_window']!r}"
            )
        return None
    if architecture.sliding_window == "never":
        if raw.get("sliding_window"):
            raise ModelError(f"{path}: sliding_window is not supported, got {raw['sliding_window']!r}")
        return None
    if raw.get("sliding_window", MISTRAL_WINDOW) is None:
        return None
    window = _positive(raw, "sliding_window", path, default=MISTRAL_WINDOW)
    return window if window < max_positions else None


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
        value = read_json(path).get("eos_token_id", value)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise ModelError(f"{directory}: eos_token_id {token_id!r} is outside 0..{vocab_size - 1}")
    return frozenset(ids)
