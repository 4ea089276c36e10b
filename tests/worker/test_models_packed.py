"""The exact grade: with packed weights a row is bit for bit the same whatever comes with it."""

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from worker.models import integer
from worker.models.attention import Segment
from worker.models.basis import Basis, basis_bytes
from worker.models.integer import FINE, STEPS, IntegerLinear, integer_bytes, pack_rows
from worker.models.loader import load_decoder
from worker.models.packed import RefinedHead, pack_groups, pack_linear
from worker.models.sizes import decoder_bytes

CPU = torch.device("cpu")
OTHER_INT8 = "int8, not on x86"
PACKINGS = ["int8", "int4", OTHER_INT8]


def _for_machine(packing, monkeypatch):
    """Return a packing by its name; int8 has other kernels where integer products are slow or missing."""
    if packing == OTHER_INT8:
        monkeypatch.setattr(integer, "is_available", lambda: False)
    return packing[:4]


def test_packing_loses_at_most_half_a_level():
    weight = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    weight[7] = 0
    levels, scales = pack_rows(weight, torch.bfloat16)
    error = (levels.float() * scales.float().unsqueeze(1) - weight).abs()
    # Half a level, and what a scale rounded down cuts off the largest weight of a row.
    assert (error <= scales.float().unsqueeze(1) * 0.76).all()
    assert (error[7] == 0).all()


def test_int4_levels_of_a_q4_1_weight_are_met_again():
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(0, 16, (48, 4, 32), generator=generator)
    levels[:, :, 0], levels[:, :, 1] = 0, 15  # as quantising does: the least and the greatest are levels
    scale = (torch.rand(48, 4, 1, generator=generator) * 0.02 + 1e-3).half().float()
    least = (torch.randn(48, 4, 1, generator=generator) * 0.2).half().float()
    weight = (levels * scale + least).view(48, 128)
    found, meaning = pack_groups(weight)
    assert torch.equal(found, levels.view(48, 128).int())
    scales, offsets = meaning.float().transpose(0, 1).unbind(2)  # [48, 4] each
    unpacked = (found.view(48, 4, 32) - 8) * scales.unsqueeze(2) + offsets.unsqueeze(2)
    # bfloat16 keeps 8 bits of scale and offset; the offset is at most |least| + 8 scales.
    bound = (8 * scale + least.abs() + 8 * scale) / 256
    assert ((unpacked - weight.view(48, 4, 32)).abs() <= bound).all()


def test_int4_keeps_a_group_of_equal_weights():
    weight = torch.full((16, 64), 0.5)
    weight[1] = 0
    levels, meaning = pack_groups(weight)
    unpacked = (levels.view(16, 2, 32) - 8) * meaning[..., 0].t()[..., None] + meaning[..., 1].t()[..., None]
    assert torch.equal(unpacked.view(16, 64), weight)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(1152, 576), (266, 48), (30, 64)])
def test_a_layer_is_near_the_product_and_its_rows_are_independent(packing, bias, sizes, monkeypatch):
    packing = _for_machine(packing, monkeypatch)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(*sizes, generator=generator) / sizes[1] ** 0.5
    offsets = torch.randn(sizes[0], generator=generator) if bias else None
    x = torch.randn(33, sizes[1], generator=generator)
    layer = pack_linear(weight, offsets, packing)
    assert (layer.out_features, layer.in_features) == sizes
    whole = layer(x, "decode")
    difference = whole - torch.nn.functional.linear(x, weight, offsets)
    assert difference.abs().max() < (0.06 if packing == "int8" else 0.5)
    for rows in range(1, 34):
        assert torch.equal(layer(x[33 - rows :], "decode"), whole[33 - rows :])


@pytest.mark.parametrize("sizes", [(1152, 576), (266, 48), (30, 64), (7, 33)])
def test_integer_products_are_exact(sizes):
    """In whole steps nothing is rounded; the largest numbers side by side are what may pass a kernel's 16 bits."""
    generator = torch.Generator().manual_seed(9)
    weight = torch.randint(-127, 128, sizes, generator=generator).float()
    x = torch.randint(-STEPS, STEPS + 1, (33, sizes[1]), generator=generator).float()
    weight[:, :2], x[:, :2] = 127, STEPS
    parts = torch.randint(1 - STEPS, STEPS, x[:, 2:].shape, generator=generator)
    x[:, 2:] = (x[:, 2:] + parts / (2 * STEPS)).clamp(-STEPS, STEPS)
    weight[3], x[5] = 0, 0
    found = IntegerLinear(weight)(x, "decode")
    torch.testing.assert_close(found.double(), x.double() @ weight.double().t(), rtol=2e-6, atol=0.01)


