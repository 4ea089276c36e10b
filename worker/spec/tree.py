"""Organising what a drafter's steps produced into a draft tree (the slow path, for any topk), and a tree's topology.

`draft_forward` skips this for topk 1, where it is an identity (see `draft.py`). The analysis this follows is SGLang
#26424; trees are those of EAGLE-2. Knows nothing about models, requests or attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor


class DraftTree(NamedTuple):
    """A draft tree per request. At topk 1 it is a chain."""

    parent_list: Tensor  # [bs, parent_width] int64; -1 is the root
    top_scores_index: Tensor  # [bs, num_draft_tokens - 1] int64, rising: the candidates that were kept
    draft_tokens: Tensor  # [bs, num_draft_tokens - 1] int64


def parent_width(topk: int, num_steps: int) -> int:
    """Width of `parent_list`: 0 for one step, else `(topk + 1) + (num_steps - 2) * topk` (num_steps at topk 1)."""
    return 0 if num_steps <= 1 else (topk + 1) + (num_steps - 2) * topk


def organize_draft_results(
    score_list: Sequence[Tensor],  # per step [bs, n, topk]: cumulative draft probabilities
    token_list: Sequence[Tensor],  # per step [bs, n * topk] int64
    parents_list: Sequence[Tensor],  # first [bs, topk + 1], then [bs, topk] int64
    num_draft_tokens: int,
) -> DraftTree:
    """Keep the `num_draft_tokens - 1` best-scored candidates of all steps, in the order they were drafted.

    Raises:
        ValueError: fewer candidates than asked for, or an index outside them (a corrupt score).
    """
    scores = torch.cat([step.flatten(1) for step in score_list], dim=1)
    tokens = torch.cat(list(token_list), dim=1)
    wanted = num_draft_tokens - 1
    if scores.shape != tokens.shape or wanted > scores.shape[1]:
        raise ValueError(
            f"num_draft_tokens {num_draft_tokens} wants {wanted} candidates, "
            f"scores have shape {tuple(scores.shape)}, tokens {tuple(tokens.shape)}"
        )
    top_scores_index = _best(scores, wanted).sort(dim=-1).values
    check_in_bounds(top_scores_index, tokens.shape[1])
    draft_tokens = tokens.gather(1, top_scores_index)
    if len(parents_list) > 1:
        parent_list = torch.cat(list(parents_list[:-1]), dim=1)
    else:
        # One step has no parents but the root; the dtype is what kernels read (int64), also when empty.
        parent_list = torch.empty(tokens.shape[0], 0, dtype=torch.long, device=tokens.device)
    return DraftTree(parent_list, top_scores_index, draft_tokens)


def _best(scores: Tensor, wanted: int) -> Tensor:  # [bs, candidates] -> [bs, wanted] int64
    """Return the best candidates; of equal ones the earlier, where there is a choice."""
    if wanted == scores.shape[1]:
        return scores.topk(wanted, dim=-1).indices
    # A certain child scores as much as its parent, and topk may take either: a tree must not lose the parent.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :wanted]


def check_in_bounds(index: Tensor, width: int) -> None:
    """Raise ValueError if any index is outside `[0, width)`: a gather past the end corrupts silently on a GPU."""
    if index.numel() and not bool(((index >= 0) & (index < width)).all()):
        raise ValueError(
            f"draft index out of bounds: values in [{int(index.min())}, {int(index.max())}], width {width}"
        )


@dataclass(frozen=True)
class Topology:
    """How one request's rows of verify hang together: row 0 is the root, rows 1, 2, … its drafts, level by level."""

    parents: Sequence[int]
    """Of rows 1, 2, …: the row that each continues, an earlier one."""
    depths: Sequence[int]
    """Of rows 0, 1, …: never falling, 0 for the root."""

    @classmethod
    def chain(cls, num_drafts: int) -> Self:
        """Return the topology at topk 1."""
        return cls(range(num_drafts), range(num_drafts + 1))

    @classmethod
    def tree(cls, parents: Sequence[int], max_depth: int) -> Self:
        """Return the topology of a tree, cut below `max_depth`; `parents` as above."""
        depths = [0]
        for parent in parents:
            if depths[parent] == max_depth:
                break  # rows follow level by level: all others are too deep as well
            depths.append(depths[parent] + 1)
        return cls(parents[: len(depths) - 1], depths)

    @property
    def num_drafts(self) -> int:
        """Rows beside the root."""
        return len(self.parents)

    @property
    def num_levels(self) -> int:
        """Positions that have a draft."""
        return self.depths[-1]

    def paths(self, start: int) -> tuple[tuple[int, ...], ...]:
        """Return the cells from the root to each row, if row i lies in cell `start + i`."""
        paths: list[tuple[int, ...]] = [(start,)]
        for row, parent in enumerate(self.parents, start=1):
            paths.append((*paths[parent], start + row))
        return tuple(paths)


def kept_parents(tree: DraftTree, topk: int) -> list[list[int]]:
    """Return, per request, `Topology.parents` of the candidates that were kept.

    Candidate c was drafted from entry `c // topk` of `parent_list`, which is a candidate too, or -1.

    Raises:
        ValueError: a candidate was kept without its parent (a corrupt score).
    """
    parents = []
    for kept, parent_list in zip(tree.top_scores_index.tolist(), tree.parent_list.tolist(), strict=True):
        row_of = {-1: 0} | {candidate: row for row, candidate in enumerate(kept, start=1)}
        # One step has no list: all its candidates continue the root.
        came_from = [parent_list[candidate // topk] if parent_list else -1 for candidate in kept]
        if not row_of.keys() >= set(came_from):
            raise ValueError(f"candidates {kept} lack some of their parents {came_from}")
        parents.append([row_of[candidate] for candidate in came_from])
    return parents
