"""The check before serving must be able to fail: planted faults keep the worker from starting."""

import pytest
import torch

import worker.self_check as self_check
import worker.spec.verify as verify_module
from worker.self_check import SelfCheckFailed
from worker.spec.draft import ChainDrafter
from worker.spec.runtime_state import SpecRuntimeState


@pytest.mark.parametrize("topk", [1, 2])
def test_a_broken_tier_keeps_the_worker_from_serving(make_rig, monkeypatch, topk):
    go_on = verify_module._Walk.go_on

    def believes_the_draft(walk, token):
        is_deep = walk._topology.num_levels >= 3  # only deep tiers are broken
        drafted = [draft for row, draft in walk._children if row == walk.row == walk.rows.start]
        go_on(walk, drafted[-1] if is_deep and drafted else token)

    monkeypatch.setattr(verify_module._Walk, "go_on", believes_the_draft)
    with pytest.raises(SelfCheckFailed, match="num_steps 3, "):
        make_rig(draft={"noise": 0.5}, spec={"topk": topk})


def test_the_smallest_engine_that_can_be_configured_passes(make_rig):
    rig = make_rig(
        engine={"max_running_requests": 1, "max_waiting_requests": 0, "max_context_tokens": 16},
        spec={"candidate_steps": [0, 1, 3]},
    )
    assert rig.thread.info.max_context_tokens == 16


def test_rows_in_the_wrong_order_are_noticed(make_rig, monkeypatch):
    fill = SpecRuntimeState.fill

    def swapped(self, roots, draft_tokens, num_proposed):
        rows = fill(self, roots, draft_tokens, num_proposed)
        return rows.flip(0) if len(rows) > 2 else rows

    monkeypatch.setattr(SpecRuntimeState, "fill", swapped)
    with pytest.raises(SelfCheckFailed, match="plain decoding gives"):
        make_rig()


def test_a_fast_path_that_differs_is_noticed(make_rig, monkeypatch):
    organize = ChainDrafter.organize

    def shifted(self, steps):
        tree = organize(self, steps)
        return tree._replace(parent_list=tree.parent_list + 1)

    monkeypatch.setattr(ChainDrafter, "organize", shifted)
    with pytest.raises(SelfCheckFailed, match="parent_list differs between fast and slow path"):
        make_rig()


def test_a_near_tie_is_told_from_a_fault(make_rig, monkeypatch):
    rig = make_rig()
    runner = rig.engine._runner
    draw = self_check.Draw(self_check.TWINS[0], 0, 3)
    logits = torch.zeros(1, runner.vocab_size, dtype=torch.float64)
    logits[0, 5], logits[0, 6], logits[0, 7] = 2.0, 2.0 - 1e-12, 1.9
    monkeypatch.setattr(runner, "decode", lambda *args, **kwargs: logits)
    assert self_check._is_near_tie(runner, [1, 2, 3], draw, 6, 5)
    assert not self_check._is_near_tie(runner, [1, 2, 3], draw, 7, 5)
    rig.assert_idle_and_clean()
