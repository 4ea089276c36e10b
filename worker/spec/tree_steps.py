"""The steps of drafting a tree: which candidates go on, and what they were drafted from (EAGLE-2's expansion).

Each step drafts `topk` candidates after every node of the frontier; the `topk` best of them by cumulative draft
probability are the next frontier. What the target verifies is chosen at the end, among the candidates of all steps.
Knows nothing about models; a drafter's cells of its own KV are `Branches`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.models.tree_attention import TreeSegment
from worker.spec.tree import DraftTree, organize_draft_results


class Frontier(NamedTuple):
    """The nodes that a step continues."""

    tokens: Tensor  # [bs, topk] int64
    parents: Tensor  # [bs, topk] int64: places in the frontier before; 0 after the root


class TreeSteps:
    """What the steps of a tree produced, in the layout that `organize_draft_results` reads."""

    def __init__(self, topk: int) -> None:
        self._topk = topk
        self._score_list: list[
            Tensor
        ] = []  # [bs, 1, topk], then [bs, topk, topk]: cumulative draft probability
        self._token_list: list[Tensor] = []  # [bs, topk], then [bs, topk * topk]
        self._parents_list: list[Tensor] = []  # [bs, topk + 1], then [bs, topk]: candidates
        self._frontier_scores = torch.empty(0)  # [bs, topk]

    def append(
        self,
        tokens: Tensor,  # [bs, n, topk] int64: n = 1 after the root, then topk
        draft_probs: Tensor,  # [bs, n, topk]
    ) -> Frontier:
        """Add one step; return the frontier of the next."""
        step, topk = len(self._token_list), self._topk
        rows, device = tokens.shape[0], tokens.device
        scores = draft_probs if step == 0 else draft_probs * self._frontier_scores.unsqueeze(-1)
        flat = tokens.flatten(1)
        self._score_list.append(scores)
        self._token_list.append(flat)
        if step == 0:
            self._frontier_scores = scores.flatten(1)
            self._parents_list.append(torch.arange(-1, topk, device=device).repeat(rows, 1))
            return Frontier(flat, torch.zeros_like(flat))
        self._frontier_scores, best = scores.flatten(1).topk(topk, dim=-1)
        self._parents_list.append(best + topk + (step - 1) * topk**2)  # behind the earlier steps' candidates
        return Frontier(flat.gather(1, best), best // topk)

    def organize(self, num_draft_tokens: int) -> DraftTree:
        """Keep the best candidates; all tokens of a request with NaN anywhere are -1."""
        tree = organize_draft_results(
            self._score_list, self._token_list, self._parents_list, num_draft_tokens
        )
        is_broken = (torch.cat(self._token_list, dim=1) < 0).any(dim=1, keepdim=True)
        return tree._replace(draft_tokens=tree.draft_tokens.masked_fill(is_broken, -1))


class Branches:
    """The nodes of one request's tree in its drafter's KV: step by step, in cells from `trunk` on."""

    def __init__(self, slot: int, trunk: int) -> None:
        self._slot = slot
        self._trunk = trunk
        self._next_cell = trunk
        self._paths: list[tuple[int, ...]] = [()]  # of the frontier
        self._cells: dict[tuple[int, int], int] = {}  # (parent's cell, token) -> cell

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> TreeSegment:
        """Add a frontier (see `Frontier`); return where its rows belong."""
        start = self._next_cell
        paths = [(*self._paths[parent], start + i) for i, parent in enumerate(parents)]
        for path, token in zip(paths, tokens, strict=True):
            self._cells[self._before(path), token] = path[-1]
        self._next_cell += len(paths)
        self._paths = paths
        return TreeSegment(self._slot, start, len(paths), trunk=self._trunk, paths=tuple(paths))

    def along(self, token_ids: Sequence[int]) -> list[int]:
        """Return the cells of the nodes that hold the text behind the trunk, as far as there are any."""
        cells: list[int] = []
        for token in token_ids:
            cell = self._cells.get((self._before((*cells, -1)), token))
            if cell is None:
                break
            cells.append(cell)
        return cells

    def _before(self, path: Sequence[int]) -> int:
        """The parent's cell, -1 for the root."""
        return path[-2] if len(path) > 1 else -1


def grow_branches(branches: Sequence[Branches], frontier: Frontier) -> list[TreeSegment]:
    """Grow every request's tree: the one look at a step's numbers."""
    each = zip(branches, frontier.tokens.tolist(), frontier.parents.tolist(), strict=True)
    return [branch.grow(tokens, parents) for branch, tokens, parents in each]
