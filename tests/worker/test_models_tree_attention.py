"""Attention along the branches of a tree: bit for bit that of the path laid out as a chain."""

import pytest
import torch

import worker.models.tree_attention as tree_attention
from worker.kv_cache import KVCache
from worker.models.attention import DecodePlan, Segment
from worker.models.tree_attention import TreePlan, TreeSegment, decode_plan
from worker.spec.tree import Topology

TREE = Topology.tree([0, 0, 1, 1, 2, 4, 4, 6, 7, 8], max_depth=9)
ROWS = TREE.num_drafts + 1
STARTS = [0, 1, 59, 61, 63, 90]
"""Of the trees in the slots: some reach over the edge of a KV length."""


def new_cache(kv_heads, dtype):
    kv = KVCache(
        num_layers=1,
        num_slots=len(STARTS) + 1,
        num_kv_heads=kv_heads,
        head_dim=32,
        max_tokens=192,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(2)
    kv.layers[0].copy_(torch.randn(kv.layers[0].shape, generator=generator))
    return kv


def branching(slot, start):
    return TreeSegment(slot, start, ROWS, trunk=start, paths=TREE.paths(start))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("kv_heads", "heads_per_kv"), [(3, 3), (2, 1), (1, 8)])
@pytest.mark.parametrize("gathered", [1, 1 << 16])
def test_a_row_is_that_of_its_path_as_a_chain(monkeypatch, dtype, window, kv_heads, heads_per_kv, gathered):
    monkeypatch.setattr(tree_attention, "MAX_GATHERED_TOKENS", gathered)
    kv = new_cache(kv_heads, dtype)
    segments: list[Segment] = [branching(slot, start) for slot, start in enumerate(STARTS)]
    segments[2] = Segment(2, STARTS[2], ROWS)  # a chain among them
    generator = torch.Generator().manual_seed(3)
    shape = (len(STARTS) * ROWS, kv_heads * heads_per_kv, 32)
    queries = torch.randn(shape, generator=generator).to(dtype)
    plan = decode_plan(segments, kv, heads_per_kv, window)
    assert isinstance(plan, TreePlan)
    outputs = plan.attend(queries, kv.layers[0]).view(len(STARTS), ROWS, -1)
    spare = len(STARTS)
    for slot, start in enumerate(STARTS):
        paths = Topology.chain(ROWS - 1).paths(start) if slot == 2 else TREE.paths(start)
        for row, path in enumerate(paths):
            kv.copy(slot, spare, kv.max_tokens)
            kv.compact(spare, start, path)
            chain = DecodePlan([Segment(spare, start + len(path) - 1, 1)], kv, heads_per_kv, window)
            expected = chain.attend(queries[slot * ROWS + row :][:1], kv.layers[0])[0]
            if dtype is torch.bfloat16:
                assert torch.equal(outputs[slot, row], expected), (slot, row)
            else:
                torch.testing.assert_close(outputs[slot, row], expected)


def test_values_are_summed_in_the_order_of_a_chain():
    """Two huge values on the path cancel each other, and what float32 loses in between depends on the order."""
    kv = new_cache(1, torch.bfloat16)
    values = kv.values(0)[0, 0]
    values[61], values[64] = 2.0**26, -(2.0**26)
    queries = torch.zeros(1, 1, 32, dtype=torch.bfloat16)  # all weights are equal

    def attended(path):
        segment = TreeSegment(0, path[-1], 1, trunk=60, paths=(path,))
        return TreePlan([segment], kv, 1).attend(queries, kv.layers[0])

    result = attended((60, 61, 64, 67, 70))
    assert not torch.equal(result, attended((67, 61, 64, 60, 70)))
    kv.compact(0, 60, (60, 61, 64, 67, 70))
    assert torch.equal(result, DecodePlan([Segment(0, 64, 1)], kv, 1).attend(queries, kv.layers[0]))


def test_chains_alone_take_the_usual_plan():
    kv = new_cache(2, torch.bfloat16)
    assert isinstance(decode_plan([Segment(0, 3, 2), Segment(1, 0, 1)], kv, 2), DecodePlan)


def test_a_path_that_ends_elsewhere_is_refused():
    with pytest.raises(ValueError, match="own cells"):
        TreeSegment(0, 5, 2, trunk=5, paths=((5,), (5, 7)))


def test_compacting_moves_everything_that_is_kept_per_token():
    kv = new_cache(2, torch.float64)
    kv.keep_features(4)
    assert kv.features is not None
    kv.features.copy_(torch.randn(kv.features.shape, generator=torch.Generator().manual_seed(4)))
    before = kv.swap_out(3, 80)
    others = kv.swap_out(2, 80)
    kv.compact(3, 50, [51, 52, 55, 70])
    for old, new in zip(before, kv.swap_out(3, 80), strict=True):
        assert torch.equal(new[:, :, 50:54], old[:, :, [51, 52, 55, 70]])
        assert torch.equal(new[:, :, :50], old[:, :, :50])
    assert all(map(torch.equal, others, kv.swap_out(2, 80)))
    kv.compact(3, 50, [])
