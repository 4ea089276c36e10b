"""Packed int8 and int4 weights with bfloat16 activations on the CPU: the exact grade (DESIGN §7).

torch's own kernels compute a row bit for bit the same whatever the number of rows, so a verify row equals the plain
one, and they read a quarter or an eighth of float32's bytes, which is what a single row costs. The same kernels serve
prefill. On x86 int8 is integer products instead (`worker.models.integer`). What is lost is precision of the weights:
docs/decisions-model.md has the figures.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.models import integer
from worker.models.integer import IntegerLinear, integer_bytes, pack_rows
from worker.models.linear import Linear, Phase

Packing = Literal["int8", "int4"]

GROUP = 32
"""Inputs that share an int4 scale and offset: the grouping of GGUF's Q4_0 and Q4_1, so their levels are met again."""
PADDED_ROWS = 16
"""The int4 kernel wants a multiple of so many output rows."""
REFINED = 64
"""Best tokens per row whose logits are computed anew in float32."""

# The overloads themselves: finding them would cost every call more than converting its rows.
_int8_product = torch.ops.aten._weight_int8pack_mm.default
_int4_product = torch.ops.aten._weight_int4pack_mm_for_cpu.default


class Int8Linear:
    """An int8 weight `[out_features, in_features]` with a bfloat16 scale per output row."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack a floating weight; it is not kept."""
        self.out_features, self.in_features = weight.shape
        # [out_features, in_features] int8, [out_features]
        self._packed, self._scales = pack_rows(weight, torch.bfloat16)
        self._bias = None if bias is None else bias.to(torch.bfloat16)  # [out_features]

    def __call__(self, x: Tensor, phase: Phase) -> Tensor:
        """See `Linear`; the result is bfloat16 whatever x is."""
        y: Tensor = _int8_product(x.bfloat16().contiguous(), self._packed, self._scales)
        return y if self._bias is None else y + self._bias


class Int4Linear:
    """An int4 weight `[out_features, in_features]`, scale and offset (bfloat16) for each `GROUP` inputs of a row."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack a floating weight whose in_features are a multiple of `GROUP`; it is not kept."""
        self.out_features, self.in_features = weight.shape
        weight = F.pad(weight.float(), (0, 0, 0, -self.out_features % PADDED_ROWS))
        levels, self._scales = pack_groups(
            weight
        )  # [in_features / GROUP, padded rows, 2]: scale, value of level 8
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        self._is_padded = len(weight) > self.out_features
        self._bias = None if bias is None else bias.to(torch.bfloat16)  # [out_features]

    def __call__(self, x: Tensor, phase: Phase) -> Tensor:
        """See `Linear`; the result is bfloat16 whatever x is."""
        y: Tensor = _int4_product(x.bfloat16().contiguous(), self._packed, GROUP, self._scales)
        if self._is_padded:
            y = y[:, : self.out_features]
        return y if self._bias is None else y + self._bias


class RefinedHead:
    """The output head. bfloat16 has 8 bits, so the best tokens would often tie: these get float32 logits.

    Their products are summed row by row, apart from the other rows, so the result stays independent of them.
    """

    def __init__(self, coarse: Linear, exact: Tensor) -> None:
        """Rank all tokens by `coarse`, the best of them by the rows of `exact` `[vocab_size, hidden_size]`."""
        self.out_features, self.in_features = coarse.out_features, coarse.in_features
        self._coarse = coarse
        self._exact = exact

    def __call__(self, x: Tensor, phase: Phase) -> Tensor:
        """See `Linear`; the result is float32."""
        logits = self._coarse(x, phase).float()  # [rows, vocab_size]
        best = logits.topk(min(REFINED, self.out_features), dim=-1).indices  # [rows, REFINED]
        weights = self._exact.index_select(0, best.flatten()).view(*best.shape, -1)
        return logits.scatter_(1, best, (weights * x.float().unsqueeze(1)).sum(dim=-1))


def is_integer(packing: Packing | None) -> bool:
    """Whether projections are integer products here (`worker.models.integer`)."""
    return packing == "int8" and integer.is_available()


def pack_linear(weight: Tensor, bias: Tensor | None, packing: Packing) -> Linear:
    """Pack a projection; inputs that do not fill int4's groups are kept in int8."""
    if is_integer(packing):
        return IntegerLinear(weight, bias)
    if packing == "int4" and weight.shape[1] % GROUP == 0:
        return Int4Linear(weight, bias)
    return Int8Linear(weight, bias)


def pack_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int4 levels 0…15 `[rows, in_features]` int32 and their meaning `[in_features / GROUP, rows, 2]` bfloat16.

    A weight is `(level - 8) * scale + offset`. Levels are taken between the least and the greatest weight of a group,
    so those of a Q4_1 weight come out as they were; scale and offset lose what bfloat16 cannot hold.
    """
    rows, in_features = weight.shape
    groups = weight.float().view(rows, in_features // GROUP, GROUP)
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    steps = (high - low) / 15
    levels = ((groups - low) / steps.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(0, 15)
    meaning = torch.cat((steps, low + 8 * steps), dim=2).transpose(0, 1)
    return levels.to(torch.int32).view(rows, in_features), meaning.to(torch.bfloat16).contiguous()


def packed_bytes(out_features: int, in_features: int, *, bias: bool, packing: Packing) -> int:
    """Return what `pack_linear` will take for these sizes."""
    offsets = 2 * out_features if bias else 0
    if is_integer(packing):
        return integer_bytes(out_features, in_features, bias=bias)
    if packing == "int4" and in_features % GROUP == 0:
        padded = out_features + -out_features % PADDED_ROWS
        return padded * (in_features // 2 + 4 * in_features // GROUP) + offsets
    return out_features * (in_features + 2) + offsets
