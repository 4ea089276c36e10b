"""Drafting: the protocol of all drafters, and `draft_forward` with its topk=1 fast path.

A drafter proposes tokens; it never decides what is emitted, so a bad one costs time and no correctness. New kinds
subclass `ChainDrafter` and bring their own forward. Knows nothing about plans or HTTP.
The fast path follows the analysis of SGLang #26424.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from worker.batch import DecodeBatch
from worker.request import Request
from worker.sampling import Draw, draw_candidates, draw_tokens
from worker.spec.runtime_state import SpecRuntimeState
from worker.spec.tree import DraftTree, Topology, organize_draft_results, parent_width
from worker.spec.tree_steps import Frontier, TreeSteps


class DraftOutput(NamedTuple):
    """What a drafter proposes for one round."""

    draft_tokens: Tensor  # [bs, num_draft_tokens - 1] int64; past num_proposed the values mean nothing
    num_proposed: Sequence[int]  # per request; a chain's is at most its row_budget
    catch_up_seconds: float = 0.0
    """Part of the draft stage spent on bringing the drafter's own KV up to date."""
    trees: Sequence[Topology] | None = None
    """Per request, how its drafts hang together; None: chains."""
    has_failed: bool = False
    """The drafter failed in this round, which became one at depth 0."""

    @property
    def num_levels(self) -> Sequence[int]:
        """Positions with a draft, per request, at most its row_budget."""
        return [topology.num_levels for topology in self.trees] if self.trees else self.num_proposed


class Drafter(Protocol):
    """What the engine asks of a drafter. All calls come from the engine thread."""

    @property
    def fast_path(self) -> Literal["on", "off", "not applicable"]:
        """Whether drafting skips organising; not applicable where there is nothing to organise."""

    @property
    def max_context_tokens(self) -> int | None:
        """Longest text it can draft for; None: no limit of its own."""

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        """Adopt a tier; called between rounds only, through the engine's one way to change depth."""

    def draft(self, batch: DecodeBatch) -> DraftOutput:
        """Propose up to `row_budgets` tokens per request; `batch.num_steps` is > 0.

        A proposal of -1 says that logits held NaN. It is read together with the target's answer, so that a round has
        one read from the device; then the engine calls `recover`, and the round counts as one at depth 0.
        """

    def commit(self, request: Request) -> None:
        """Follow the outcome of a round: drop what the drafter stored past the committed tokens."""

    def recover(self, slot: int) -> None:
        """Wipe a slot and forget it: it proposed -1, so the numbers behind it are broken."""

    def release(self, slot: int) -> None:
        """Forget a slot; called exactly once for each end of a request, on every path."""


