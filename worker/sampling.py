"""Drawing tokens: one rule for plain decoding, verify and drafters (DESIGN §7).

A token is drawn from the filtered target distribution with noise that depends only on (seed, absolute position):
Gumbel-max with counter-based noise; greedy is the same without noise. So neither the batch, nor the depth, nor
what was drawn before changes a request's tokens. Knows nothing about requests' text, drafts or KV.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.noise import gumbel_noise, hashed_noise
from worker.request import Request, SamplingParams
from worker.transfer import to_device


class Draw(NamedTuple):
    """One token to draw: how, and at which absolute position (0-based, of the token drawn)."""

    params: SamplingParams
    seed: int
    position: int
    banned: frozenset[int] = frozenset()
    """Tokens that cannot be drawn here."""

    @classmethod
    def at(cls, request: Request, position: int) -> "Draw":
        """Return the draw of `request`'s token at `position`."""
        return cls(request.params, request.seed, position, request.banned_at(position))


def draw_tokens(
    logits: Tensor,  # [rows, vocab_size]
    draws: Sequence[Draw],  # one per row
    out: Tensor | None = None,  # [rows] int64
) -> Tensor:  # [rows] int64
    """Draw one token per row, into `out` if given; a row with NaN in its logits gives -1.

    Ties go to the lowest id, in every mode. Logits of banned tokens are overwritten in place.
    """
    _ban(logits, draws)
    tokens = torch.empty(len(draws), dtype=torch.long, device=logits.device) if out is None else out
    values = logits.new_empty(len(draws))
    torch.max(logits, dim=-1, out=(values, tokens))
    sampled = [row for row, draw in enumerate(draws) if not draw.params.is_greedy]
    if sampled:
        index = to_device(sampled, logits.device)
        chosen = [draws[row] for row in sampled]
        scores = filter_logits(logits[index], [draw.params for draw in chosen])
        tokens[index] = (scores + noise_of(chosen, scores)).argmax(dim=-1)
    return tokens.masked_fill_(values.isnan(), -1)


def draw_candidates(
    logits: Tensor,  # [bs, n, vocab_size]: n places of each request's tree
    draws: Sequence[Draw],  # one per request: its places are at the same position
    count: int,
) -> tuple[Tensor, Tensor]:  # [bs, n, count] int64 and their draft probabilities, both likeliest first
    """Return the tokens that `draw_tokens` would most likely draw; a place with NaN in its logits gives -1 and 0.

    A sampled request's logits are filtered and have their noise: given (seed, position) a draw is certain, and what
    is likely is that the target, whose logits differ a little, draws the same.
    """
    scores = logits.clone()
    for places, draw in zip(scores, draws, strict=True):
        _ban(places, [draw] * len(places))
        if not draw.params.is_greedy:
            filtered = filter_logits(places, [draw.params] * len(places))
            places.copy_(filtered + noise_of([draw], filtered))
    probs, tokens = scores.softmax(dim=-1).topk(count, dim=-1)
    is_broken = logits.isnan().any(dim=-1, keepdim=True)
    return tokens.masked_fill(is_broken, -1), probs.masked_fill(is_broken, 0.0)


def _ban(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Overwrite the logits of banned tokens, `[rows, vocab_size]`, one draw per row."""
    for row, draw in enumerate(draws):
        if draw.banned:
            banned = [token for token in draw.banned if token < logits.shape[-1]]
            logits[row].index_fill_(0, to_device(banned, logits.device, torch.long), float("-inf"))


def filter_logits(
    logits: Tensor,  # [rows, vocab_size]
    params: Sequence[SamplingParams],
) -> Tensor:  # [rows, vocab_size], -inf where a filter removed the token
    """Apply temperature, top_k, top_p (over what top_k left) and min_p, row by row independent of the others.

    The most likely token always stays. Rows must not be greedy (temperature 0).
    """

    def column(values: list[float]) -> Tensor:
        return to_device(values, logits.device, logits.dtype).unsqueeze(-1)

    if logits.dtype.itemsize < torch.float32.itemsize:
        logits = logits.float()  # dividing and adding noise want more digits
    scaled = logits / column([p.temperature for p in params])
    if all(p.top_k == 0 and p.top_p >= 1 and p.min_p == 0 for p in params):
        return scaled
    # A stable sort keeps ties in id order, so which of two equal tokens a filter drops never varies.
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = to_device([[p.top_k or logits.shape[-1]] for p in params], logits.device)
    ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
    target_probs = ordered.softmax(dim=-1)
    before = target_probs.cumsum(dim=-1) - target_probs  # mass of the more likely tokens
    top_p = column([p.top_p for p in params])
    # The sum of all may round to 1 before its end: a row without this filter loses nothing.
    drop = (before >= top_p) & (top_p < 1)
    drop |= target_probs < target_probs[:, :1] * column([p.min_p for p in params])
    drop[:, 0] = False
    ordered = ordered.masked_fill(drop, float("-inf"))
    return torch.empty_like(scaled).scatter_(-1, ids, ordered)


def noise_of(draws: Sequence[Draw], scores: Tensor) -> Tensor:  # [rows, vocab_size] both
    """Return the noise of draws, of the dtype of their scores and on their device."""
    width = scores.shape[-1]
    if scores.device.type == "cpu":
        noise = torch.stack([gumbel_noise(draw.seed, draw.position, width) for draw in draws])
    else:
        noise = hashed_noise([(draw.seed, draw.position) for draw in draws], width, scores.device)
    return noise.to(scores)
