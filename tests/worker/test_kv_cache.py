import pytest
import torch

from worker.kv_cache import KVCache, KVCacheFull


def make_cache(**changes: int) -> KVCache:
    sizes = {"num_layers": 2, "num_slots": 3, "num_kv_heads": 2, "head_dim": 8, "max_tokens": 65} | changes
    return KVCache(**sizes, dtype=torch.float32, device=torch.device("cpu"))


def test_sizes_are_rounded_up_and_zeroed() -> None:
    kv = make_cache()
    assert kv.max_tokens == 128
    assert kv.keys(1).shape == kv.values(1).shape == (3, 2, 128, 8)
    assert kv.nbytes == 2 * 2 * 3 * 2 * 128 * 8 * 4
    assert all(not layer.any() for layer in kv.layers)


def test_allocates_the_lowest_free_slot() -> None:
    kv = make_cache()
    assert [kv.allocate() for _ in range(3)] == [0, 1, 2]
    assert kv.num_free_slots == 0
    kv.free(2)
    kv.free(0)
    assert kv.num_free_slots == 2
    assert kv.allocate() == 0
    assert kv.allocate() == 2


def test_full_and_wrong_frees_are_refused() -> None:
    kv = make_cache(num_slots=1)
    slot = kv.allocate()
    with pytest.raises(KVCacheFull, match="all 1 KV slots"):
        kv.allocate()
    kv.free(slot)
    with pytest.raises(ValueError, match="slot 0 is free already"):
        kv.free(slot)
    for wrong in (-1, 1):
        with pytest.raises(ValueError, match=f"slot {wrong} is outside 0..0"):
            kv.free(wrong)


def test_integrity_finds_a_leak_and_a_nan() -> None:
    kv = make_cache()
    kv.check_integrity()
    slot = kv.allocate()
    with pytest.raises(RuntimeError, match=r"not given back: \[0\]"):
        kv.check_integrity()
    kv.free(slot)
    kv.check_integrity()
    kv.values(1)[0, 0, 5, 3] = torch.nan
    with pytest.raises(RuntimeError, match="layer 1 holds NaN"):
        kv.check_integrity()


def test_sizes_below_one_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_slots must be at least 1, got 0"):
        make_cache(num_slots=0)
