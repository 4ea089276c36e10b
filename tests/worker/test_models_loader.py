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
        ({"sliding_window": 4096}, "sliding_window is not supported"),
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
