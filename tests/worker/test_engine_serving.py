"""Prefix reuse, preemption, caps, stop strings, minimum lengths, timeouts: none of them changes a token."""

import pytest

from worker.models.loader import load_tokenizer
from worker.stopping import StopStrings
from worker.tokenization import Tokenizer

PROMPT = [(i * 29 + 7) % 250 for i in range(50)]
SAMPLED = {"temperature": 0.9, "seed": 3}
SMALL = {"prefill_chunk_tokens": 8, "max_running_requests": 3}


def test_a_reused_prefix_gives_the_same_tokens_and_the_same_acceptance(make_rig):
    rig = make_rig(draft={"noise": 0.1}, engine=SMALL)
    rig.set_depth(3)
    cold = rig.generate(PROMPT, **SAMPLED)
    warm = rig.generate(PROMPT, **SAMPLED)
    assert (cold.request.cached_tokens, warm.request.cached_tokens) == (0, 48)
    assert warm.tokens == cold.tokens
    assert warm.request.spec == cold.request.spec
    longer = rig.generate(PROMPT[:21] + [1, 2, 3], **SAMPLED)
    assert longer.request.cached_tokens == 16
    fresh = make_rig(engine=SMALL).generate(PROMPT[:21] + [1, 2, 3], **SAMPLED)
    assert longer.tokens == fresh.tokens


def test_generated_tokens_are_never_taken_for_a_prompt(make_rig):
    """Their KV came from the decode path; a prompt's comes from prefill (DESIGN §7)."""
    rig = make_rig(engine=SMALL)
    first = rig.generate(PROMPT, max_tokens=30)
    again = rig.generate(PROMPT + first.tokens, max_tokens=5)
    assert again.request.cached_tokens == 48
    assert again.tokens == make_rig(engine=SMALL).generate(PROMPT + first.tokens, max_tokens=5).tokens


def test_a_prefix_is_copied_from_a_busy_slot(make_rig):
    rig = make_rig(engine=SMALL)
    alone = rig.generate(PROMPT, max_tokens=20).tokens
    rig = make_rig(engine=SMALL)
    one = rig.submit(PROMPT, max_tokens=20)
    for _ in range(9):
        rig.step()
    two = rig.submit(PROMPT, max_tokens=20)
    rig.thread.run_until_idle()
    assert (one.request.cached_tokens, two.request.cached_tokens) == (0, 48)
    assert one.tokens == two.tokens == alone
    rig.assert_idle_and_clean()


def test_a_chunk_that_fills_the_prompt_is_computed_again_for_its_logits(make_rig):
    rig = make_rig(engine=SMALL)
    cold = rig.generate(PROMPT[:16])
    warm = rig.generate(PROMPT[:16])
    assert warm.request.cached_tokens == 8
    assert warm.tokens == cold.tokens


def test_a_failed_slot_is_not_reused(make_rig, monkeypatch):
    rig = make_rig(engine=SMALL)
    plain = rig.generate(PROMPT[::-1]).tokens
    runner = rig.engine._runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "decode", lambda *args, **kwargs: 1 / 0)
        assert rig.generate(PROMPT).finish_reason == "error"
    again = rig.generate(PROMPT)
    assert again.request.cached_tokens == 0
    assert rig.generate(PROMPT[::-1]).tokens == plain


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_preempted_requests_end_with_the_same_tokens(make_rig, drafter):
    draft = {"noise": 0.1} if drafter == "model" else None
    roomy = make_rig(drafter=drafter, draft=draft, engine=SMALL)
    kwargs = [{"max_tokens": 40, "temperature": 0.9 * (i % 2), "seed": i} for i in range(5)]
    prompts = [PROMPT[: 20 + 3 * i] for i in range(5)]
    plain = [roomy.generate(p, **kw).tokens for p, kw in zip(prompts, kwargs, strict=True)]
    tight = make_rig(drafter=drafter, draft=draft, engine={**SMALL, "max_kv_tokens": 110})
    tight.set_depth(3)
    streams = [tight.submit(p, **kw) for p, kw in zip(prompts, kwargs, strict=True)]
    while tight.thread._scheduler.has_work():
        tight.step()
        stats = tight.thread.stats()
        assert stats.queue.kv_tokens_free >= 0
    assert tight.thread._scheduler.num_preemptions > 0
    assert [s.tokens for s in streams] == plain
    tight.assert_idle_and_clean()


