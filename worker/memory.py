"""What a worker's models and caches will take, told and checked before anything is loaded.

KV memory is given out by the system when it is first written, so a cache that does not fit would be noticed under load
only. The draft counts like the target: its weights and its cache. Knows nothing about the configuration's fields but
the one bound that it names.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from worker.kv_cache import kv_cache_bytes
from worker.models.config import DecoderConfig
from worker.models.packed import Packing
from worker.models.sizes import decoder_bytes

LOGITS_COPIES = 10
"""Arrays of the logits' size that drawing with every filter holds at once."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class MemoryTooSmall(ValueError):
    """Models and caches do not fit; the message has the whole budget."""


class Placed(NamedTuple):
    """One model and the size of its cache."""

    config: DecoderConfig
    num_slots: int
    max_tokens: int


class PlacedHead(NamedTuple):
    """A draft head, its one layer's cache, and the target's features that it reads."""

    num_weights: int
    num_slots: int
    max_tokens: int
    numbers_per_token: int
    """Keys, values and features."""


class MemoryBudget(NamedTuple):
    """Bytes by use."""

    target_weights: int
    target_kv: int
    draft_weights: int
    draft_kv: int
    working: int
    """Estimate: logits of one round and activations of one step."""

    @property
    def total(self) -> int:
        """Everything."""
        return sum(self)

    @property
    def kv(self) -> int:
        """Both KV caches."""
        return self.target_kv + self.draft_kv

    def __str__(self) -> str:
        parts = (f"{name.replace('_', ' ')} {_size(bytes_)}" for name, bytes_ in self._asdict().items())
        return f"{', '.join(parts)}: {_size(self.total)} in all"


def plan_memory(
    target: Placed,
    draft: Placed | PlacedHead | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    verify_rows: int,
    step_rows: int,
    packing: Packing | None = None,
) -> MemoryBudget:
    """Work out what will be taken.

    Args:
        target: the target and its cache.
        draft: the draft model or head and what it keeps, if there is one; a head's weights are an upper bound.
        dtype: of weights, caches and activations.
        device: where they go.
        verify_rows: rows with logits in the largest round.
        step_rows: rows of the largest step.
        packing: how weights are packed.
    """
    if isinstance(draft, PlacedHead):
        wide = torch.float32.itemsize if packing else dtype.itemsize
        draft_weights = draft.num_weights * wide
        draft_kv = draft.num_slots * draft.max_tokens * draft.numbers_per_token * dtype.itemsize
    else:
        draft_weights = decoder_bytes(draft.config, dtype, device, packing=packing) if draft else 0
        draft_kv = _kv_bytes(draft, dtype) if draft else 0
    return MemoryBudget(
        target_weights=decoder_bytes(target.config, dtype, device, packing=packing),
        target_kv=_kv_bytes(target, dtype),
        draft_weights=draft_weights,
        draft_kv=draft_kv,
        # logits are float32 at least
        working=_working_bytes(
            target.config, torch.promote_types(dtype, torch.float32), verify_rows, step_rows
        ),
    )


def check_budget(budget: MemoryBudget, *, max_kv_bytes: int, available: int | None) -> None:
    """Refuse a budget that does not fit.

    Args:
        budget: what will be taken.
        max_kv_bytes: bound of both KV caches together; 0: none.
        available: bytes that can be had; None: unknown, not checked.

    Raises:
        MemoryTooSmall: naming the bound, and the budget.
    """
    advice = "lower engine.max_running_requests or engine.max_context_tokens"
    if max_kv_bytes and budget.kv > max_kv_bytes:
        raise MemoryTooSmall(
            f"engine.max_kv_bytes {max_kv_bytes} ({_size(max_kv_bytes)}) is below the KV caches' {budget.kv} "
            f"({_size(budget.kv)}): {budget}; {advice}"
        )
    if available is not None and budget.total > available:
        raise MemoryTooSmall(f"{_size(available)} of memory can be had, not enough for {budget}; {advice}")


def available_bytes(device: torch.device, *, meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the memory that can still be had on a device: the machine's, cut by a container's limit.

    None where nothing tells.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    bounds = [bound for bound in (_machine_bytes(meminfo), _container_bytes(cgroup)) if bound is not None]
    return min(bounds, default=None)


def _kv_bytes(placed: Placed, dtype: torch.dtype) -> int:
    config = placed.config
    return kv_cache_bytes(
        num_layers=config.num_layers,
        num_slots=placed.num_slots,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_tokens=placed.max_tokens,
        dtype=dtype,
    )


def _working_bytes(config: DecoderConfig, dtype: torch.dtype, verify_rows: int, step_rows: int) -> int:
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    row = 4 * config.hidden_size + 3 * config.intermediate_size + heads
    return dtype.itemsize * (LOGITS_COPIES * verify_rows * config.vocab_size + step_rows * row)


def _machine_bytes(meminfo: Path) -> int | None:
    """Return what Linux says a new process can have without swapping."""
    try:
        lines = meminfo.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _container_bytes(cgroup: Path) -> int | None:
    """Return what a cgroup's limit (version 2, else 1) leaves; page cache that can be dropped counts as free."""
    for limit_name, usage_name, stat_name in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            limit = (cgroup / limit_name).read_text().strip()
            if limit == "max":
                return None
            used = int((cgroup / usage_name).read_text())
            droppable = _droppable((cgroup / stat_name).read_text().splitlines())
            return max(0, int(limit) - used + droppable)
        except (OSError, ValueError):
            continue
    return None


def _droppable(lines: Sequence[str]) -> int:
    pairs = [line.split() for line in lines]
    return sum(int(pair[1]) for pair in pairs if pair[:1] in (["inactive_file"], ["active_file"]))


def _size(bytes_: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if bytes_ >= scale:
            return f"{bytes_ / scale:.3g} {unit}"
    return f"{bytes_} B"
