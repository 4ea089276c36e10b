"""Linear layers by storage: which kernel computes `x @ weight.T (+ bias)`.

The kernel is a property of the layer and of the phase. Knows nothing about what the layer is for.
"""

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Phase = Literal["prefill", "decode"]


class Linear(Protocol):
    """One projection, whatever its storage."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor, phase: Phase) -> Tensor:
        """Project `x` `[rows, in_features]` → `[rows, out_features]`, of x's dtype."""


class DenseLinear:
    """An unpacked weight `[out_features, in_features]`, any floating dtype, any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight.contiguous()  # [out_features, in_features]
        self._bias = bias  # [out_features]

    def __call__(self, x: Tensor, phase: Phase) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self._weight, self._bias)


def make_linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Linear:
    """Place a weight `[out_features, in_features]` and its bias on a device and choose its kernel."""
    placed_bias = None if bias is None else bias.to(device, dtype)
    return DenseLinear(weight.to(device, dtype), placed_bias)
