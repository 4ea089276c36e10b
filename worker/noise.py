"""Gumbel noise as a function of (seed, absolute position) alone, by a generator that suits the device.

On a CPU torch's own generator is the quickest, seeded anew for every row. On a GPU that would draw a vocabulary of
numbers per row on the host; there each number is hashed from its key and its token (SplitMix64), all rows at once. So a
seed gives the same text on the same sort of device only, which different arithmetic would not promise either.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.transfer import to_device

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Tensor:  # [vocab_size] float32, on the CPU
    """Return standard Gumbel noise of one row, as a CPU draws it."""
    generator = torch.Generator().manual_seed(_key(seed, position))
    return torch.empty(vocab_size).exponential_(generator=generator).log_().neg_()


def hashed_noise(
    places: Sequence[tuple[int, int]],  # (seed, position) of each row
    vocab_size: int,
    device: torch.device,
) -> Tensor:  # [rows, vocab_size] float32
    """Return standard Gumbel noise of many rows, as a GPU draws it; each row's depends on its own place only."""
    keys = to_device([_signed(_key(*place)) for place in places], device, torch.int64).unsqueeze(-1)
    # int64 products and sums wrap around, which is what the hash wants.
    value = keys + torch.arange(1, vocab_size + 1, device=device) * _signed(_GOLDEN)
    value = (value ^ _shifted(value, 30)) * _signed(_MULTIPLIERS[0])
    value = (value ^ _shifted(value, 27)) * _signed(_MULTIPLIERS[1])
    value = _shifted(value ^ _shifted(value, 31), 11)  # 53 bits, evenly spread
    uniform = (value.double() + 0.5) * 2.0**-53  # never 0 and never 1
    return (-torch.log1p(-uniform)).log_().neg_().float()


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros: torch's own shift keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _key(seed: int, position: int) -> int:
    """Hash (seed, position) to 64 bits (the SplitMix64 finalizer), so that neighbouring pairs are unrelated."""
    value = (seed * _GOLDEN + position * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & _MASK_64
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _MASK_64
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _MASK_64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned number."""
    return value - (1 << 64) if value >> 63 else value
