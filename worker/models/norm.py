"""RMSNorm of rows. Knows nothing about where in a model it stands."""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_OPS_DTYPES = (torch.float32, torch.float64)


@lru_cache
def number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:  # []
    """Return a number as a tensor: to a few rows a Python number costs more than its arithmetic."""
    return torch.tensor(value, dtype=dtype)


class RmsNorm:
    """`x / sqrt(mean(x²) + eps) * weight`, of each row by itself.

    On the CPU torch's own is a chain of ten small operations, a tenth of a plain decoding step. There four do:
    with n numbers in a row it is `x / sqrt(|x|² + n·eps) * (weight·sqrt(n))`.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Take a weight `[width]` as it is placed; half-precision ones keep torch's own, which sums in float32."""
        self._width = weight.shape[0]
        self._eps = eps
        self._is_few_ops = weight.device.type == "cpu" and weight.dtype in _FEW_OPS_DTYPES
        self._weight = weight * math.sqrt(self._width) if self._is_few_ops else weight  # [width]

    def __call__(self, x: Tensor) -> Tensor:
        """Norm `x` `[rows, width]` → the same shape."""
        if not self._is_few_ops:
            return F.rms_norm(x, (self._width,), self._weight, self._eps)
        lengths: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True)  # [rows, 1]
        scales = torch.addcmul(number(self._width * self._eps, x.dtype), lengths, lengths).rsqrt_()
        return (x * scales).mul_(self._weight)
