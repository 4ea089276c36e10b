"""Organising what a drafter's steps produced into a draft tree: the slow path, for any topk.

`draft_forward` skips this for topk 1, where it is an identity (see `draft.py`). Trees (topk > 1) are not served
yet; this is where their masks and their accepted paths will live. The analysis this follows is SGLang #26424.
"""

from collections.abc import Sequence
from typing import NamedTuple

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
    top_scores_index = scores.topk(wanted, dim=-1).indices.sort(dim=-1).values
    check_in_bounds(top_scores_index, tokens.shape[1])
    draft_tokens = tokens.gather(1, top_scores_index)
    if len(parents_list) > 1:
        parent_list = torch.cat(list(parents_list[:-1]), dim=1)
    else:
        # One step has no parents but the root; the dtype is what kernels read (int64), also when empty.
        parent_list = torch.empty(tokens.shape[0], 0, dtype=torch.long, device=tokens.device)
    return DraftTree(parent_list, top_scores_index, draft_tokens)


def check_in_bounds(index: Tensor, width: int) -> None:
    """Raise ValueError if any index is outside `[0, width)`: a gather past the end corrupts silently on a GPU."""
    if index.numel() and not bool(((index >= 0) & (index < width)).all()):
        raise ValueError(
            f"draft index out of bounds: values in [{int(index.min())}, {int(index.max())}], width {width}"
        )
