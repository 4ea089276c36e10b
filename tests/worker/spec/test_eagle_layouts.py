"""Published layouts: every one computes what its papers' code computes, and what does not fit is named."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from worker.model_runner import ModelRunner
from worker.models.attention import Segment
from worker.models.config import ModelError, RopeConfig, read_config
from worker.models.loader import load_decoder
from worker.models.rope import RotaryTable, rotate
from worker.spec.eagle_layouts import load_head, read_head_sizes

CPU = torch.device("cpu")
PREFIXES = {
    "EAGLE-1": "layers.0.",
    "own": "layers.0.",
    "EAGLE-3": "midlayer.",
    "speculators eagle3": "layers.0.",
    "speculators eagle": "transformer.",
    "speculators eagle layernorms": "transformer.",
}
LAYOUTS = list(PREFIXES)
ROWS = 9
EPS = 1e-5


def loaded(target, head):
    decoder = load_decoder(target, dtype=torch.float64, device=CPU)
    return decoder, load_head(head, decoder, target, num_tokens=258, packing=None)


def reference_logits(target, head, layout, tokens, features):
    """The published models' forward over a whole text, from their own tensors, in plain torch."""
    w, base = load_file(head / "model.safetensors"), load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    prefix = PREFIXES[layout]

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], w[name], EPS)

    embedded = F.embedding(tokens, w.get("embed_tokens.weight", base["model.embed_tokens.weight"]))
    if "3" in layout:
        fused = F.linear(features, w["fc.weight"])
        normed = norm(fused, f"{prefix}hidden_norm.weight")
        x = normed if layout.startswith("speculators") else fused
        read = torch.cat((norm(embedded, f"{prefix}input_layernorm.weight"), normed), dim=-1)
    else:
        if layout.endswith("layernorms"):
            embedded = norm(embedded, "embedding_layernorm.weight")
        fc = "fusion_fc" if layout.startswith("speculators") else "fc"
        x = F.linear(torch.cat((embedded, features), dim=-1), w[f"{fc}.weight"], w.get(f"{fc}.bias"))
        read = norm(x, f"{prefix}input_layernorm.weight") if layout.endswith("layernorms") else x
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    table = RotaryTable(RopeConfig(10000.0), dim, torch.float64, CPU)
    table.reserve(len(tokens))
    turns = table.at(torch.arange(len(tokens)))
    q, k, v = (
        F.linear(read, w[f"{prefix}self_attn.{n}_proj.weight"]).view(len(tokens), -1, dim) for n in "qkv"
    )
    q, k = rotate(q, *turns), rotate(k, *turns)
    k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    scores = scores.masked_fill(torch.ones(len(tokens), len(tokens)).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(tokens), -1)
    x = x + F.linear(mixed, w[f"{prefix}self_attn.o_proj.weight"])
    y = norm(x, f"{prefix}post_attention_layernorm.weight")
    gate = F.silu(F.linear(y, w[f"{prefix}mlp.gate_proj.weight"])) * F.linear(
        y, w[f"{prefix}mlp.up_proj.weight"]
    )
    x = x + F.linear(gate, w[f"{prefix}mlp.down_proj.weight"])
    last = {"speculators eagle layernorms": "pre_lm_head_layernorm.weight"}.get(layout, "norm.weight")
    out = norm(x, last) if last in w else x
    output = w.get("lm_head.weight", base["lm_head.weight"])
    ids = torch.arange(len(output))
    if "d2t" in w:
        ids = torch.arange(len(w["d2t"])) + w["d2t"]
        output = output if "lm_head.weight" in w else output[ids]
    logits = torch.full((len(tokens), 258), -torch.inf, dtype=torch.float64)
    logits[:, ids] = F.linear(out, output)
    return logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_its_publishers_compute(eagle_dirs, layout):
    target, path = eagle_dirs(layout)
    decoder, head = loaded(target, path)
    runner = ModelRunner(decoder, num_slots=2, max_tokens=64, num_tokens=258)
    runner.keep_features(head.config.feature_layers)
    tokens = [(i * 31 + 7) % 256 for i in range(ROWS + 1)]
    runner.prefill(1, 0, tokens)
    features = runner.features([Segment(1, 0, ROWS)])
    cache = head.new_kv_cache(2, 64)
    following = torch.tensor(tokens[1:])
    fused = head.fuse(features)
    hidden = [head.forward(following[:5], fused[:5], [Segment(1, 0, 5)], cache, phase="prefill")]
    hidden += [
        head.forward(
            following[row : row + 1], fused[row : row + 1], [Segment(1, row, 1)], cache, phase="decode"
        )
        for row in range(5, ROWS)
    ]
    ours = head.logits(torch.cat(hidden))
    expected = reference_logits(target, path, layout, following, features)
    assert torch.equal(torch.isneginf(ours), torch.isneginf(expected))
    assert torch.allclose(ours.nan_to_num(neginf=0), expected.nan_to_num(neginf=0), atol=1e-9)
    sizes = read_head_sizes(path, read_config(target))
    assert sizes.numbers_per_token == features.shape[1] + 2 * 2 * 8


