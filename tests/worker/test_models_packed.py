"""The exact grade: with packed weights a row is bit for bit the same whatever comes with it."""

import pytest
import torch

from worker.models.attention import Segment
from worker.models.loader import decoder_bytes, load_decoder
from worker.models.packed import Int8Head, Int8Linear, pack_rows

CPU = torch.device("cpu")


def test_packing_loses_at_most_half_a_level():
    weight = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    weight[7] = 0
    levels, scales = pack_rows(weight)
    error = (levels.float() * scales.float().unsqueeze(1) - weight).abs()
    # Half a level, and what a scale rounded down cuts off the largest weight of a row.
    assert (error <= scales.float().unsqueeze(1) * 0.76).all()
    assert (error[7] == 0).all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_near_the_product_and_its_rows_are_independent(bias):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(1152, 576, generator=generator) / 24
    offsets = torch.randn(1152, generator=generator) if bias else None
    x = torch.randn(33, 576, generator=generator)
    for layer in (Int8Linear(weight, offsets), Int8Head(weight, offsets)):
        whole = layer(x, "decode")
        expected = torch.nn.functional.linear(x, weight, offsets)
        assert (whole - expected).abs().max() < 0.06
        for rows in range(1, 34):
            assert torch.equal(layer(x[33 - rows :], "decode"), whole[33 - rows :])


def test_the_head_ranks_what_bfloat16_cannot_tell_apart():
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(4096, 64, generator=generator)
    x = torch.randn(40, 64, generator=generator) * 3
    levels, scales = pack_rows(weight)
    truth = x @ (levels.float() * scales.float().unsqueeze(1)).t()
    best = truth.topk(8).indices
    assert torch.equal(Int8Head(weight)(x, "decode").topk(8).indices, best)
    plain = Int8Linear(weight)(x, "decode").float()
    assert (plain.gather(1, best).diff(dim=1) == 0).any()  # these tie without the refinement


@pytest.fixture(scope="module")
def decoder(tiny_model_dir):
    # Head sizes and widths of the default model, so that its kernels' paths are taken.
    path = tiny_model_dir(hidden_size=576, num_heads=9, num_kv_heads=3, num_layers=2, max_positions=512)
    decoder = load_decoder(path, dtype=torch.bfloat16, device=CPU, packed=True)
    expected = decoder_bytes(decoder.config, torch.bfloat16, CPU, packed=True)
    held = {id(t): t.nbytes for t in _tensors(decoder._weights)}
    assert sum(held.values()) == expected
    return decoder


def _tensors(thing):
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list):
        for item in thing:
            yield from _tensors(item)
    elif hasattr(thing, "__dict__"):
        for item in vars(thing).values():
            yield from _tensors(item)


@pytest.mark.parametrize("length", [61, 200])
def test_logits_are_bitwise_the_same_at_every_depth_batch_size_and_mix(decoder, length):
    generator = torch.Generator().manual_seed(length)
    texts = torch.randint(0, 256, (16, length + 9), generator=generator)
    kv = decoder.new_kv_cache(16, 512)
    for slot in range(16):
        for start in range(0, length, 64):
            stop = min(start + 64, length)
            decoder.forward(
                texts[slot, start:stop], [Segment(slot, start, stop - start)], kv, phase="prefill"
            )

    def logits(segments):
        rows = torch.cat([texts[s.slot, s.start : s.stop] for s in segments])
        return decoder.logits(decoder.forward(rows, segments, kv, phase="decode")).split(
            [s.count for s in segments]
        )

    # Plain decoding, one request at a time, is the truth.
    plain = [torch.cat([logits([Segment(slot, length + i, 1)])[0] for i in range(9)]) for slot in range(16)]
    for depth in (0, 1, 2, 3, 5, 8):
        for slots in ([3], [2, 9, 4], list(range(8)), list(range(15, -1, -1))):
            ragged = [
                Segment(slot, length, 1 + (depth if i % 2 == 0 else depth // 2))
                for i, slot in enumerate(slots)
            ]
            for segment, rows in zip(ragged, logits(ragged), strict=True):
                assert torch.equal(rows, plain[segment.slot][: segment.count]), (depth, slots)
