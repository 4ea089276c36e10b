"""Verify: the target's own tokens at every drafted position, by the rule of plain decoding (DESIGN §7).

Vocabulary: a draft is *correct* iff it equals the token that the target draws at its position, every earlier one
being correct; the *bonus token* is the target's token after the last correct draft. In a tree the walk goes from the
root to the child that holds the drawn token, until there is none. A chain is a tree without siblings, plain decoding
one without drafts. Drafts and the target's tokens leave the device together, in the one read of a round. Knows nothing
about EOS, limits or text: cutting is the commit's business.
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
from worker.transfer import to_device

DEVICES_READ_FOR_FREE = ("cpu",)


class Verdict(NamedTuple):
    """What the target says to one request's drafts."""

    accept_tokens: list[int]
    """Correct drafts, then the bonus token; empty if the target's logits held NaN."""
    num_correct_drafts: int
    path: Sequence[int] = ()
    """Rows of the correct drafts; in a chain 1, 2, …"""
    is_draft_broken: bool = False
    """A draft was no token: the drafter's logits held NaN. No verdict of the round counts a draft then."""


@torch.inference_mode()
def run_verify(
    runner: ModelRunner, state: SpecRuntimeState, requests: Sequence[Request], draft: DraftOutput
) -> tuple[list[Verdict], int]:
    """Run the target over roots and drafts; return the verdicts and the rows it computed.

    Afterwards the KV of each request's correct drafts follows its root's, as after a chain.
    """
    roots = to_device([request.token_at(request.committed - 1) for request in requests], runner.device)
    rows = state.fill(roots, draft.draft_tokens, draft.num_proposed)
    # A draft that is no token (-1) is found when the round is read; until then any token stands in for it.
    logits = runner.decode(rows.clamp(min=0), _segments(requests, draft))
    verdicts = verify(logits, requests, rows, draft.num_proposed, draft.trees)
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
    logits: Tensor,  # [rows, vocab_size], rows = Σ (1 + num_proposed) request after request: root first
    requests: Sequence[Request],
    rows: Tensor,  # [rows] int64: root and drafts, -1 where a drafter's logits held NaN
    num_proposed: Sequence[int],  # [bs]
    trees: Sequence[Topology] | None = None,  # None: chains
) -> list[Verdict]:
    """Judge every request's drafts."""
    topologies = trees or [Topology.chain(count) for count in num_proposed]
    if logits.device.type in DEVICES_READ_FOR_FREE and not all(r.params.is_greedy for r in requests):
        verify_tokens = rows.tolist()
        walks = _walks(requests, topologies, verify_tokens)
        _draw_while_they_hold(logits, walks)
    else:
        draws = [
            Draw.at(request, request.committed + depth)
            for request, topology in zip(requests, topologies, strict=True)
            for depth in topology.depths
        ]
        verify_tokens, drawn = torch.stack((rows, draw_tokens(logits, draws))).tolist()
        walks = _walks(requests, topologies, verify_tokens)
        for walk in walks:
            while not walk.has_ended:
                walk.go_on(drawn[walk.row])
    # Roots are committed tokens: what is below 0 is a draft.
    return [walk.verdict(is_draft_broken=min(verify_tokens) < 0) for walk in walks]


def _walks(
    requests: Sequence[Request], topologies: Sequence[Topology], verify_tokens: Sequence[int]
) -> list["_Walk"]:
    """Set every request's walk to its root."""
    walks = []
    first_row = 0
    for request, topology in zip(requests, topologies, strict=True):
        stop = first_row + len(topology.depths)
        walks.append(_Walk(request, verify_tokens[first_row + 1 : stop], topology, first_row))
        first_row = stop
    return walks


def _draw_while_they_hold(logits: Tensor, walks: Sequence["_Walk"]) -> None:
    """Draw step by step, a request's row only once its walk has come there.

    On a CPU reading costs nothing, noise and filters cost more than a row of the model's head, and rows off the way
    are not needed.
    """
    active = list(walks)
    while active:
        draws = [walk.draw() for walk in active]
        tokens = draw_tokens(logits[torch.tensor([walk.row for walk in active])], draws).tolist()
        for walk, token in zip(active, tokens, strict=True):
            walk.go_on(token)
        active = [walk for walk in active if not walk.has_ended]


class _Walk:
    """One request's way from its root along the tokens that the target draws. Rows are those of the logits."""

    def __init__(self, request: Request, drafts: Sequence[int], topology: Topology, first_row: int) -> None:
        self.request = request
        self.row = first_row
        self.rows = range(first_row, first_row + 1 + len(drafts))
        self.has_ended = False
        self._topology = topology
        self._children = {
            (first_row + parent, token): first_row + row
            for row, (parent, token) in enumerate(zip(topology.parents, drafts, strict=True), start=1)
        }
        self._tokens: list[int] = []
        self._path: list[int] = []

    def draw(self) -> Draw:
        """How the target's token after the present row is drawn."""
        depth = self._topology.depths[self.row - self.rows.start]
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

    def verdict(self, *, is_draft_broken: bool = False) -> Verdict:
        """What came of it; where a draft of the round was broken, the target's own next token only."""
        if is_draft_broken:
            self._tokens, self._path = self._tokens[:1], []
        if min(self._tokens) < 0:  # NaN: nothing of this round can be trusted
            return Verdict([], 0, is_draft_broken=is_draft_broken)
        return Verdict(self._tokens, len(self._path), self._path, is_draft_broken)
