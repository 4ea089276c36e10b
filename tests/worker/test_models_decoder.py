"""The decoder against transformers' own models, and against itself in other company.

transformers computes norms, softmax and rotary tables in float32 even in a float64 model, so logits agree to about
1e-5; between two arrangements of our own float64 decoder the tolerance is far tighter.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from worker.kv_cache import KVCache
from worker.models.attention import DecodePlan, Segment
from worker.models.decoder import Decoder, norm_heads
from worker.models.loader import load_decoder

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_kv_heads": 4},
    "mqa": {"num_kv_heads": 1},
    "tied": {"tied": True},
    "bias": {"bias": True},
    "sharded": {"sharded": True},
    "llama3-rope": {"rope": LLAMA3_ROPE},
    "linear-rope": {"rope": LINEAR_ROPE},
    "mistral": {"architecture": "MistralForCausalLM", "head_dim": 12},
    "mistral-window": {"architecture": "MistralForCausalLM", "sliding_window": 40},
    "mistral-window-of-one": {"architecture": "MistralForCausalLM", "sliding_window": 1},
    "mistral-wide-window": {"architecture": "MistralForCausalLM", "sliding_window": 512},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "sliding_window": 16},  # not flagged: without effect
    "qwen2-tied": {"architecture": "Qwen2ForCausalLM", "tied": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 16},
    "qwen3-tied-llama3-rope": {"architecture": "Qwen3ForCausalLM", "tied": True, "rope": LLAMA3_ROPE},
}
COMPANY = ["gqa", "mistral-window", "qwen2", "qwen3"]
"""One of each architecture."""


@pytest.fixture(scope="module")
def load(tiny_model_dir: Callable[..., Path]) -> Callable[..., Decoder]:
    @functools.cache
    def cached(name: str, dtype: torch.dtype) -> Decoder:
        return load_decoder(tiny_model_dir(**MODELS[name]), dtype=dtype, device=CPU)

    return lambda name="gqa", dtype=torch.float64: cached(name, dtype)


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))


def prefill(decoder: Decoder, kv: KVCache, slot: int, ids: Tensor) -> None:
    decoder.forward(ids, [Segment(slot, 0, len(ids))], kv, phase="prefill")


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(
    name: str, load: Callable[..., Decoder], tiny_model_dir: Callable[..., Path]
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir(**MODELS[name]), attn_implementation="eager", dtype=torch.float64
    )
    ids = tokens(150)
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    decoder = load(name)
    kv = decoder.new_kv_cache(2, 256)
    parts = []
    # Chunks that begin and end off and on the alignment, then verify-like and single rows.
    for start, stop, phase in [
        (0, 37, "prefill"), (37, 64, "prefill"), (64, 65, "prefill"), (65, 100, "prefill"),
        (100, 104, "decode"), (104, 105, "decode"), (105, 113, "decode"), (113, 150, "decode"),
    ]:  # fmt: skip
        hidden = decoder.forward(ids[start:stop], [Segment(1, start, stop - start)], kv, phase=phase)
        parts.append(decoder.logits(hidden))
    logits = torch.cat(parts)
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
    assert torch.equal(logits.argmax(1), expected.argmax(1))


@pytest.mark.parametrize("name", COMPANY)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_rows_of_several_requests_equal_each_alone(
    load: Callable[..., Decoder], phase: str, name: str
) -> None:
    decoder = load(name)
    lengths = {0: 70, 1: 3, 2: 63, 3: 0, 5: 128, 6: 17}
    # Ragged counts, a hole at slot 4, and an order that is not the slots'.
    segments = [Segment(5, 128, 4), Segment(0, 70, 1), Segment(1, 3, 8), Segment(6, 17, 2), Segment(3, 0, 3)]
    segments.append(Segment(2, 63, 1))
    together = decoder.new_kv_cache(7, 192)
    alone = decoder.new_kv_cache(7, 192)
    for slot, length in lengths.items():
        for kv in (together, alone):
            if length:
                prefill(decoder, kv, slot, tokens(length, seed=slot))
    rows = tokens(sum(segment.count for segment in segments), seed=99)
    result = decoder.forward(rows, segments, together, phase=phase)
    offset = 0
    for segment in segments:
        ids = rows[offset : offset + segment.count]
        expected = decoder.forward(ids, [segment], alone, phase=phase)
        torch.testing.assert_close(result[offset : offset + segment.count], expected, rtol=0, atol=1e-12)
        offset += segment.count
    for layer in range(2):
        torch.testing.assert_close(together.layers[layer], alone.layers[layer], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", COMPANY)
def test_verify_rows_equal_single_steps(load: Callable[..., Decoder], name: str) -> None:
    decoder = load(name)
    kv = decoder.new_kv_cache(2, 128)
    ids = tokens(80)
    for slot in range(2):
        prefill(decoder, kv, slot, ids[:60])
    verified = decoder.forward(ids[60:], [Segment(0, 60, 20)], kv, phase="decode")
    for index in range(20):
        row = decoder.forward(ids[60 + index :][:1], [Segment(1, 60 + index, 1)], kv, phase="decode")
        torch.testing.assert_close(verified[index : index + 1], row, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", COMPANY)
def test_ragged_requests_equal_transformers(
    name: str, load: Callable[..., Decoder], tiny_model_dir: Callable[..., Path]
) -> None:
    """Several requests of different lengths in the same forwards, each continued by its own greedy token."""
    reference = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir(**MODELS[name]), attn_implementation="eager", dtype=torch.float64
    )
    decoder = load(name)
    kv = decoder.new_kv_cache(3, 128)
    texts = [tokens(length, seed=length) for length in (1, 61, 40)]
    segments = [Segment(slot, 0, len(text)) for slot, text in enumerate(texts)]
    hidden = decoder.forward(torch.cat(texts), segments, kv, phase="prefill")
    ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
    for _ in range(12):
        logits = decoder.logits(hidden[ends])
        with torch.no_grad():
            expected = torch.stack([reference(text[None]).logits[0, -1] for text in texts])
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
        chosen = logits.argmax(1)
        assert torch.equal(chosen, expected.argmax(1))
        segments = [Segment(slot, len(text), 1) for slot, text in enumerate(texts)]
        texts = [torch.cat((text, token[None])) for text, token in zip(texts, chosen, strict=True)]
        hidden, ends = decoder.forward(chosen, segments, kv, phase="decode"), torch.arange(3)


def test_rollback_overwrites_stale_rows(load: Callable[..., Decoder]) -> None:
    """Rows behind the caller's length must have no influence, whatever is stored there."""
    decoder = load()
    kv = decoder.new_kv_cache(2, 128)
    for slot in range(2):
        prefill(decoder, kv, slot, tokens(50))
    decoder.forward(tokens(8, seed=7), [Segment(0, 50, 8)], kv, phase="decode")  # drafts, all rejected
    results = [
        decoder.forward(tokens(2, seed=8), [Segment(slot, 50, 2)], kv, phase="decode") for slot in range(2)
    ]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_nothing_outside_the_rows_is_touched(load: Callable[..., Decoder], phase: str) -> None:
    decoder = load()
    kv = decoder.new_kv_cache(4, 128)
    for layer in kv.layers:
        layer.uniform_(-1, 1)
    before = [layer.clone() for layer in kv.layers]
    segments = [Segment(1, 10, 3), Segment(2, 0, 2)]
    result = decoder.forward(tokens(5), segments, kv, phase=phase)
    for layer, old in zip(kv.layers, before, strict=True):
        for segment in segments:
            written = layer[:, segment.slot, :, segment.start : segment.stop]
            assert (written != old[:, segment.slot, :, segment.start : segment.stop]).all()
            written.copy_(old[:, segment.slot, :, segment.start : segment.stop])
        assert torch.equal(layer, old)
    # Other slots and later positions are not read either: other content there, the same result.
    for layer in kv.layers:
        layer[:, 0].uniform_(-9, 9)
        layer[:, 3].uniform_(-9, 9)
        layer[:, 1, :, 13:].uniform_(-9, 9)
        layer[:, 2, :, 2:].uniform_(-9, 9)
    assert torch.equal(decoder.forward(tokens(5), segments, kv, phase=phase), result)


