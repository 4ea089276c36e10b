"""Projections by integer products on the CPU: int8 weights, activations in whole steps of their row's largest.

Sums of integers are exact in any order, so a row is bit for bit the same whatever comes with it (the exact grade,
DESIGN §7), and the kernel (FBGEMM, torch's own on x86) is free to block rows as it likes: eight rows take little longer
than one. Pairs of products must fit 16 bits on machines without VNNI: activations have 64 steps to either side of zero
there, and 127 elsewhere.

Behind a norm, where inputs have no outliers (`worker.models.basis`), one product of these steps is enough. Elsewhere
two products, of steps and of fractions of a step, give twice the bits; both are rows of one call, which reads the
weight once. Knows nothing about what the layer is for.
"""

import warnings

import torch
from torch import Tensor

from worker.models.linear import Phase, is_vectorised
from worker.models.norm import number

STEPS = 127 if torch.cpu._is_vnni_supported() else 64
"""Activations become -STEPS…STEPS, stored from 0 on. Of 64, 2 · 128 · 127 still fits the 16-bit pairs of AVX2."""
FINE = 2 * STEPS
"""Parts of a step that the second product counts: half a step to either side, stored in the same range."""
LEVELS = 127
LEAST = 1e-30
"""Stands for the largest number of a row of zeros."""
KERNEL_BLOCK = 512
"""The kernel keeps inputs in blocks of so many, the last one filled up."""
ROWS_AT_ONCE = 4096
"""Weights are made ready in parts, so that loading takes little more memory than what it leaves."""

# The overload itself: finding it would cost every call more than several of its small operations.
_integer_product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default


def is_available() -> bool:
    """Whether torch has the kernel here, vectorised."""
    return is_vectorised() and "fbgemm" in torch.backends.quantized.supported_engines


class IntegerLinear:
    """An int8 weight `[out_features, in_features]` with a float32 scale per output row."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, norm_eps: float | None = None) -> None:
        """Pack a floating weight; it is not kept.

        Given `norm_eps`, rows go through an RMSNorm without weight first. It only scales them, so it is applied to the
        result, and they are multiplied in whole steps alone.
        """
        self.out_features, self.in_features = weight.shape
        self._norm_eps = norm_eps
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
        largest = x.abs().amax(dim=1, keepdim=True).add_(number(LEAST))  # [rows, 1]
        if self._norm_eps is None:
            y = self._wide(x / largest).mul_(largest)
        else:
            y = self._product(x / largest, 1 / STEPS).mul_(largest.mul_(self._norm_scales(x, self._norm_eps)))
        return y if self._bias is None else y.add_(self._bias)

    def _norm_scales(self, x: Tensor, eps: float) -> Tensor:  # [rows, 1]
        lengths = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        least = number(self.in_features * eps)
        return torch.addcmul(least, lengths, lengths).mul_(number(1 / self.in_features)).rsqrt_()

    def _wide(self, shares: Tensor) -> Tensor:  # [rows, in_features], each row's largest is 1
        rows = len(shares)
        both = shares.new_empty(2 * rows, self.in_features)
        whole, left = both[:rows], both[rows:]
        steps = shares.mul_(number(STEPS))
        torch.round(steps, out=whole)
        torch.sub(steps, whole, out=left).mul_(number(FINE))
        y = self._product(both, 1.0)
        return torch.add(y[:rows], y[rows:], alpha=1 / FINE).mul_(number(1 / STEPS))

    def _product(self, x: Tensor, unit: float) -> Tensor:
        """Round to whole multiples of `unit` and multiply → float32."""
        y: Tensor = _integer_product(x, unit, STEPS, self._packed)
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