def test_a_single_request_larger_than_the_budget_still_ends(make_rig):
    rig = make_rig(engine={**SMALL, "max_kv_tokens": 30})
    rig.set_depth(7)
    assert len(rig.generate(PROMPT, max_tokens=60).tokens) == 60
    assert len(rig.generate(PROMPT, max_tokens=5).tokens) == 5


def test_a_cap_shortens_a_requests_own_drafts_only(make_rig):
    rig = make_rig()
    rig.set_depth(5)
    streams = [rig.submit(PROMPT, max_tokens=30, max_num_steps=cap) for cap in (None, 0, 2)]
    rig.thread.run_until_idle()
    assert streams[0].tokens == streams[1].tokens == streams[2].tokens
    spec = [s.request.spec for s in streams]
    assert spec[1].proposed_drafts == 0
    assert max(spec[2].histogram) == 2
    assert max(spec[0].histogram) == 5
    alone = rig.generate(PROMPT, max_tokens=30, max_num_steps=0)
    assert alone.request.spec.rounds == 29


def test_min_tokens_holds_the_end_back_exactly(make_rig):
    rig = make_rig()
    free = rig.generate(PROMPT, max_tokens=20, ignore_eos=True).tokens
    for sampled in ({}, SAMPLED):
        eos = [free[2], free[5]]
        for minimum in range(8):
            rig.set_depth(0)
            plain = rig.generate(PROMPT, eos=eos, max_tokens=20, min_tokens=minimum, **sampled)
            assert len(plain.tokens) > minimum or plain.finish_reason == "length"
            assert not set(plain.tokens[:minimum]) & set(eos)
            rig.set_depth(5)
            assert (
                rig.generate(PROMPT, eos=eos, max_tokens=20, min_tokens=minimum, **sampled).tokens
                == plain.tokens
            )


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_a_stop_string_ends_ids_and_counts_at_its_last_token(make_rig, tiny_model_dir, num_steps):
    rig = make_rig()
    tokenizer = Tokenizer(load_tokenizer(tiny_model_dir()), frozenset())
    free = rig.generate(PROMPT, max_tokens=40, ignore_eos=True).tokens
    rig.set_depth(num_steps)
    texts = [tokenizer.decode([t]) for t in free]
    for end in range(1, 20):
        stop = texts[end - 1] + texts[end]  # split over two tokens, at every offset in a round
        if "\N{REPLACEMENT CHARACTER}" in stop or not texts[end]:
            continue
        done = rig.submit(PROMPT, max_tokens=40, ignore_eos=True)
        done.request.stop_strings = StopStrings([stop], tokenizer.detokenizer())
        rig.thread.run_until_idle()
        first = next(n for n in range(1, 41) if stop in tokenizer.decode(free[:n]))
        assert done.tokens == free[:first]
        assert (done.finish_reason, done.chunks[-1].matched_stop) == ("stop", stop)


def test_an_overdue_request_ends_wherever_it_is(make_rig):
    rig = make_rig(engine={"max_running_requests": 1})
    now = [0.0]
    rig.engine._clock = rig.thread._clock = lambda: now[0]
    running = rig.submit(PROMPT, max_tokens=100)
    waiting = rig.submit(PROMPT, max_tokens=100)
    for collected in (running, waiting):
        collected.request.timeout_seconds = 5.0
    for _ in range(5):
        rig.step()
    now[0] = 5.0
    rig.step()
    for collected in (running, waiting):
        assert collected.finish_reason == "abort"
        assert collected.chunks[-1].error == "timeout: the request took longer than 5 s"
    assert len(running.tokens) > 0
    rig.assert_idle_and_clean()
