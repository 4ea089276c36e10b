"""How a head is configured: where it is looked for, what is refused, what it takes in memory."""

import pytest
from pydantic import ValidationError

from worker.build import build_engine
from worker.config import WorkerConfig
from worker.memory import MemoryTooSmall
from worker.models.config import ModelError


def config(path, head=None, drafter="eagle", **engine):
    spec = {"drafter": drafter, **({"draft_model_path": str(head)} if head else {})}
    engine = {"max_context_tokens": 64, "prefill_chunk_tokens": 16, "profile_seconds": 0, **engine}
    return WorkerConfig(
        model={"path": str(path), "dtype": "float64", "device": "cpu", "threads": 1}, spec=spec, engine=engine
    )


def test_a_path_that_is_not_there_is_named(eagle_dirs, tmp_path):
    target, _ = eagle_dirs()
    with pytest.raises(ModelError, match="spec.draft_model_path: .*missing: no such directory"):
        build_engine(config(target, tmp_path / "missing"))


@pytest.mark.parametrize("drafter", ["ngram", "none"])
def test_a_path_without_a_model_to_draft_is_refused(drafter):
    spec = {"drafter": drafter, "draft_model_path": "x", "candidate_steps": [0], "num_steps": 0}
    with pytest.raises(ValidationError, match="spec.draft_model_path goes together with"):
        WorkerConfig(spec=spec)


@pytest.mark.parametrize("drafter", ["model", "eagle", "ngram+eagle"])
def test_a_drafter_that_runs_a_model_needs_a_path(drafter):
    with pytest.raises(ValidationError, match="spec.draft_model_path goes together with"):
        WorkerConfig(spec={"drafter": drafter})


def test_head_and_features_count_in_the_memory_bound(eagle_dirs):
    target, head = eagle_dirs()
    slots, tokens = 2, 64
    layers, keys, features, deepest = 2, 2 * 2 * 8, 32, 7
    kv = slots * tokens * layers * keys * 8
    ours = slots * (tokens + deepest + 1) * (keys + features) * 8
    fits = config(target, head, max_running_requests=slots, max_kv_bytes=kv + ours)
    assert build_engine(fits).info.drafter == "eagle"
    with pytest.raises(MemoryTooSmall, match=f"below the KV caches' {kv + ours}"):
        build_engine(config(target, head, max_running_requests=slots, max_kv_bytes=kv + ours - 1))
