"""Everything that is valid for one depth: built once per tier at start, swapped whole between rounds.

A state is chosen, never resized: every buffer here has the rows of the largest batch, so a graph captured over it
can be replayed after any number of changes. Knows nothing about who decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.transfer import to_device


def chain_draft_tokens(num_steps: int) -> int:
    """Return num_draft_tokens at topk 1: the root and one draft per step."""
    return num_steps + 1


@dataclass(frozen=True)
class SpecRuntimeState:
    """Buffers of one tier. Filled and read by the engine thread only."""

    num_steps: int
    num_draft_tokens: int
    """The root and its drafts: `num_steps + 1` at topk 1."""
    verify_tokens: Tensor  # [max_batch_size, num_draft_tokens] int64

    def fill(
        self,
        roots: Tensor,  # [bs] int64
        draft_tokens: Tensor,  # [bs, num_draft_tokens - 1] int64
        num_proposed: Sequence[int],  # [bs]
    ) -> Tensor:  # [Σ (1 + num_proposed)] int64
        """Lay root and drafts side by side and return the rows to verify, request after request.

        Rows are ragged: a request with fewer drafts than others costs no padding.
        """
        batch_size = roots.shape[0]
        tokens = self.verify_tokens[:batch_size]
        tokens[:, 0] = roots
        tokens[:, 1:] = draft_tokens
        if min(num_proposed) == self.num_draft_tokens - 1:
            return tokens.flatten()
        starts = range(0, tokens.numel(), self.num_draft_tokens)
        kept = [
            place
            for start, n in zip(starts, num_proposed, strict=True)
            for place in range(start, start + n + 1)
        ]
        return tokens.flatten().index_select(0, to_device(kept, tokens.device))


def build_runtime_states(
    candidate_steps: Sequence[int],
    *,
    max_batch_size: int,
    device: torch.device,
    num_draft_tokens: Callable[[int], int] = chain_draft_tokens,
) -> dict[int, SpecRuntimeState]:
    """Build the state of every tier; `num_draft_tokens` gives the size of its chains or trees."""
    states = {}
    for num_steps in candidate_steps:
        width = num_draft_tokens(num_steps)
        states[num_steps] = SpecRuntimeState(
            num_steps=num_steps,
            num_draft_tokens=width,
            verify_tokens=torch.zeros(max_batch_size, width, dtype=torch.long, device=device),
        )
    return states