def test_a_bin_file_is_read_and_an_embedding_that_is_the_targets_is_not_kept_twice(eagle_dirs, tmp_path):
    target, path = eagle_dirs("EAGLE-1")
    shutil.copy(path / "config.json", tmp_path)
    tensors = load_file(path / "model.safetensors")
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    torch.save({**tensors, "embed_tokens.weight": embedding}, tmp_path / "pytorch_model.bin")
    _, head = loaded(target, tmp_path)
    assert head._weights.embedding is None
    assert read_head_sizes(tmp_path, read_config(target)).num_weights > 0
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(ModelError, match="pytorch_model.bin"):
        loaded(target, tmp_path)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("EAGLE-1", {"fc.weight": torch.zeros(32, 65)}, r"tensor fc.weight has shape \(32, 65\), expected \(32, 64\)"),
        ("EAGLE-1", {"layers.0.mlp.up_proj.weight": None}, "tensor layers.0.mlp.up_proj.weight is missing"),
        ("EAGLE-1", {"layers.1.mlp.up_proj.weight": torch.zeros(2)}, "tensor layers.1.mlp.up_proj.weight is not used"),
        ("EAGLE-1", {"fc.weight": None}, "fc.weight is missing"),
        ("EAGLE-1", {"fc.bias": torch.zeros(32, dtype=torch.int32)}, "tensor fc.bias has dtype torch.int32"),
        ("EAGLE-3", {"midlayer.hidden_norm.weight": None}, "tensor midlayer.hidden_norm.weight is missing"),
        ("EAGLE-3", {"fc.weight": torch.zeros(32, 64)}, r"tensor fc.weight has shape \(32, 64\), expected \(32, 96\)"),
        ("EAGLE-3", {"lm_head.weight": torch.zeros(9, 32)}, "tensor lm_head.weight has shape"),
        ("EAGLE-3", {"d2t": torch.full((200,), 300)}, "d2t points outside the target's 258 tokens"),
        ("EAGLE-3", {"d2t": -torch.arange(200)}, "d2t names a target token twice"),
        ("EAGLE-3", {"t2d": torch.ones(258, dtype=torch.bool)}, "t2d and d2t name different tokens"),
        ("EAGLE-3", {"t2d": torch.ones(7, dtype=torch.bool)}, "tensor t2d has shape"),
        ("speculators eagle", {"fusion_fc.weight": None}, "tensor fusion_fc.weight is missing"),
        ("speculators eagle3", {"norm.weight": torch.zeros(3)}, "tensor norm.weight has shape"),
    ],
)  # fmt: skip
def test_a_misfit_names_its_tensor(eagle_dirs, eagle_writer, tmp_path, layout, changes, message):
    target, _ = eagle_dirs()
    eagle_writer.write_head(target, tmp_path, layout, changes=changes)
    with pytest.raises(ModelError, match=message):
        loaded(target, tmp_path)


@pytest.mark.parametrize(
    ("layout", "fields", "message"),
    [
        ("EAGLE-1", {"hidden_size": 64}, "hidden_size 64 does not fit the target's 32"),
        ("EAGLE-1", {"vocab_size": 99}, "vocab_size 99 does not fit the target's 258"),
        ("EAGLE-1", {"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported; a head has 1"),
        ("EAGLE-1", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("EAGLE-3", {"eagle_config": {}}, r"eagle_aux_hidden_state_layer_ids \[2, 1, -1\] does not fit"),
        ("EAGLE-3", {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "does not fit the target's 2 layers"),
        ("speculators eagle", {"speculators_model_type": "medusa"}, r"'medusa' is not .*: \['eagle', 'eagle3'\]"),
        ("speculators eagle", {"transformer_layer_config": 3}, "transformer_layer_config must be an object"),
    ],
)  # fmt: skip
def test_a_misfit_names_its_field(eagle_dirs, eagle_writer, tmp_path, layout, fields, message):
    target, _ = eagle_dirs()
    eagle_writer.write_head(target, tmp_path, layout)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ModelError, match=message):
        loaded(target, tmp_path)


def test_what_speculators_leave_out_of_a_configuration_is_transformers_default(
    eagle_dirs, eagle_writer, tmp_path
):
    target, _ = eagle_dirs()
    eagle_writer.write_head(target, tmp_path, "speculators eagle")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["transformer_layer_config"]["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="hidden_size 4096 does not fit the target's 32"):
        loaded(target, tmp_path)
