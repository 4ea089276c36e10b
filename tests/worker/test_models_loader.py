import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from worker.models.config import ModelError, read_config
from worker.models.loader import load_decoder, load_tokenizer

CPU = torch.device("cpu")
MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}


@pytest.fixture
def model_dir(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_model_dir(), tmp_path / "model"))


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "REMOVED"}))


def load(directory: Path) -> None:
    load_decoder(directory, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures.*GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": "REMOVED"}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures LlamaForCausalLM is not supported"),
        ({"sliding_window": 4096}, "sliding_window is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .*sliding_attention"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": 64}, "use_sliding_window is not supported"),
        ({**QWEN3, "layer_types": ["sliding_attention"] * 2}, "layer_types .*sliding_attention"),
        ({**QWEN3, "head_dim": 8}, "layers.0.self_attn.q_norm.weight is missing"),
        ({**QWEN3, "head_dim": "REMOVED"}, r"q_norm.weight is missing|shape \(32, 32\).*\(512, 32\)"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "layers.0.self_attn.q_proj.bias is missing"),
        ({**MISTRAL, "num_key_value_heads": "REMOVED"}, "4 is no multiple of num_key_value_heads 8"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_size": "REMOVED"}, "field hidden_size is missing"),
        ({"hidden_size": 32.0}, "hidden_size must be a positive integer, got 32.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"eos_token_id": 258}, "eos_token_id 258 is outside 0..257"),
        ({"vocab_size": 300}, r"embed_tokens.weight has shape \(258, 32\), config.json says \(300, 32\)"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
        ({"attention_bias": True}, "tensor model.layers.0.self_attn.q_proj.bias is missing"),
    ],
)
def test_configs_are_refused_by_field(model_dir: Path, changes: dict[str, Any], message: str) -> None:
    change_config(model_dir, **changes)
    with pytest.raises(ModelError, match=message):
        load(model_dir)


def test_weights_that_would_be_ignored_are_refused(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, file)
    with pytest.raises(ModelError, match="q_norm.weight is not used"):
        load(model_dir)


def test_integer_weights_are_refused(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "model.norm.weight": torch.ones(32, dtype=torch.int8)}, file)
    with pytest.raises(ModelError, match="model.norm.weight has dtype torch.int8"):
        load(model_dir)


def test_damaged_and_missing_files_are_named(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere/config.json: no such file"):
        load(tmp_path / "nowhere")
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelError, match="model.safetensors: cannot be read"):
        load(model_dir)
    file.unlink()
    with pytest.raises(ModelError, match="neither model.safetensors nor"):
        load(model_dir)
    (model_dir / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="index.json: cannot be read"):
        load(model_dir)
    (model_dir / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json: cannot be read"):
        load(model_dir)


def test_a_shard_that_is_missing_is_named(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model_dir(sharded=True), tmp_path / "model"))
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002.safetensors"):
        load(directory)


def test_missing_fields_mean_what_they_mean_to_transformers(model_dir: Path) -> None:
    from transformers import AutoConfig

    missing = ("head_dim", "num_key_value_heads", "sliding_window", "rms_norm_eps", "tie_word_embeddings")
    for name in ("llama", "mistral", "qwen2", "qwen3"):
        architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[name]
        change_config(
            model_dir,
            architectures=[f"{architecture}ForCausalLM"],
            model_type=name,
            max_position_embeddings=32768,
            num_attention_heads=32,
            hidden_size=64,
            rope_parameters="REMOVED",
            **dict.fromkeys(missing, "REMOVED"),
        )
        ours, theirs = read_config(model_dir), AutoConfig.from_pretrained(model_dir)
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert ours.head_dim == head_dim
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.sliding_window == getattr(theirs, "sliding_window", None)
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


def test_old_and_new_rope_fields_mean_the_same(model_dir: Path) -> None:
    change_config(model_dir, rope_parameters={"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0})
    new = read_config(model_dir).rope
    change_config(
        model_dir, rope_parameters="REMOVED", rope_theta=5e4, rope_scaling={"type": "linear", "factor": 2.0}
    )
    assert read_config(model_dir).rope == new


def test_eos_ids_of_the_generation_config_win(model_dir: Path) -> None:
    assert read_config(model_dir).eos_token_ids == {257}
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 257]}))
    assert read_config(model_dir).eos_token_ids == {5, 257}
    (model_dir / "generation_config.json").unlink()
    change_config(model_dir, eos_token_id=None)
    assert read_config(model_dir).eos_token_ids == frozenset()


def test_tokenizer_round_trip_and_template(tiny_model_dir: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(tiny_model_dir())
    text = "héllo\n\t 12 €🎉"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == 257
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(prompt)["input_ids"][:2] == [256, ord("u")]


def test_a_directory_without_tokenizer_is_refused(
    tiny_model_dir: Callable[..., Path], model_dir: Path
) -> None:
    with pytest.raises(ModelError, match="no tokenizer.json"):
        load_tokenizer(tiny_model_dir(vocab_size=16))
    (model_dir / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        load_tokenizer(model_dir)
