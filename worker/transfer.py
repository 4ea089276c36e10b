"""The way of small data from the host to the device: queued, never waited for.

A plain copy from pageable memory makes the host wait until the device has caught up. Knows nothing about what it
copies.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(
    values: Sequence[Any] | Tensor,  # numbers, nested to any depth, or a tensor in host memory
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `values` as a tensor on `device`; what is used there next waits for the copy, the host does not."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    # The caching host allocator keeps a pinned block until the copy out of it is done.
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
