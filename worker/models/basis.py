"""Another basis for a decoder's residual stream, in which no channel stands out.

Language models keep a few channels many times larger than the rest, and steps of a row's largest number are too coarse
for all others then. Norms without weight and sums do not care for the basis, so the stream is turned by an orthogonal
matrix Q once, on the way in, and back on the way out, and the weights between are made for it (QuaRot, arXiv
2404.00456). Turning at run time is integer products of 14 bits or more: rows stay bit for bit independent. Knows
nothing about layers.
"""

from functools import lru_cache

import torch
from torch import Tensor

from worker.models.integer import ROWS_AT_ONCE, IntegerLinear, integer_bytes, pack_rows

LARGEST_BLOCK = 1024
"""Channels that are mixed with one another. More would spread outliers wider still (with 4096 channels, one of them 400
times the others, a row's error falls from 7 to 4.5 %), but a matrix of their square has to be made at start."""

LEAST_BLOCK = 256
"""Mixing fewer would leave outliers what they are."""


@lru_cache(maxsize=8)
def orthogonal(size: int) -> Tensor:  # [size, size] float64
    """Return Q, the same in every process up to float64's last bits."""
    normal = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q: Tensor = torch.linalg.qr(normal).Q
    return q


class Basis:
    """The turn of a stream `hidden_size` wide: the same Q for every block of channels.

    Weights are turned in float64, so that their int8 levels do not depend on the number of threads that did it.
    """

    def __init__(self, hidden_size: int) -> None:
        self._block = _block(hidden_size)
        self._q = orthogonal(self._block)
        self._enter, self._leave = _precise(self._q.t()), _precise(self._q)

    def reading(self, weight: Tensor, norm: Tensor) -> Tensor:
        """Return a weight `[out, hidden_size]` that reads the turned stream behind a norm whose weight it takes in."""
        norm, read = norm.double(), torch.empty(weight.shape, dtype=torch.float64)
        for first in range(0, len(weight), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            read[rows] = ((weight[rows] * norm).view(-1, self._block) @ self._q).view(-1, len(norm))
        return read

    def writing(self, weight: Tensor) -> Tensor:
        """Return a weight `[hidden_size, in]`, or a bias `[hidden_size]`, that adds to the turned stream."""
        blocks = weight.double().reshape(-1, self._block, weight[0].numel())
        return (self._q.t() @ blocks).view(weight.shape)

    def enter(self, x: Tensor) -> Tensor:
        """Turn rows `[rows, hidden_size]` → float32."""
        return self._turned(x, self._enter)

    def leave(self, x: Tensor) -> Tensor:
        """Turn rows `[rows, hidden_size]` back → float32."""
        return self._turned(x, self._leave)

    def _turned(self, x: Tensor, turn: IntegerLinear) -> Tensor:
        coarse, fine = turn(x.reshape(-1, self._block), "decode").chunk(2, dim=1)
        return (coarse + fine).view(x.shape)


def _block(hidden_size: int) -> int:
    block = next(n for n in range(min(hidden_size, LARGEST_BLOCK), 0, -1) if hidden_size % n == 0)
    return block if block >= LEAST_BLOCK else hidden_size  # as for 1061, a prime


def basis_bytes(hidden_size: int) -> int:
    """Return what a `Basis` takes."""
    block = _block(hidden_size)
    return 8 * block * block + 2 * integer_bytes(2 * block, block, bias=False)


def _precise(matrix: Tensor) -> IntegerLinear:
    """Pack a square matrix as the sum of two: int8 levels, and those of what they leave."""
    levels, scales = pack_rows(matrix, torch.float32)
    coarse = levels.float() * scales.unsqueeze(1)
    return IntegerLinear(torch.cat((coarse, matrix - coarse)))
