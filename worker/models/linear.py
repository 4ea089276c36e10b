"""Linear layers by storage: which kernel computes `x @ weight.T (+ bias)`.

The kernel is a property of the layer and of the phase. Knows nothing about what the layer is for.
"""

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Phase = Literal["prefill", "decode"]

FAST_ROWS = 4
"""From this many rows on MKL's float32 kernel is at its best on AVX2; 3 rows take longer than 4."""


FAST_CAPABILITIES = ("AVX2", "AVX512")


def is_vectorised() -> bool:
    """Whether torch's kernels for packed weights are vectorised here: elsewhere they are slower than float32."""
    return torch.backends.cpu.get_cpu_capability() in FAST_CAPABILITIES


class Linear(Protocol):
    """One projection, whatever its storage."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor, phase: Phase) -> Tensor:
        """Project `x` `[rows, in_features]` → `[rows, out_features]`; packed layers give a dtype of their own."""


class DenseLinear:
    """An unpacked weight `[out_features, in_features]`, any floating dtype, any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight.contiguous()  # [out_features, in_features]
        self._bias = bias  # [out_features]

    def __call__(self, x: Tensor, phase: Phase) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self._weight, self._bias)


class CpuFloat32Linear:
    """A float32 weight on the CPU, where the time of a few rows decides whether verifying drafts pays.

    MKL does best with the weight as the left factor, so several rows go through `(weight @ x.T).T`, and it is slow at
    2 and 3 rows, so they are padded. One row is bound by memory; there a wide weight is read faster in the other
    layout, so a second copy of it is kept. Choosing by row count is allowed here because float32 products differ
    between one row and several anyway (design §7: ids equal up to near-ties).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight.contiguous()  # [out_features, in_features]
        kept_twice = _is_wide(self.out_features, self.in_features)
        # [in_features, out_features]
        self._transposed = self._weight.t().contiguous() if kept_twice else None
        self._bias = bias  # [out_features]

    def __call__(self, x: Tensor, phase: Phase) -> Tensor:
        """See `Linear`. With several rows the result is not contiguous: its rows are the fast dimension."""
        rows = x.shape[0]
        if rows == 1:
            y = F.linear(x, self._weight) if self._transposed is None else x @ self._transposed
        else:
            padded = F.pad(x, (0, 0, 0, FAST_ROWS - rows)) if rows < FAST_ROWS else x
            y = (self._weight @ padded.t()).t()[:rows]
        return y if self._bias is None else y + self._bias


def _is_wide(out_features: int, in_features: int) -> bool:
    return out_features > in_features


def _is_cpu_float32(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype == torch.float32


def make_linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Linear:
    """Place a weight `[out_features, in_features]` and its bias on a device and choose its kernel."""
    weight = weight.to(device, dtype)
    bias = None if bias is None else bias.to(device, dtype)
    if _is_cpu_float32(dtype, device):
        return CpuFloat32Linear(weight, bias)
    return DenseLinear(weight, bias)


def linear_bytes(
    out_features: int, in_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
) -> int:
    """Return what `make_linear` will take for these sizes."""
    copies = 2 if _is_cpu_float32(dtype, device) and _is_wide(out_features, in_features) else 1
    return dtype.itemsize * (copies * out_features * in_features + (out_features if bias else 0))
