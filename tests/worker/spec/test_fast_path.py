"""The topk=1 fast path is an identity of the slow path (DESIGN §4), and its buffers never move."""

import dataclasses

import pytest
import torch

from worker.request import SamplingParams
from worker.sampling import Draw
from worker.spec.draft import ChainDrafter
from worker.spec.runtime_state import SpecRuntimeState, build_runtime_states
from worker.spec.tree import check_in_bounds, organize_draft_results, parent_width

CPU = torch.device("cpu")
MAX_ROWS = 17
VOCAB = 50
STATES = build_runtime_states(range(9), max_batch_size=MAX_ROWS + 1, device=CPU)


class TableDrafter(ChainDrafter):
    """The smallest real drafter: the next token's logits are a row of a table, as in a bigram model."""

    def __init__(self, *, use_fast_path: bool = True) -> None:
        super().__init__(topk=1, max_rows=MAX_ROWS, device=CPU, use_fast_path=use_fast_path)
        self.table = torch.randn(
            VOCAB, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        self.num_forwards = 0

    def _forward_step(self, tokens, step):
        self.num_forwards += 1
        return self.table[tokens]


def run(drafter: ChainDrafter, num_steps: int, batch_size: int):
    drafter.apply_runtime_state(STATES[num_steps])
    first = drafter.table[torch.arange(batch_size) % VOCAB]
    sampled = SamplingParams(max_tokens=9, temperature=0.7, top_k=20)
    greedy = SamplingParams(max_tokens=9, temperature=0)
    draws = [
        [Draw(sampled if row % 2 else greedy, row, 10 + step) for row in range(batch_size)]
        for step in range(num_steps)
    ]
    return drafter.draft_forward(first, draws)


@pytest.mark.parametrize("num_steps", range(1, 9))
@pytest.mark.parametrize("batch_size", [1, 3, MAX_ROWS, MAX_ROWS + 1])
def test_fast_path_equals_slow_path(num_steps, batch_size):
    drafter = TableDrafter()
    fast = run(drafter, num_steps, batch_size)
    assert drafter.takes_fast_path(batch_size) == (batch_size <= MAX_ROWS)
    slow = run(TableDrafter(use_fast_path=False), num_steps, batch_size)
    for name, ours, reference in zip(fast._fields, fast, slow, strict=True):
        assert ours.shape == reference.shape, name
        assert ours.dtype == reference.dtype == torch.long, name
        assert ours.is_contiguous() and reference.is_contiguous(), name
        assert torch.equal(ours, reference), name
    assert fast.parent_list.shape == (batch_size, num_steps if num_steps > 1 else 0)
    assert fast.top_scores_index.tolist() == [list(range(num_steps))] * batch_size
    if num_steps > 1:
        assert fast.parent_list.tolist() == [list(range(-1, num_steps - 1))] * batch_size


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_a_round_costs_num_steps_minus_one_forwards_after_the_root(num_steps):
    drafter = TableDrafter()
    run(drafter, num_steps, 2)
    assert drafter.num_forwards == num_steps - 1


def test_buffers_stay_where_they_are_through_100_changes():
    drafter = TableDrafter()
    seen: dict[int, tuple[int, int]] = {}
    contents: dict[int, list[list[int]]] = {}
    for change in range(100):
        num_steps = (change * 5) % 9
        drafter.apply_runtime_state(STATES[num_steps])
        parents, indices = drafter._topk1_parents_prealloc, drafter._topk1_score_indices_prealloc
        pointers = (parents.data_ptr(), indices.data_ptr())
        assert seen.setdefault(num_steps, pointers) == pointers
        assert contents.setdefault(num_steps, indices.tolist()) == indices.tolist()
        assert parents.shape[0] == indices.shape[0] == MAX_ROWS
        assert parents.is_contiguous() and indices.is_contiguous()
    assert len(seen) == 9
    # Buffers of different widths must not overlap, or a graph of one would read another's.
    pointers = [p for pair in seen.values() for p in pair if p]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize(("max_rows", "rows"), [(0, 1), (1, 1), (48, 48)])
def test_rows_are_at_least_one(max_rows, rows):
    drafter = ChainDrafter(topk=1, max_rows=max_rows, device=CPU, use_fast_path=True)
    assert drafter._topk1_parents_prealloc.shape == (rows, 0)


def test_inconsistent_counts_are_refused_and_change_nothing():
    drafter = TableDrafter()
    drafter.apply_runtime_state(STATES[3])
    bad = dataclasses.replace(STATES[5], num_draft_tokens=5)
    with pytest.raises(ValueError, match="num_draft_tokens 5 does not fit num_steps 5"):
        drafter.apply_runtime_state(bad)
    assert (drafter.num_steps, drafter.num_draft_tokens) == (3, 4)
    drafter.num_draft_tokens = 3  # as if somebody forgot the other half
    with pytest.raises(AssertionError):
        drafter._rebuild_topk1_chain_buffers()


def test_topk_above_one_leaves_the_chain_buffers_alone():
    drafter = ChainDrafter(topk=2, max_rows=4, device=CPU, use_fast_path=True)
    drafter.apply_runtime_state(SpecRuntimeState(2, 6, torch.zeros(4, 6, dtype=torch.long)))
    assert drafter.fast_path == "off"
    assert not hasattr(drafter, "_topk1_parents_prealloc")


@pytest.mark.parametrize(
    ("topk", "num_steps", "width"), [(1, 0, 0), (1, 1, 0), (1, 4, 4), (4, 1, 0), (4, 3, 9)]
)
def test_parent_width(topk, num_steps, width):
    assert parent_width(topk, num_steps) == width


def test_the_slow_path_picks_the_best_candidates_of_a_tree():
    scores = [torch.tensor([[[0.6, 0.3]]]), torch.tensor([[[0.5, 0.05], [0.2, 0.1]]])]
    tokens = [torch.tensor([[11, 12]]), torch.tensor([[21, 22, 23, 24]])]
    parents = [torch.tensor([[-1, 0, 1]]), torch.tensor([[2, 4]])]
    tree = organize_draft_results(scores, tokens, parents, num_draft_tokens=4)
    assert tree.top_scores_index.tolist() == [[0, 1, 2]]
    assert tree.draft_tokens.tolist() == [[11, 12, 21]]
    assert tree.parent_list.tolist() == [[-1, 0, 1]]


def test_out_of_bounds_indices_are_caught():
    check_in_bounds(torch.tensor([[0, 4]]), 5)
    check_in_bounds(torch.empty(1, 0, dtype=torch.long), 0)
    for bad in (-1, 5):
        with pytest.raises(ValueError, match="out of bounds"):
            check_in_bounds(torch.tensor([[0, bad]]), 5)
    with pytest.raises(ValueError, match="wants 3 candidates"):
        organize_draft_results([torch.ones(1, 1, 1)], [torch.ones(1, 1, dtype=torch.long)], [], 4)
    with pytest.raises(ValueError, match="candidates"):  # scores and tokens of different widths
        organize_draft_results([torch.ones(1, 1, 2)], [torch.ones(1, 1, dtype=torch.long)], [], 2)
