"""Rotary position embeddings: tables of cosines and sines by absolute position.

Two layouts of a head: *halves* (dimension i pairs with i + head_dim // 2, as checkpoints have it) and *pairs*
(neighbours pair, so that a turn is one complex product). Knows frequencies and their scaling (`default`, `linear`,
`llama3`); knows nothing about caches.
"""

import math

import torch
from torch import Tensor

from worker.models.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return the angular step per position of each pair of dimensions, `[head_dim // 2]` float64.

    `llama3` (Llama 3.1): wavelengths above `original / low_freq_factor` are stretched by `factor`, those below
    `original / high_freq_factor` are kept, those between are blended linearly.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = config.theta**-exponents
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
        blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        blend = blend.clamp(0, 1)
        return frequencies * (blend + (1 - blend) / config.factor)
    return frequencies


class RotaryTable:
    """For the layout of halves: cosines and signed sines for positions `0 … num_positions - 1`, grown on demand."""

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(config, head_dim)  # [head_dim // 2]
        self._dtype = dtype
        self._device = device
        self._cosines = self._sines = torch.empty(0, 1, 2, head_dim // 2, dtype=dtype, device=device)

    def reserve(self, num_positions: int) -> None:
        """Compute the tables up to a length, if they are not there yet."""
        if num_positions <= self._cosines.shape[0]:
            return
        positions = torch.arange(num_positions, dtype=torch.float64)
        angles = positions[:, None] * self._frequencies  # [num_positions, head_dim // 2]
        cosines, sines = angles.cos(), angles.sin()
        stacked_cosines = torch.stack((cosines, cosines), dim=1)[
            :, None
        ]  # [num_positions, 1, 2, head_dim // 2]
        stacked_sines = torch.stack((-sines, sines), dim=1)[:, None]  # same shape
        self._cosines = stacked_cosines.to(self._device, self._dtype)
        self._sines = stacked_sines.to(self._device, self._dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cosines, signed sines) of `positions` `[rows]`, each `[rows, 1, 2, head_dim // 2]`."""
        return self._cosines.index_select(0, positions), self._sines.index_select(0, positions)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate every head: `x` `[rows, heads, head_dim]` → the same shape.

    Dimension i pairs with i + head_dim // 2 (the Hugging Face layout): out = x·cos + swap(x)·(−sin, +sin).
    """
    rows, heads, head_dim = x.shape
    halves = x.view(rows, heads, 2, head_dim // 2)
    return torch.addcmul(halves * cosines, halves.flip(2), sines).view(rows, heads, head_dim)


# ---- the layout of pairs ----


class TurnTable:
    """For the layout of pairs: `cos + i·sin` for positions `0 … num_positions - 1`, grown on demand."""

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make an empty table; a float64 model turns in double precision, all others in single."""
        self._frequencies = inverse_frequencies(config, head_dim)  # [head_dim // 2]
        self._dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
        self._device = device
        self._turns = torch.empty(0, head_dim // 2, dtype=self._dtype, device=device)

    def reserve(self, num_positions: int) -> None:
        """Compute the table up to a length, if it is not there yet."""
        if num_positions > self._turns.shape[0]:
            positions = torch.arange(num_positions, dtype=torch.float64)
            angles = positions[:, None] * self._frequencies  # [num_positions, head_dim // 2]
            self._turns = torch.polar(torch.ones_like(angles), angles).to(self._device, self._dtype)

    def at(self, positions: Tensor, num_turning: int, num_heads: int) -> Tensor:
        """Return the turns of all heads at `positions` `[rows]` → `[rows, num_heads, head_dim // 2]`.

        The heads from `num_turning` on (values) stay as they are: their turn is 1.
        """
        rows, pairs = len(positions), self._turns.shape[1]
        turns = torch.ones(rows, num_heads, pairs, dtype=self._dtype, device=self._device)
        turns[:, :num_turning] = self._turns.index_select(0, positions).unsqueeze(1)
        return turns


def turn(heads: Tensor, turns: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn `heads` `[rows, num_heads, head_dim]` in pairs, in the precision of `turns` → the same shape in `dtype`."""
    pairs = heads.to(turns.dtype.to_real()).contiguous().view(*turns.shape, 2)
    turned = torch.view_as_real(torch.view_as_complex(pairs) * turns)
    return turned.to(dtype).view(heads.shape)


def pair_up(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder rows `[num_heads * head_dim, …]` of a projection from halves to pairs (0, half, 1, half + 1, …)."""
    head_dim = weight.shape[0] // num_heads
    halves = weight.view(num_heads, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
