import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.memory import (
    MemoryBudget,
    MemoryTooSmall,
    Placed,
    available_bytes,
    check_budget,
    plan_memory,
)
from worker.models.config import read_config
from worker.models.decoder import Decoder
from worker.models.loader import load_decoder

CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "bias": {"bias": True},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 16},
    "narrow-vocabulary": {"vocab_size": 16, "tied": True},
}
BUDGET = MemoryBudget(target_weights=1000, target_kv=300, draft_weights=500, draft_kv=200, working=50)


def reachable_bytes(decoder: Decoder) -> int:
    """Bytes of all tensors that the weights hold, shared storage once."""
    storages: dict[int, int] = {}
    stack: list[Any] = [decoder._weights]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, list | tuple):
            stack += item
        elif hasattr(item, "__dict__"):
            stack += vars(item).values()
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_is_what_is_really_taken(
    name: str, dtype: torch.dtype, tiny_model_dir: Callable[..., Path]
) -> None:
    directory = tiny_model_dir(**MODELS[name])
    placed = Placed(read_config(directory), num_slots=3, max_tokens=100)
    budget = plan_memory(placed, placed, dtype=dtype, device=CPU, verify_rows=1, step_rows=1)
    decoder = load_decoder(directory, dtype=dtype, device=CPU)
    gc.collect()
    assert budget.target_weights == budget.draft_weights == reachable_bytes(decoder)
    assert budget.target_kv == budget.draft_kv == decoder.new_kv_cache(3, 100).nbytes
    alone = plan_memory(placed, None, dtype=dtype, device=CPU, verify_rows=1, step_rows=1)
    assert (alone.draft_weights, alone.draft_kv) == (0, 0)
    assert alone.total == budget.total - budget.draft_weights - budget.draft_kv


def test_the_draft_counts() -> None:
    """The target alone fits, with the draft it just does not."""
    without = BUDGET._replace(draft_weights=0, draft_kv=0)
    for available in (without.total, BUDGET.total - 1):
        check_budget(without, max_kv_bytes=0, available=available)
        with pytest.raises(
            MemoryTooSmall, match=r"1.35|2.05 kB of memory .*draft weights 500 B, draft kv 200 B"
        ):
            check_budget(BUDGET, max_kv_bytes=0, available=available)
    check_budget(BUDGET, max_kv_bytes=0, available=BUDGET.total)
    check_budget(BUDGET, max_kv_bytes=0, available=None)


def test_the_bound_on_the_caches_is_of_both() -> None:
    check_budget(BUDGET, max_kv_bytes=500, available=None)
    with pytest.raises(MemoryTooSmall, match=r"engine.max_kv_bytes 499 .*KV caches' 500 .*target kv 300 B"):
        check_budget(BUDGET, max_kv_bytes=499, available=None)


def test_what_can_be_had_is_the_tighter_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemFree: 10 kB\nMemAvailable:  4000 kB\n")

    def had() -> int | None:
        return available_bytes(CPU, meminfo=meminfo, cgroup=tmp_path)

    assert had() == 4000 * 1024
    for name, content in {
        "memory.max": "max",
        "memory.current": "1500000",
        "memory.stat": "anon 5\nfile 600000\ninactive_file 400000\nactive_file 100000\n",
    }.items():
        (tmp_path / name).write_text(content + "\n")
    assert had() == 4000 * 1024
    (tmp_path / "memory.max").write_text("2000000\n")
    assert had() == 2000000 - 1500000 + 500000
    (tmp_path / "memory.max").write_text("9000000000\n")
    assert had() == 4000 * 1024
    meminfo.unlink()
    assert had() == 9000000000 - 1000000
    (tmp_path / "memory.max").write_text("1000\n")  # lowered below what is used
    assert had() == 0
    (tmp_path / "memory.max").unlink()
    assert had() is None


def test_this_machine_tells() -> None:
    available = available_bytes(CPU)
    assert available is None or available > 0
