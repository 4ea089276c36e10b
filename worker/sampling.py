"""Drawing tokens: one rule for plain decoding, verify and drafters (DESIGN §7).

A token is drawn from the filtered target distribution with noise that depends only on (seed, absolute position):
Gumbel-max with counter-based noise; greedy is the same without noise. So neither the batch, nor the depth, nor
what was drawn before changes a request's tokens. Knows nothing about requests' text, drafts or KV.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.request import Request, SamplingParams

_MASK_64 = (1 << 64) - 1


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
) -> Tensor:  # [rows] int64
    """Draw one token per row; a row with NaN in its logits gives -1.

    Ties go to the lowest id, in every mode. Logits of banned tokens are overwritten in place.
    """
    _ban(logits, draws)
    values, tokens = logits.max(dim=-1)
    sampled = [row for row, draw in enumerate(draws) if not draw.params.is_greedy]
    if sampled:
        index = torch.tensor(sampled, device=logits.device)
        chosen = [draws[row] for row in sampled]
        scores = filter_logits(logits[index], [draw.params for draw in chosen])
        noise = torch.stack([gumbel_noise(draw.seed, draw.position, logits.shape[-1]) for draw in chosen])
        tokens[index] = (scores + noise.to(scores)).argmax(dim=-1)
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
            noise = gumbel_noise(draw.seed, draw.position, logits.shape[-1])
            places.copy_(filter_logits(places, [draw.params] * len(places)) + noise.to(places))
    probs, tokens = scores.softmax(dim=-1).topk(count, dim=-1)
    is_broken = logits.isnan().any(dim=-1, keepdim=True)
    return tokens.masked_fill(is_broken, -1), probs.masked_fill(is_broken, 0.0)


def _ban(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Overwrite the logits of banned tokens, `[rows, vocab_size]`, one draw per row."""
    for row, draw in enumerate(draws):
        if draw.banned:
            logits[row, [token for token in draw.banned if token < logits.shape[-1]]] = float("-inf")


def filter_logits(
    logits: Tensor,  # [rows, vocab_size]
    params: Sequence[SamplingParams],
) -> Tensor:  # [rows, vocab_size], -inf where a filter removed the token
    """Apply temperature, top_k, top_p (over what top_k left) and min_p, row by row independent of the others.

    The most likely token always stays. Rows must not be greedy (temperature 0).
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device, dtype=logits.dtype).unsqueeze(-1)

    scaled = logits / column([p.temperature for p in params])
    if all(p.top_k == 0 and p.top_p >= 1 and p.min_p == 0 for p in params):
        return scaled
    # A stable sort keeps ties in id order, so which of two equal tokens a filter drops never varies.
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = torch.tensor([[p.top_k or logits.shape[-1]] for p in params], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
    target_probs = ordered.softmax(dim=-1)
    before = target_probs.cumsum(dim=-1) - target_probs  # mass of the more likely tokens
    drop = before >= column([p.top_p for p in params])
    drop |= target_probs < target_probs[:, :1] * column([p.min_p for p in params])
    drop[:, 0] = False
    ordered = ordered.masked_fill(drop, float("-inf"))
    return torch.empty_like(scaled).scatter_(-1, ids, ordered)


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Tensor:  # [vocab_size] float32, on the CPU
    """Return standard Gumbel noise that is a function of (seed, position) alone, the same on every device."""
    generator = torch.Generator().manual_seed(_mix(seed, position))
    return torch.empty(vocab_size).exponential_(generator=generator).log_().neg_()


def _mix(seed: int, position: int) -> int:
    """Hash (seed, position) to 64 bits (the SplitMix64 finalizer), so that neighbouring pairs are unrelated."""
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
