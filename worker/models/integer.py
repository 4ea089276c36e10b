"""Projections by integer products on the CPU: int8 weights, activations in whole steps of their row's largest.

Sums of integers are exact in any order, so a row is bit for bit the same whatever comes with it (the exact grade,
DESIGN §7), and the kernel (FBGEMM, torch's own on x86) is free to block rows as it likes: eight rows take little longer
than one. Pairs of products must fit 16 bits on machines without VNNI: activations have 64 steps to either side of zero.

`narrow` is one product of these 7 bits, for inputs without outliers (`worker.models.basis`). Without it two products,
of steps and of 128ths of a step, give 14 bits; both are rows of one call, which reads the weight once. Knows nothing
about what the layer is for.
"""

import warnings

import torch
from torch import Tensor

from worker.models.linear import Phase, is_vectorised

STEPS = 64
"""Activations become -64…64, stored as 0…128: 2 · 128 · 127 still fits the kernel's 16-bit pairs (FBGEMM on AVX2)."""
FINE = 128
LEVELS = 127
LEAST = 1e-30
"""Stands for the largest number of a row of zeros."""
KERNEL_BLOCK = 512
"""The kernel keeps inputs in blocks of so many, the last one filled up."""
ROWS_AT_ONCE = 4096
"""Weights are made ready in parts, so that loading takes little more memory than what it leaves."""


def is_available() -> bool:
    """Whether torch has the kernel here, vectorised."""
    return is_vectorised() and "fbgemm" in torch.backends.quantized.supported_engines


class IntegerLinear:
    """An int8 weight `[out_features, in_features]` with a float32 scale per output row."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, narrow: bool = False) -> None:
        """Pack a floating weight; it is not kept."""
        self.out_features, self.in_features = weight.shape
        self._is_narrow = narrow
        levels, scales = pack_rows(weight, torch.float32)
        zeros = torch.zeros(self.out_features, dtype=torch.long)
        with warnings.catch_warnings():
            # Quantised tensors will go some day (pytorch 184982); torch is pinned, and `onednn::qlinear_pointwise`
            # would give the same integers, on AVX2 at half the speed.
            warnings.simplefilter("ignore", UserWarning)
            quantised = torch._make_per_channel_quantized_tensor(levels, scales.double(), zeros, 0)
        self._packed = torch.ops.quantized.linear_prepack(quantised, None)
        self._bias = None if bias is None else bias.float()  # [out_features]

    def __call__(self, x: Tensor, phase: Phase) -> Tensor:
        """See `Linear`; the result is float32 whatever x is."""
        x = x.float()
        units = x.abs().amax(dim=1, keepdim=True).clamp_(min=LEAST).mul_(1 / STEPS)  # [rows, 1]
        steps = x / units
        y = (self._product(steps) if self._is_narrow else self._wide(steps)).mul_(units)
        return y if self._bias is None else y.add_(self._bias)

    def _wide(self, steps: Tensor) -> Tensor:
        whole = steps.round()
        left = steps.sub_(whole).mul_(FINE)
        coarse, fine = self._product(torch.cat((whole, left))).chunk(2)
        return torch.add(coarse, fine, alpha=1 / FINE)

    def _product(self, steps: Tensor) -> Tensor:
        """Round to whole steps and multiply → float32."""
        y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            steps, 1.0, STEPS, self._packed
        )
        return y


def pack_rows(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return int8 levels `[rows, columns]` and each row's scale; levels are chosen for the scale as it is stored."""
    parts = [_levels(part, scale_dtype) for part in torch.split(weight, ROWS_AT_ONCE)]
    return torch.cat([levels for levels, _ in parts]), torch.cat([scales for _, scales in parts])


def _levels(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    scales = (weight.abs().amax(dim=1) / LEVELS).clamp(min=LEAST).to(scale_dtype)
    # A scale that was rounded down would push the largest weight past the last level.
    levels = (weight / scales.unsqueeze(1)).round().clamp(-LEVELS, LEVELS).to(torch.int8)
    return levels, scales


def integer_bytes(out_features: int, in_features: int, *, bias: bool) -> int:
    """Return about what `IntegerLinear` takes: whole blocks of levels, and scale, zero point and sum of each row."""
    levels = in_features + -in_features % KERNEL_BLOCK
    return out_features * (levels + 12 + (4 if bias else 0))
