"""Draft trees by themselves: what is expanded and kept, how rows hang together, and the walk of verify."""

import random

import pytest
import torch

from worker.request import Request, SamplingParams
from worker.sampling import Draw, draw_candidates, draw_tokens
from worker.spec.draft import ChainDrafter
from worker.spec.runtime_state import build_runtime_states
from worker.spec.tree import DraftTree, Topology, kept_parents
from worker.spec.tree_steps import Branches, Frontier, TreeSteps, grow_branches
from worker.spec.verify import verify

CPU = torch.device("cpu")
VOCAB = 12
TABLE = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
"""A bigram model: row = logits after a token."""
GREEDY = SamplingParams(max_tokens=99, temperature=0)


class TableDrafter(ChainDrafter):
    """Drafts trees with the table."""

    def __init__(self, topk):
        super().__init__(topk=topk, max_rows=4, device=CPU, use_fast_path=True)

    def _forward_frontier(self, frontier, step):
        return TABLE[frontier.tokens]


def draft(topk, num_steps, num_draft_tokens, roots):
    drafter = TableDrafter(topk)
    states = build_runtime_states(
        [num_steps], max_batch_size=4, device=CPU, num_draft_tokens=lambda k: num_draft_tokens
    )
    drafter.apply_runtime_state(states[num_steps])
    draws = [[Draw(GREEDY, 0, step)] * len(roots) for step in range(num_steps)]
    tree = drafter.draft_forward(TABLE[roots], draws)
    assert drafter.slow_path_rounds == 1
    return tree


def paths_of(tree, topk):
    """Return, per request, the set of token paths from the root that the tree holds."""
    found = []
    for tokens, parents in zip(tree.draft_tokens.tolist(), kept_parents(tree, topk), strict=True):
        paths = [()]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent], token))
        found.append(set(paths[1:]))
        assert len(found[-1]) == len(tokens)  # no node twice
    return found


def expected_paths(topk, num_steps, count, root):
    """EAGLE-2's expansion in plain words."""
    frontier, candidates = [(1.0, ())], []
    for _ in range(num_steps):
        children = []
        for score, path in frontier:
            probs = TABLE[path[-1] if path else root].softmax(dim=-1)
            best = probs.topk(topk)
            children += [
                (score * p, (*path, t)) for p, t in zip(*map(torch.Tensor.tolist, best), strict=True)
            ]
        candidates += children
        frontier = sorted(children, reverse=True)[:topk]
    return {path for _, path in sorted(candidates, reverse=True)[:count]}


@pytest.mark.parametrize(
    ("topk", "num_steps", "num_draft_tokens"), [(2, 1, 3), (2, 4, 7), (3, 3, 10), (3, 3, 22), (4, 5, 16)]
)
def test_a_tree_holds_the_best_candidates_of_all_steps(topk, num_steps, num_draft_tokens):
    roots = [3, 0, 7]
    tree = draft(topk, num_steps, num_draft_tokens, roots)
    expected = [expected_paths(topk, num_steps, num_draft_tokens - 1, root) for root in roots]
    assert paths_of(tree, topk) == expected
    assert any(len(path) > 1 for paths in expected for path in paths) or num_steps == 1


def test_a_certain_child_is_never_kept_without_its_parent():
    """Probabilities of 0 and 1 make all scores ties."""
    steps = TreeSteps(3)
    probs = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    steps.append(torch.arange(3).view(1, 1, 3), probs.view(1, 1, 3))
    for _ in range(20):
        steps.append(torch.arange(9).view(1, 3, 3), probs.expand(1, 3, 3))
    for num_draft_tokens in range(2, 60):
        (parents,) = kept_parents(steps.organize(num_draft_tokens), 3)
        topology = Topology.tree(parents, max_depth=99)
        assert topology.num_drafts == num_draft_tokens - 1
        assert list(topology.depths) == sorted(topology.depths)
        assert topology.num_levels == min(21, num_draft_tokens - 1)  # the certain path comes first


def test_nan_anywhere_in_a_request_spoils_its_drafts_alone():
    steps = TreeSteps(2)
    tokens = torch.arange(4).view(2, 1, 2)
    steps.append(tokens, torch.full((2, 1, 2), 0.5))
    logits = torch.zeros(2, 2, VOCAB)
    logits[1, 1, 4] = float("nan")
    drawn, probs = draw_candidates(logits, [Draw(GREEDY, 0, 1)] * 2, 2)
    assert drawn[1, 1].tolist() == [-1, -1] and probs[1, 1].tolist() == [0, 0]
    steps.append(drawn, probs)
    tree = steps.organize(4)
    assert (tree.draft_tokens[1] == -1).all() and (tree.draft_tokens[0] >= 0).all()


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3}]
)
def test_the_first_candidate_is_the_token_that_would_be_drawn(params):
    sampling = SamplingParams(max_tokens=9, **params)
    draws = [Draw(sampling, 5, position, frozenset({2})) for position in range(VOCAB)]
    drawn = draw_tokens(TABLE.clone(), draws)
    candidates, probs = draw_candidates(TABLE.unsqueeze(1).clone(), draws, 4)
    assert torch.equal(candidates[:, 0, 0], drawn)
    assert 2 not in candidates[:, 0, 0].tolist()
    assert (probs[..., 1:] <= probs[..., :-1]).all()


