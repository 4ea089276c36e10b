"""The decoding batch of one round: which requests, at which depth, with how many drafts each.

Plain data handed from stage to stage; knows nothing about scheduling or models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from worker.request import Request


@dataclass(frozen=True)
class DecodeBatch:
    """The requests of one round. All lists run in parallel; the round's depth never changes within it."""

    requests: Sequence[Request]
    num_steps: int
    row_budgets: Sequence[int]
    """Most drafts each request may use, fixed before drafting (DESIGN §3)."""

    @property
    def size(self) -> int:
        """Decoding rows: the batch size that plans and statistics are keyed by."""
        return len(self.requests)


def row_budget(
    request: Request, *, num_steps: int, max_context_tokens: int, drafter_context_tokens: int | None
) -> int:
    """Return min(num_steps, request's cap, tokens left - 1, context left, drafter's context left), at least 0.

    A round emits one token more than its correct drafts, so the last token of `max_tokens` needs no draft. The
    k-th draft of a round sits at absolute position `committed + k - 1`, and needs a KV row there in verify.
    """
    room = min(num_steps, request.tokens_left - 1, max_context_tokens - request.committed - 1)
    if request.params.max_num_steps is not None:
        room = min(room, request.params.max_num_steps)
    if drafter_context_tokens is not None:
        # The last forward of a k-token draft reads the token at position committed + k - 2.
        room = min(room, drafter_context_tokens - request.committed + 1)
    return max(0, room)