def test_float64_keeps_its_precision(load: Callable[..., Decoder]) -> None:
    """The oracle of the property tests must really be float64: chunking moves it by far less than float32 would."""
    decoder = load()
    ids = tokens(100)
    results = []
    for chunk in (100, 7):
        kv = decoder.new_kv_cache(1, 128)
        parts = []
        for start in range(0, 100, chunk):
            part = ids[start : start + chunk]
            parts.append(decoder.forward(part, [Segment(0, start, len(part))], kv, phase="prefill"))
        results.append(torch.cat(parts))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", COMPANY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_run_and_stay_close(load: Callable[..., Decoder], dtype: torch.dtype, name: str) -> None:
    decoder, exact = load(name, dtype=dtype), load(name)
    ids = tokens(40)
    rows = []
    for model in (decoder, exact):
        kv = model.new_kv_cache(1, 64)
        prefill(model, kv, 0, ids[:36])
        hidden = model.forward(ids[36:], [Segment(0, 36, 4)], kv, phase="decode")
        assert hidden.dtype == kv.layers[0].dtype == model.dtype
        rows.append(model.logits(hidden).double())
    tolerance = 1e-4 if dtype == torch.float32 else 0.6
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=tolerance)


def test_misfits_are_refused_by_name(load: Callable[..., Decoder]) -> None:
    decoder = load()
    kv = decoder.new_kv_cache(2, 64)
    cases = [
        ([Segment(0, 0, 3)], "token_ids has shape"),
        ([], "token_ids has shape"),
        ([Segment(0, 0, 1), Segment(0, 1, 1)], "share a slot"),
        ([Segment(2, 0, 2)], "does not fit"),
        ([Segment(0, 63, 2)], "does not fit"),
        ([Segment(0, -1, 2)], "does not fit"),
        ([Segment(0, 0, 2), Segment(1, 0, 0)], "does not fit"),
    ]
    for segments, message in cases:
        with pytest.raises(ValueError, match=message):
            decoder.forward(tokens(2), segments, kv, phase="decode")
    with pytest.raises(ValueError, match="phase"):
        decoder.forward(tokens(2), [Segment(0, 0, 2)], kv, phase="verify")  # type: ignore[arg-type]


