"""Verify: the target's own tokens at every drafted position, by the rule of plain decoding (DESIGN §7).

Vocabulary: a draft is *correct* iff it equals the token that the target draws at its position, every earlier one
being correct; the *bonus token* is the target's token after the last correct draft. Plain decoding is the same with no
drafts. Knows nothing about EOS, limits or text: cutting is the commit's business.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.request import Request
from worker.sampling import Draw, draw_tokens


class Verdict(NamedTuple):
    """What the target says to one request's drafts."""

    accept_tokens: list[int]
    """Correct drafts, then the bonus token; empty if the target's logits held NaN."""
    num_correct_drafts: int


def verify(
    logits: Tensor,  # [rows, vocab_size], rows = Σ (1 + drafts) request after request: root first
    requests: Sequence[Request],
    drafts: Sequence[Sequence[int]],  # what was proposed, per request
) -> list[Verdict]:
    """Judge every request's drafts.

    Greedy rows are all drawn at once. Sampled rows are drawn position by position and only while the drafts hold:
    noise and filters cost more than a row of the model's head on a CPU, and rows past the first miss are not needed.
    """
    starts = [0]
    for tokens in drafts:
        starts.append(starts[-1] + 1 + len(tokens))
    drawn: list[list[int]] = [[] for _ in requests]
    greedy = [row for row, request in enumerate(requests) if request.params.is_greedy]
    if greedy:
        rows = [start for row in greedy for start in range(starts[row], starts[row + 1])]
        draws = [
            Draw.at(requests[row], requests[row].committed + step)
            for row in greedy
            for step in range(starts[row + 1] - starts[row])
        ]
        chosen = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
        in_order = iter(draw_tokens(chosen, draws).tolist())
        for row in greedy:
            drawn[row] = [next(in_order) for _ in range(starts[row + 1] - starts[row])]
    active = [row for row, request in enumerate(requests) if not request.params.is_greedy]
    step = 0
    while active:
        index = torch.tensor([starts[row] + step for row in active], device=logits.device)
        draws = [Draw.at(requests[row], requests[row].committed + step) for row in active]
        for row, token in zip(active, draw_tokens(logits[index], draws).tolist(), strict=True):
            drawn[row].append(token)
        active = [row for row in active if step < len(drafts[row]) and drawn[row][step] == drafts[row][step]]
        step += 1
    return [_judge(target_tokens, tokens) for target_tokens, tokens in zip(drawn, drafts, strict=True)]


def _judge(target_tokens: Sequence[int], drafts: Sequence[int]) -> Verdict:
    correct = 0
    while correct < len(drafts) and target_tokens[correct] == drafts[correct]:
        correct += 1
    accept_tokens = list(target_tokens[: correct + 1])
    if min(accept_tokens) < 0:  # NaN: nothing of this round can be trusted
        return Verdict([], 0)
    return Verdict(accept_tokens, correct)