@pytest.mark.parametrize("sizes", [(1152, 576), (266, 48), (30, 64), (7, 33)])
def test_integer_products_behind_a_norm_are_exact(sizes):
    generator = torch.Generator().manual_seed(9)
    weight = torch.randint(-127, 128, sizes, generator=generator).float()
    x = torch.randint(-STEPS, STEPS + 1, (33, sizes[1]), generator=generator).float()
    weight[:, :2], x[:, :2] = 127, STEPS
    weight[3], x[5] = 0, 0
    found = IntegerLinear(weight, norm_eps=0.5)(x, "decode")
    normed = torch.nn.functional.rms_norm(x.double(), x.shape[1:], eps=0.5)
    torch.testing.assert_close(found.double(), normed @ weight.double().t(), rtol=2e-6, atol=2e-4)


def test_two_integer_products_have_twice_the_bits_of_one():
    generator = torch.Generator().manual_seed(10)
    weight = torch.eye(64)
    x = torch.randn(8, 64, generator=generator)
    x[:, 0] = 100  # an outlier: single steps leave little of the others
    normed = torch.nn.functional.rms_norm(x, x.shape[1:], eps=1e-5)
    two, one = IntegerLinear(weight)(x, "decode"), IntegerLinear(weight, norm_eps=1e-5)(x, "decode")
    assert (two - x).abs().max() < 100 / STEPS / FINE
    largest = normed.abs().max()
    assert largest / STEPS / 4 < (one - normed).abs().max() < largest / STEPS


@pytest.mark.parametrize("hidden_size", [48, 576, 1500, 7])
def test_a_turned_stream_gives_the_same_sums(hidden_size):
    generator = torch.Generator().manual_seed(11)
    basis = Basis(hidden_size)
    x = torch.randn(9, hidden_size, generator=generator)
    torch.testing.assert_close(basis.leave(basis.enter(x)), x, rtol=0, atol=2e-3)
    norm = torch.rand(hidden_size, generator=generator) + 0.5
    read = torch.randn(20, hidden_size, generator=generator)
    expected = (x * norm) @ read.t()
    found = basis.enter(x).double() @ basis.reading(read, norm).t()
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=0.02)
    write = torch.randn(hidden_size, 20, generator=generator)
    offsets = torch.randn(hidden_size, generator=generator)
    inner = torch.randn(9, 20, generator=generator)
    added = inner.double() @ basis.writing(write).t() + basis.writing(offsets)
    torch.testing.assert_close(basis.leave(added.float()), inner @ write.t() + offsets, rtol=0, atol=0.02)
    for rows in range(1, 10):
        assert torch.equal(basis.enter(x[9 - rows :]), basis.enter(x)[9 - rows :])