@pytest.mark.parametrize("heads_per_kv", [1, 3, 4, 7])
def test_bfloat16_attention_of_a_row_is_bitwise_independent(heads_per_kv: int) -> None:
    """The exact grade stands on this: the same row, alone or in any company, the same bits."""
    generator = torch.Generator().manual_seed(3)
    # The default model's head size: with tiny ones every arrangement happens to agree.
    kv = KVCache(
        num_layers=1,
        num_slots=6,
        num_kv_heads=3,
        head_dim=64,
        max_tokens=1200,
        dtype=torch.bfloat16,
        device=CPU,
    )
    kv.layers[0].copy_(torch.randn(kv.layers[0].shape, generator=generator))
    # [slots, rows, heads, head_dim]
    queries = torch.randn(6, 8, 3 * heads_per_kv, 64, generator=generator).bfloat16()
    starts = [0, 60, 63, 250, 1100, 5]

    def attend(slots: list[int], first: int, count: int) -> Tensor:
        segments = [Segment(slot, starts[slot] + first, count) for slot in slots]
        rows = queries[slots, first : first + count].flatten(0, 1)
        plan = DecodePlan(segments, kv, heads_per_kv)
        return plan.attend(rows, kv.layers[0]).view(len(slots), count, -1)

    together = attend([0, 1, 2, 3, 4, 5], 0, 8)
    for slot in range(6):
        for first in range(8):
            assert torch.equal(attend([slot], first, 1)[0, 0], together[slot, first])
        assert torch.equal(attend([slot], 2, 3)[0], together[slot, 2:5])
    assert torch.equal(attend([4, 1, 2], 1, 6), together[[4, 1, 2], 1:7])


def test_bfloat16_head_norms_of_a_row_are_bitwise_independent() -> None:
    generator = torch.Generator().manual_seed(4)
    projected = torch.randn(17, 32, 128, generator=generator).bfloat16()  # as a fused projection leaves it
    weight = torch.randn(24, 128, generator=generator).bfloat16()
    together = norm_heads(projected[:, :24], weight, 1e-6)
    for count in (1, 2, 3, 8):
        for row in range(17 - count):
            part = norm_heads(projected[row : row + count].clone()[:, :24], weight, 1e-6)
            assert torch.equal(part, together[row : row + count])