class ChainDrafter:
    """Base of drafters that run a model: depth, chain buffers, and `draft_forward` up to its organising end.

    With topk above 1 the same steps draft a tree, always organised the long way.
    """

    def __init__(
        self,
        *,
        topk: int,
        max_rows: int,
        device: torch.device,
        use_fast_path: bool,
    ) -> None:
        """Set up without a depth; `apply_runtime_state` gives it one.

        Args:
            topk: candidates kept per step; 1 is a chain.
            max_rows: max(cuda_graph_max_bs, max_running_requests, 1): rows of the preallocated buffers.
            device: where drafts are made.
            use_fast_path: False always organises the long way (kill switch, and the reference in tests).
        """
        self.topk = topk
        self.num_steps = 0
        self.num_draft_tokens = 1
        self.device = device
        self._max_rows = max(max_rows, 1)
        self._use_fast_path = use_fast_path
        self.slow_path_rounds = 0
        """Rounds whose drafts were organised the long way."""
        # One pair per width, kept for good: a graph captured at another depth must never read a moved buffer.
        self._chain_buffers: dict[int, tuple[Tensor, Tensor]] = {}
        # By (width, rows): their first rows. Making two views takes as long as the rest of organising a chain.
        self._chain_views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._rebuild_topk1_chain_buffers()

    @property
    def fast_path(self) -> Literal["on", "off", "not applicable"]:
        """Whether `draft_forward` skips organising."""
        return "on" if self._use_fast_path and self.topk == 1 else "off"

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        """Set both counts together and select the buffers that fit them.

        Raises:
            ValueError: the counts do not fit together; nothing changes.
        """
        if self.topk == 1 and state.num_draft_tokens != state.num_steps + 1:
            raise ValueError(
                f"num_draft_tokens {state.num_draft_tokens} does not fit num_steps {state.num_steps}: "
                f"at topk 1 it is num_steps + 1"
            )
        self.num_steps = state.num_steps
        self.num_draft_tokens = state.num_draft_tokens
        self._rebuild_topk1_chain_buffers()

    def _rebuild_topk1_chain_buffers(self) -> None:
        """Select what organising a chain always gives: parents `[-1, 0, …, num_steps - 2]`, indices `[0 …]`."""
        if self.topk != 1:
            return
        assert self.num_draft_tokens == self.num_steps + 1
        if self.num_steps not in self._chain_buffers:
            width = parent_width(1, self.num_steps)
            # repeat, not expand: kernels read data_ptr and expect rows that really follow each other.
            parents = torch.arange(-1, width - 1, device=self.device).repeat(self._max_rows, 1)
            indices = torch.arange(self.num_steps, device=self.device).repeat(self._max_rows, 1)
            self._chain_buffers[self.num_steps] = parents, indices
        self._topk1_parents_prealloc, self._topk1_score_indices_prealloc = self._chain_buffers[self.num_steps]

    def takes_fast_path(self, batch_size: int) -> bool:
        """Whether a batch of this size skips organising."""
        return self.fast_path == "on" and batch_size <= self._topk1_parents_prealloc.shape[0]

    def draft_forward(
        self,
        first_logits: Tensor,  # [bs, vocab_size]: after the root
        draws: Sequence[Sequence[Draw]],  # [num_steps][bs]
    ) -> DraftTree:
        """Draft a chain of `num_steps` tokens per row; with topk above 1 a tree of as many levels.

        Each step draws with the target's own rule and noise (DESIGN §7), then one forward over the new tokens gives
        the next step's logits; the last token needs none. A row whose logits held NaN has -1 among its tokens.
        """
        if self.topk > 1:
            return self._draft_tree(first_logits, draws)
        is_fast = self.takes_fast_path(first_logits.shape[0])
        self.slow_path_rounds += not is_fast
        steps = ChainSteps(first_logits.shape[0], self.num_steps, first_logits.device)
        logits = first_logits
        for step, column in enumerate(steps.columns):
            tokens = draw_tokens(logits, draws[step], out=column).clamp(min=0)  # [bs]
            if not is_fast:
                # Nobody reads the scores on the fast path: that saves the softmax over the vocabulary, too.
                steps.append(logits.softmax(dim=-1).gather(1, tokens.unsqueeze(-1)))
            if step + 1 < self.num_steps:
                logits = self._forward_step(tokens, step)
        return self.organize(steps) if is_fast else steps.organize_slowly(self.num_draft_tokens)

    def _draft_tree(self, first_logits: Tensor, draws: Sequence[Sequence[Draw]]) -> DraftTree:
        self.slow_path_rounds += 1
        steps = TreeSteps(self.topk)
        logits = first_logits.unsqueeze(1)  # [bs, 1, vocab_size]; later steps: [bs, topk, vocab_size]
        for step in range(self.num_steps):
            frontier = steps.append(*draw_candidates(logits, draws[step], self.topk))
            if step + 1 < self.num_steps:
                logits = self._forward_frontier(frontier._replace(tokens=frontier.tokens.clamp(min=0)), step)
        return steps.organize(self.num_draft_tokens)

    def organize(self, steps: "ChainSteps") -> DraftTree:
        """The fast path: constants for the topology, and the tokens as they were drawn, side by side."""
        key = self.num_steps, steps.tokens.shape[0]
        if key not in self._chain_views:
            parents, indices = self._chain_buffers[self.num_steps]
            self._chain_views[key] = parents[: key[1]], indices[: key[1]]
        return DraftTree(*self._chain_views[key], steps.tokens)

    def _forward_step(self, tokens: Tensor, step: int) -> Tensor:  # [bs] -> [bs, vocab_size]
        """Run the draft model over the tokens of `step` (0-based) and return the logits after them."""
        raise NotImplementedError

    def _forward_frontier(self, frontier: Frontier, step: int) -> Tensor:  # -> [bs, topk, vocab_size]
        """The same for the nodes of a tree that go on after `step`."""
        raise NotImplementedError


class ChainSteps:
    """What the steps of a chain produced. Each writes its tokens where they belong: the fast path moves nothing."""

    def __init__(self, rows: int, num_steps: int, device: torch.device) -> None:
        self.tokens = torch.empty(rows, num_steps, dtype=torch.long, device=device)
        self.columns = self.tokens.unbind(dim=1)  # [bs] each: where a step's tokens are drawn to
        # Only the slow path needs lists, as a tree has them.
        self._score_list: list[Tensor] = []  # [bs, 1, 1] each: cumulative draft probability
        self._token_list: list[Tensor] = []  # [bs, 1] each
        self._parents_list: list[Tensor] = []  # [bs, 2] first, then [bs, 1] each

    def append(self, draft_probs: Tensor) -> None:  # [bs, 1]
        """Add the next step, whose tokens have been drawn, to what the slow path organises."""
        step, device = len(self._token_list), self.tokens.device
        scores = draft_probs.unsqueeze(-1)
        self._score_list.append(scores * self._score_list[-1] if step else scores)
        self._token_list.append(self.columns[step].unsqueeze(-1))
        parents = torch.arange(-1, 1, device=device) if step == 0 else torch.tensor([step], device=device)
        self._parents_list.append(parents.repeat(self.tokens.shape[0], 1))

    def organize_slowly(self, num_draft_tokens: int) -> DraftTree:
        """The slow path: cat, topk, sort, gather."""
        return organize_draft_results(
            self._score_list, self._token_list, self._parents_list, num_draft_tokens
        )