def test_a_candidate_without_its_parent_is_an_error():
    tree = DraftTree(torch.tensor([[-1, 0, 1]]), torch.tensor([[1, 3]]), torch.tensor([[5, 6]]))
    with pytest.raises(ValueError, match="lack some of their parents"):
        kept_parents(tree, 2)  # 3 was drafted from candidate 0


def test_a_tree_is_cut_where_the_budget_ends():
    parents = [0, 0, 1, 1, 2, 3]
    whole = Topology.tree(parents, max_depth=3)
    assert (whole.num_drafts, whole.num_levels, whole.depths) == (6, 3, [0, 1, 1, 2, 2, 2, 3])
    assert whole.paths(10) == (
        (10,),
        (10, 11),
        (10, 12),
        (10, 11, 13),
        (10, 11, 14),
        (10, 12, 15),
        (10, 11, 13, 16),
    )
    for depth, count in enumerate([0, 2, 5]):
        cut = Topology.tree(parents, max_depth=depth)
        assert (cut.num_drafts, cut.num_levels, list(cut.parents)) == (count, depth, parents[:count])
    chain = Topology.chain(3)
    assert Topology.tree(list(chain.parents), max_depth=9).paths(4) == chain.paths(4)


def test_branches_know_the_cells_of_a_text():
    branches = Branches(slot=2, trunk=20)
    step = [Frontier(torch.tensor([[5, 6]]), torch.tensor([[0, 0]]))]
    step.append(Frontier(torch.tensor([[6, 5]]), torch.tensor([[1, 1]])))
    step.append(Frontier(torch.tensor([[5, 7]]), torch.tensor([[1, 0]])))
    segments = [grow_branches([branches], frontier)[0] for frontier in step]
    assert [(s.slot, s.start, s.count, s.trunk) for s in segments] == [
        (2, 20, 2, 20),
        (2, 22, 2, 20),
        (2, 24, 2, 20),
    ]
    assert segments[2].paths == ((21, 23, 24), (21, 22, 25))
    assert segments[2].positions == [22, 22]
    for text, cells in [
        ([6, 5, 5, 1], [21, 23, 24]),
        ([6, 6, 7], [21, 22, 25]),
        ([5, 6], [20]),
        ([7], []),
        ([], []),
    ]:
        assert branches.along(text) == cells


def walk(seed, temperature, choose_tree, length=8):
    """Emit `length` tokens through `verify`, with any tree in any round."""
    sampling = SamplingParams(max_tokens=length, temperature=temperature, seed=seed)
    request = Request("r", [0], sampling, lambda chunk: None)
    num_correct = 0
    while len(request.output_ids) < length:
        tokens, parents = choose_tree()
        rows = torch.tensor([request.token_at(request.committed - 1), *tokens])
        tree = Topology.tree(parents, max_depth=99)
        (verdict,) = verify(TABLE[rows], [request], rows, [len(tokens)], [tree])
        assert [tokens[row - 1] for row in verdict.path] == verdict.accept_tokens[:-1]
        assert [parents[row - 1] for row in verdict.path] == [0, *verdict.path][:-1]
        num_correct += verdict.num_correct_drafts
        request.output_ids += verdict.accept_tokens
    return request.output_ids[:length], num_correct


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_tree_gives_the_tokens_of_plain_decoding(temperature):
    chance = random.Random(3)
    num_correct = 0
    for seed in range(60):

        def random_tree():
            rows = chance.randrange(14)
            parents = sorted(chance.randrange(1 + row // 2) for row in range(rows))
            taken: dict[int, list[int]] = {}
            for parent in parents:  # siblings are never equal
                rest = [token for token in range(VOCAB) if token not in taken.setdefault(parent, [])]
                taken[parent].append(chance.choice(rest))
            used = {parent: iter(tokens) for parent, tokens in taken.items()}
            return [next(used[parent]) for parent in parents], parents

        plain, _ = walk(seed, temperature, lambda: ([], []))
        tokens, correct = walk(seed, temperature, random_tree)
        assert tokens == plain
        num_correct += correct
    assert num_correct > 60