@pytest.mark.parametrize("packing", ["int4", OTHER_INT8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_ranks_what_bfloat16_cannot_tell_apart(packing, dtype, monkeypatch):
    packing = _for_machine(packing, monkeypatch)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(4096, 64, generator=generator).to(dtype)
    x = torch.randn(40, 64, generator=generator) * 3
    best = (x @ weight.float().t()).topk(8)
    coarse = pack_linear(weight, None, packing)
    head = RefinedHead(coarse, weight)
    found = head(x, "decode")
    assert torch.equal(found.topk(8).indices, best.indices)
    torch.testing.assert_close(found.topk(8).values, best.values, rtol=0, atol=1e-3)
    assert (coarse(x, "decode").float().topk(8).values.diff(dim=1) == 0).any()  # without it these tie
    for rows in range(1, 41):
        assert torch.equal(head(x[40 - rows :], "decode"), found[40 - rows :])


@pytest.fixture(params=PACKINGS)
def decoder(request, tiny_model_dir, monkeypatch):
    packing = _for_machine(request.param, monkeypatch)
    # Head sizes and widths of the default model, so that its kernels' paths are taken.
    path = tiny_model_dir(hidden_size=576, num_heads=9, num_kv_heads=3, num_layers=2, max_positions=512)
    return _checked(load_decoder(path, dtype=torch.bfloat16, device=CPU, packing=packing), packing)


def _checked(decoder, packing):
    expected = decoder_bytes(decoder.config, torch.bfloat16, CPU, packing=packing)
    held = {thing.data_ptr(): thing.nbytes for thing in _tensors(decoder._weights)}
    assert sum(held.values()) == expected
    return decoder


@pytest.mark.parametrize("packing", PACKINGS)
def test_memory_is_foretold_where_the_head_is_tied(packing, tiny_model_dir, monkeypatch):
    packing = _for_machine(packing, monkeypatch)
    path = tiny_model_dir(hidden_size=48, num_heads=3, num_kv_heads=3, tied=True)  # 48: no groups of 32
    _checked(load_decoder(path, dtype=torch.bfloat16, device=CPU, packing=packing), packing)


class _Packed(NamedTuple):
    """What an integer layer's kernel holds out of sight."""

    layer: IntegerLinear

    def data_ptr(self):
        return id(self.layer)

    @property
    def nbytes(self):
        levels, offset = torch.ops.quantized.linear_unpack(self.layer._packed)
        assert offset is None
        assert levels.shape == (self.layer.out_features, self.layer.in_features)
        rows, columns = levels.shape
        return rows * (columns + -columns % 512 + 12)  # whole blocks: see the test below


@pytest.mark.parametrize(
    ("hidden_size", "block"), [(48, 48), (576, 576), (1536, 768), (4096, 1024), (1061, 1061), (2122, 2122)]
)
def test_blocks_of_a_basis_are_large_enough_to_spread_outliers(hidden_size, block):
    assert basis_bytes(hidden_size) == 8 * block**2 + 2 * integer_bytes(2 * block, block, bias=False)


RESIDENT = """
import ctypes, gc, sys
import torch
from worker.models.integer import IntegerLinear, integer_bytes
def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096
rows, columns = map(int, sys.argv[1:])
weight = torch.ones(rows, columns)
kept = [IntegerLinear(weight)]
before = resident()
kept += [IntegerLinear(weight) for _ in range(16)]
print((resident() - before) / 16 / integer_bytes(rows, columns, bias=False))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux what is resident")
@pytest.mark.parametrize("columns", [512, 576])
def test_an_integer_layer_takes_what_is_foretold(columns):
    if not integer.is_available():
        pytest.skip("torch has no kernel for it here")
    run = subprocess.run(
        [sys.executable, "-c", RESIDENT, "4096", str(columns)], capture_output=True, text=True
    )
    assert float(run.stdout) == pytest.approx(1, abs=0.1), run.stderr


def _tensors(thing):
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, IntegerLinear):
        yield _Packed(thing)
        yield from _tensors(thing._bias)
    elif isinstance(thing, list):
        for item in thing:
            yield from _tensors(item)
    elif hasattr(thing, "__dict__"):
        for item in vars(thing).values():
            yield from _tensors(item)


def test_logits_are_bitwise_the_same_at_every_depth_batch_size_and_mix(decoder):
    generator = torch.Generator().manual_seed(61)
    # Lengths of all sizes, some just below an edge of the KV length that attention reads.
    lengths = [61, 200, 64, 63, 120, 1, 126, 319, 58, 300, 190, 128, 60, 255, 2, 62]
    texts = torch.randint(0, 256, (16, 328), generator=generator)
    kv = decoder.new_kv_cache(16, 512)
    for slot, length in enumerate(lengths):
        decoder.forward(texts[slot, :length], [Segment(slot, 0, length)], kv, phase="prefill")

    def logits(segments):
        rows = torch.cat([texts[s.slot, s.start : s.stop] for s in segments])
        return decoder.logits(decoder.forward(rows, segments, kv, phase="decode")).split(
            [s.count for s in segments]
        )

    # Plain decoding, one request at a time, is the truth.
    plain = [
        torch.cat([logits([Segment(slot, length + i, 1)])[0] for i in range(9)])
        for slot, length in enumerate(lengths)
    ]
    for depth in (0, 1, 2, 3, 5, 8):
        for slots in ([3], [2, 9, 4], list(range(8)), list(range(15, -1, -1))):
            ragged = [
                Segment(slot, lengths[slot], 1 + (depth if i % 2 == 0 else depth // 2))
                for i, slot in enumerate(slots)
            ]
            for segment, rows in zip(ragged, logits(ragged), strict=True):
                assert torch.equal(rows, plain[segment.slot][: segment.count]), (depth, slots)
