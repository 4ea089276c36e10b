"""Packed int8 weights with bfloat16 activations on the CPU: the exact grade (DESIGN §7).

torch's own kernel computes a row bit for bit the same whatever the number of rows, so a verify row equals the plain
one, and it reads a quarter of float32's bytes, which is what a single row costs. The same kernel serves prefill. What
is lost is precision of the weights: symmetric, one scale per output row; docs/decisions-model.md has the figures.
"""

import torch
from torch import Tensor

from worker.models.linear import Phase

LEVELS = 127
REFINED = 64
"""Best tokens per row whose logits are computed anew in float32."""


class Int8Linear:
    """An int8 weight `[out_features, in_features]` with a bfloat16 scale per output row."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack a floating weight; it is not kept."""
        self.out_features, self.in_features = weight.shape
        self._packed, self._scales = pack_rows(weight)  # [out_features, in_features] int8, [out_features]
        self._bias = None if bias is None else bias.to(torch.bfloat16)  # [out_features]

    def __call__(self, x: Tensor, phase: Phase) -> Tensor:
        """See `Linear`; the result is bfloat16 whatever x is."""
        x = x.to(torch.bfloat16).contiguous()
        y: Tensor = torch.ops.aten._weight_int8pack_mm(x, self._packed, self._scales)
        return y if self._bias is None else y + self._bias


class Int8Head(Int8Linear):
    """The output head. bfloat16 has 8 bits, so the best tokens would often tie: these get float32 logits.

    Their products are summed row by row, apart from the other rows, so the result stays independent of them.
    """

    def __call__(self, x: Tensor, phase: Phase) -> Tensor:
        """See `Linear`; the result is float32."""
        logits = super().__call__(x, phase).float()  # [rows, vocab_size]
        best = logits.topk(min(REFINED, self.out_features), dim=-1).indices  # [rows, REFINED]
        weights = self._packed[best].float() * self._scales[best].float().unsqueeze(-1)
        exact = (weights * x.float().unsqueeze(1)).sum(dim=-1)
        return logits.scatter_(1, best, exact if self._bias is None else exact + self._bias[best])


def pack_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 levels and the bfloat16 scale of each row; levels are chosen for the scale as it is stored."""
    weight = weight.float()
    scales = (weight.abs().amax(dim=1) / LEVELS).to(torch.bfloat16)
    steps = scales.float().clamp(min=torch.finfo(torch.bfloat16).tiny).unsqueeze(1)
    # A scale that was rounded down would push the largest weight past the last level.
    levels = (weight / steps).round().clamp(-LEVELS, LEVELS).to(torch.int8)
    return levels.contiguous(), scales


def packed_bytes(out_features: int, in_features: int, *, bias: bool) -> int:
    """Return what an `Int8Linear` of these sizes takes."""
    return out_features * (in_features + 2 + (2 if bias else 0))
