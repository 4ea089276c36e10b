"""Verify: the target's own tokens at every drafted position, by the rule of plain decoding (DESIGN §7).

Vocabulary: a draft is *correct* iff it equals the token that the target draws at its position, every earlier one
being correct; the *bonus token* is the target's token after the last correct draft. In a tree the walk goes from the
root to the child that holds the drawn token, until there is none. A chain is a tree without siblings, plain decoding
one without drafts. Knows nothing about EOS, limits or text: cutting is the commit's business.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.model_runner import ModelRunner
from worker.models.attention import Segment
from worker.models.tree_attention import TreeSegment
from worker.request import Request
from worker.sampling import Draw, draw_tokens
from worker.spec.draft import DraftOutput
from worker.spec.runtime_state import SpecRuntimeState
from worker.spec.tree import Topology


class Verdict(NamedTuple):
    """What the target says to one request's drafts."""

    accept_tokens: list[int]
    """Correct drafts, then the bonus token; empty if the target's logits held NaN."""
    num_correct_drafts: int
    path: Sequence[int] = ()
    """Rows of the correct drafts; in a chain 1, 2, …"""


@torch.inference_mode()
def run_verify(
    runner: ModelRunner, state: SpecRuntimeState, requests: Sequence[Request], draft: DraftOutput
) -> tuple[list[Verdict], int]:
    """Run the target over roots and drafts; return the verdicts and the rows it computed.

    Afterwards the KV of each request's correct drafts follows its root's, as after a chain.
    """
    device = runner.device
    roots = torch.tensor([request.token_at(request.committed - 1) for request in requests], device=device)
    num_proposed = torch.tensor(draft.num_proposed, device=device)
    rows = state.fill(roots, draft.draft_tokens, num_proposed)
    logits = runner.decode(rows, _segments(requests, draft))
    padded = draft.draft_tokens.tolist()
    drafts = [tokens[:count] for tokens, count in zip(padded, draft.num_proposed, strict=True)]
    verdicts = verify(logits, requests, drafts, draft.trees)
    if draft.trees is not None:
        for request, verdict in zip(requests, verdicts, strict=True):
            root = request.committed - 1
            runner.kv.compact(request.held_slot, root + 1, [root + row for row in verdict.path])
    return verdicts, len(rows)


def _segments(requests: Sequence[Request], draft: DraftOutput) -> list[Segment]:
    """Return where the rows of verify belong: the root at the first position without KV, its drafts behind it."""
    if draft.trees is None:
        return [
            Segment(request.held_slot, request.committed - 1, 1 + count)
            for request, count in zip(requests, draft.num_proposed, strict=True)
        ]
    return [
        TreeSegment(request.held_slot, root, 1 + tree.num_drafts, trunk=root, paths=tree.paths(root))
        for request, tree in zip(requests, draft.trees, strict=True)
        for root in [request.committed - 1]
    ]


def verify(
    logits: Tensor,  # [rows, vocab_size], rows = Σ (1 + drafts) request after request: root first
    requests: Sequence[Request],
    drafts: Sequence[Sequence[int]],  # what was proposed, per request
    trees: Sequence[Topology] | None = None,  # None: chains
) -> list[Verdict]:
    """Judge every request's drafts.

    Greedy rows are all drawn at once. Sampled rows are drawn position by position and only while the drafts hold:
    noise and filters cost more than a row of the model's head on a CPU, and rows past the first miss are not needed.
    """
    walks: list[_Walk] = []
    first_row = 0
    topologies = trees or [Topology.chain(len(tokens)) for tokens in drafts]
    for request, tokens, topology in zip(requests, drafts, topologies, strict=True):
        walks.append(_Walk(request, tokens, topology, first_row))
        first_row += 1 + len(tokens)
    greedy = [walk for walk in walks if walk.request.params.is_greedy]
    if greedy:
        rows = [row for walk in greedy for row in walk.rows]
        chosen = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
        draws = [walk.draw(row) for walk in greedy for row in walk.rows]
        token_at = dict(zip(rows, draw_tokens(chosen, draws).tolist(), strict=True))
        for walk in greedy:
            while not walk.has_ended:
                walk.go_on(token_at[walk.row])
    active = [walk for walk in walks if not walk.has_ended]
    while active:
        index = torch.tensor([walk.row for walk in active], device=logits.device)
        draws = [walk.draw(walk.row) for walk in active]
        for walk, token in zip(active, draw_tokens(logits[index], draws).tolist(), strict=True):
            walk.go_on(token)
        active = [walk for walk in active if not walk.has_ended]
    return [walk.verdict() for walk in walks]


class _Walk:
    """One request's way from its root along the tokens that the target draws. Rows are those of the logits."""

    def __init__(self, request: Request, drafts: Sequence[int], topology: Topology, first_row: int) -> None:
        self.request = request
        self.rows = range(first_row, first_row + 1 + len(drafts))
        self.row = first_row
        self.has_ended = False
        self._topology = topology
        self._children = {
            (first_row + parent, token): first_row + row
            for row, (parent, token) in enumerate(zip(topology.parents, drafts, strict=True), start=1)
        }
        self._tokens: list[int] = []
        self._path: list[int] = []

    def draw(self, row: int) -> Draw:
        """How the target's token after a row is drawn."""
        depth = self._topology.depths[row - self.rows.start]
        return Draw.at(self.request, self.request.committed + depth)

    def go_on(self, token: int) -> None:
        """Take the target's token at the present row: to the child that holds it, or to the end."""
        self._tokens.append(token)
        child = self._children.get((self.row, token))
        if child is None:
            self.has_ended = True
            return
        self.row = child
        self._path.append(child - self.rows.start)

    def verdict(self) -> Verdict:
        """What came of it."""
        if min(self._tokens) < 0:  # NaN: nothing of this round can be trusted
            return Verdict([], 0)
        return Verdict(self._tokens, len(self._path), self._path)
