"""Fixtures for everybody: real model directories, small enough to write and run in milliseconds."""

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
BYTE_TOKENS = 256
TEXT_VOCAB_SIZE = BYTE_TOKENS + 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TinyModelDir = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> TinyModelDir:
    """A factory of seeded random model directories; equal parameters give the same directory.

    `tiny_model_dir(architecture="LlamaForCausalLM", seed=0, vocab_size=258, eos_token_id=-1, max_positions=512,
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, tied=False, bias=False, dtype=torch.float64, noise=0.0,
    noise_seed=1, rope=None, sharded=False, head_dim=None, sliding_window=None, padding=0)`. `noise` adds that share of
    each weight's own spread, drawn from `noise_seed`: the result drafts for the model of the same `seed` (0.02 agrees
    on about 85 % of tokens, 0.1 on half, 0.5 on few). Token ids 0…255 are bytes, 256 is <|im_start|>, 257 is
    <|im_end|>; a `vocab_size` below 258 leaves the tokenizer out (ids only). `padding` appends that many rows to
    embedding and head that belong to no token and whose logits win unless they are masked. `eos_token_id` −1 is the
    last of these tokens; None is none. `rope` replaces `rope_parameters`.
    """

    @functools.cache
    def cached(items: tuple[tuple[str, Any], ...]) -> Path:
        parameters = {name: json.loads(value) if name == "rope" else value for name, value in items}
        return write_tiny_model(tmp_path_factory.mktemp("tiny-model"), **parameters)

    def make(**parameters: Any) -> Path:
        if "rope" in parameters:
            parameters["rope"] = json.dumps(parameters["rope"])
        return cached(tuple(sorted(parameters.items())))

    return make


@pytest.fixture(scope="session")
def gguf_writer() -> ModuleType:
    """The module `worker/gguf_writer.py`: `write_gguf(path, directory, architecture, …)` and its parts."""
    spec = importlib.util.spec_from_file_location(
        "gguf_writer", Path(__file__).parent / "worker" / "gguf_writer.py"
    )
    if spec is None or spec.loader is None:
        raise ImportError("tests/worker/gguf_writer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_tiny_model(
    directory: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    seed: int = 0,
    vocab_size: int = TEXT_VOCAB_SIZE,
    eos_token_id: int | None = -1,
    max_positions: int = 512,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    tied: bool = False,
    bias: bool = False,
    dtype: torch.dtype = torch.float64,
    noise: float = 0.0,
    noise_seed: int = 1,
    rope: dict[str, Any] | None = None,
    sharded: bool = False,
    head_dim: int | None = None,
    sliding_window: int | None = None,
    padding: int = 0,
) -> Path:
    """Write config, weights and (from 258 tokens on) a tokenizer; see `tiny_model_dir`. EOS −1: the last token."""
    config = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim or hidden_size // num_heads,
        "sliding_window": sliding_window,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "mlp_bias": bias,
        "eos_token_id": min(TEXT_VOCAB_SIZE, vocab_size) - 1 if eos_token_id == -1 else eos_token_id,
        "bos_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
    }
    weights = _random_weights(config, seed)
    if noise:
        generator = torch.Generator().manual_seed(noise_seed)
        for weight in weights.values():
            spread = weight.std() if weight.dim() == 2 else 0.0
            weight += noise * spread * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    if padding:
        config["vocab_size"] += padding
        for name in weights.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
            loud = 10 * weights[name][: padding // 2]  # of each pair one is positive
            weights[name] = torch.cat((weights[name], loud, -loud))
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    _save_weights(directory, {name: weight.to(dtype) for name, weight in weights.items()}, sharded)
    if vocab_size >= TEXT_VOCAB_SIZE:
        _save_tokenizer(directory, max_positions)
    return directory


def _random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Draw weights whose greedy text varies: strong layers against the embedding, a head with sharp logits."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    qwen2, qwen3 = (name in config["architectures"] for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"))
    weights = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden, scale=1.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in shapes.items():
            weights[f"{prefix}{name}.weight"] = draw(rows, columns, scale=1.5 * columns**-0.5)
            if config["attention_bias"] or (qwen2 and name[-6:] in ("q_proj", "k_proj", "v_proj")):
                weights[f"{prefix}{name}.bias"] = draw(rows, scale=0.2)
        for name in ("self_attn.q_norm", "self_attn.k_norm") if qwen3 else ():
            weights[f"{prefix}{name}.weight"] = 1 + draw(config["head_dim"], scale=0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = 1 + draw(hidden, scale=0.1)
    weights["model.norm.weight"] = 1 + draw(hidden, scale=0.1)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(config["vocab_size"], hidden, scale=2.0 * hidden**-0.5)
    return weights


def _save_weights(directory: Path, weights: dict[str, torch.Tensor], sharded: bool) -> None:
    if not sharded:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: weights[name] for name in members}, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, members in shards.items() for name in members}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _save_tokenizer(directory: Path, max_positions: int) -> None:
    """Write a byte-level tokenizer that AutoTokenizer loads: one token per UTF-8 byte, and the two specials."""
    # ByteLevel writes each byte as one printable character: itself, or the next one from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(spare)): byte for byte in range(BYTE_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([IM_START, IM_END])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": IM_START,
        "eos_token": IM_END,
        "pad_token": IM_END,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
