"""What the machine gives this process: device, dtype and threads.

Knows nothing about models.
"""

import os
from pathlib import Path

import torch

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def choose_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`.

    Raises:
        ValueError: `cuda` was asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("model.device is cuda, but torch sees no CUDA device (use cpu or auto)")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype; `auto` is float32 on the CPU and bfloat16 on a GPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]


def available_cores(quota_file: Path = _CGROUP_QUOTA) -> int:
    """Return the cores this process may really use: its affinity, cut by a container's quota.

    More threads than cores make every matmul slower; `os.cpu_count()` counts the host's.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()[:2]
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
