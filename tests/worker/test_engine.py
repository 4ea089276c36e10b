"""The engine as a whole: the same tokens as plain decoding at every depth, and nothing left behind."""

import random

import pytest

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]
NOISY = {"noise": 0.1}
DRAFTERS = [("model", None), ("model", NOISY), ("ngram", None)]
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 5}


@pytest.mark.parametrize(("drafter", "draft"), DRAFTERS)
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_every_depth_gives_the_tokens_of_plain_decoding(make_rig, drafter, draft, params):
    rig = make_rig(drafter=drafter, draft=draft)
    plain = rig.generate(PROMPT, max_tokens=40, **params)
    assert len(plain.tokens) == 40
    for num_steps in (1, 2, 3, 5, 7):
        rig.set_depth(num_steps)
        assert rig.generate(PROMPT, max_tokens=40, **params).tokens == plain.tokens
    rig.assert_idle_and_clean()


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_perfect_drafter_is_always_right_through_50_live_changes(make_rig, batch_size):
    rig = make_rig()
    params = [{} if i % 2 == 0 else {**SAMPLED, "seed": i} for i in range(batch_size)]
    prompts = [PROMPT[: 3 + i] for i in range(batch_size)]
    plain = [rig.generate(p, max_tokens=230, **kw).tokens for p, kw in zip(prompts, params, strict=True)]
    before = {(b.num_steps, b.max_batch_size): b for b in rig.thread.stats().buckets}
    assert all(num_steps == 0 for num_steps, _ in before)
    streams = [rig.submit(p, max_tokens=230, **kw) for p, kw in zip(prompts, params, strict=True)]
    rng = random.Random(3)
    changes = 0
    while rig.thread._scheduler.has_work():
        if changes < 50:
            rig.set_depth(rng.choice([0, 1, 2, 3, 5, 7]))
            changes += 1
        rig.step()
    assert changes == 50
    assert [s.tokens for s in streams] == plain
    for bucket in rig.thread.stats().buckets:
        assert bucket.correct == bucket.reached == bucket.proposed
    rig.assert_idle_and_clean()
