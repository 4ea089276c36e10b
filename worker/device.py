"""What the machine gives this process: device, dtype and threads.

Knows nothing about models.
"""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from worker.models.linear import is_vectorised
from worker.models.packed import Packing

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CPU = Path("/proc/cpuinfo")


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


class Precision(NamedTuple):
    """How numbers are kept: `name` as configured, the dtype of caches and attention, and how weights are packed."""

    name: str
    dtype: torch.dtype
    packing: Packing | None


def choose_precision(name: str, device: torch.device) -> Precision:
    """Return the precision; `auto` is bfloat16 on a GPU, int4 on a CPU whose kernels for it are fast, else float32.

    Raises:
        ValueError: int8 or int4 on a GPU: the packed kernels are the CPU's.
    """
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "int4" if is_vectorised() else "float32"
    packing: Packing | None = "int8" if name == "int8" else "int4" if name == "int4" else None
    if packing and device.type != "cpu":
        raise ValueError(f"model.dtype {name} runs on the CPU only (use bfloat16 or auto)")
    return Precision(name, _DTYPES[name], packing)


def cpu_name(cpu_file: Path = _CPU) -> str:
    """Return the processor's name and what torch uses of it; where the system does not tell, only the latter."""
    lines = cpu_file.read_text(encoding="utf-8", errors="replace").splitlines() if cpu_file.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, '')} {torch.backends.cpu.get_cpu_capability()}".strip()


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
