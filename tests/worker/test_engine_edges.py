"""Ends, limits, faults: exact counts, no leak, and nobody else harmed."""

import pytest
import torch

from worker.request import Phase, PromptTooLong, QueueFull
from worker.spec.draft import DraftOutput

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]
DEPTHS = (0, 1, 2, 3, 5, 7)


def test_max_tokens_is_exact_at_every_depth(make_rig):
    rig = make_rig()
    plain = rig.generate(PROMPT, max_tokens=12).tokens
    for num_steps in DEPTHS:
        rig.set_depth(num_steps)
        for max_tokens in range(1, 11):
            done = rig.generate(PROMPT, max_tokens=max_tokens)
            assert done.tokens == plain[:max_tokens]
            assert done.finish_reason == "length"
    stats = rig.thread.stats()
    assert stats.generated_tokens == 12 + len(DEPTHS) * sum(range(1, 11))
    assert stats.generated_tokens == stats.first_tokens + sum(b.emitted_tokens for b in stats.buckets)
    rig.assert_idle_and_clean()


@pytest.mark.parametrize("draft", [None, {"noise": 0.1}])
def test_eos_ends_exactly_there_wherever_it_falls_in_a_round(make_rig, draft):
    rig = make_rig(draft=draft)
    plain = rig.generate(PROMPT, max_tokens=30).tokens
    for end in (1, 2, 3, 4, 5, 6, 7, 9, 12):
        eos = plain[end - 1]
        expected = plain[: plain.index(eos) + 1]
        for num_steps in DEPTHS:
            rig.set_depth(num_steps)
            done = rig.generate(PROMPT, eos=[eos], max_tokens=30)
            assert done.tokens == expected
            assert done.finish_reason == "stop"
            assert done.chunks[-1].matched_stop == eos
            ignoring = rig.generate(PROMPT, eos=[eos], max_tokens=20, ignore_eos=True)
            assert ignoring.tokens == plain[:20]
            stopped = rig.generate(PROMPT, stop_token_ids=frozenset([eos]), ignore_eos=True, max_tokens=30)
            assert stopped.tokens == expected
    for bucket in rig.thread.stats().buckets:
        assert all(c <= r for c, r in zip(bucket.correct, bucket.reached, strict=True))
        assert all(c <= p for c, p in zip(bucket.correct, bucket.proposed, strict=True))
        assert bucket.emitted_tokens <= bucket.accept_tokens
        if draft is None:
            assert bucket.correct == bucket.reached
    rig.assert_idle_and_clean()


def test_prompt_lengths_and_chunk_edges(make_rig):
    rig = make_rig(engine={"prefill_chunk_tokens": 8})
    for length in [*range(1, 12), 15, 16, 17, 24, 25]:
        prompt = [(i * 37) % 250 for i in range(length)]
        rig.set_depth(0)
        plain = rig.generate(prompt, max_tokens=9).tokens
        for num_steps in (1, 5, 7):
            rig.set_depth(num_steps)
            assert rig.generate(prompt, max_tokens=9).tokens == plain


def test_generation_reaches_the_last_token_of_the_context(make_rig):
    rig = make_rig(target={"max_positions": 64}, engine={"max_context_tokens": 64})
    prompt = PROMPT[:10] * 5
    rig.set_depth(0)
    plain = rig.generate(prompt, max_tokens=14)
    assert len(plain.tokens) == 14
    for num_steps in DEPTHS[1:]:
        rig.set_depth(num_steps)
        assert rig.generate(prompt, max_tokens=14).tokens == plain.tokens
    with pytest.raises(PromptTooLong, match="64 tokens; at most 63"):
        rig.submit([1] * 64)


def test_a_draft_models_shorter_context_falls_back_to_plain_decoding(make_rig):
    rig = make_rig(target={"max_positions": 256}, draft={"max_positions": 64, "noise": 0.0})
    prompt = [(i * 13) % 250 for i in range(60)]
    plain = rig.generate(prompt, max_tokens=40).tokens
    rig.set_depth(5)
    assert rig.generate(prompt, max_tokens=40).tokens == plain
    deep = {b.num_steps: b for b in rig.thread.stats().buckets}
    assert 0 in deep and any(n > 0 for n in deep)
    assert sum(b.emitted_tokens for n, b in deep.items() if n > 0) <= 8  # only up to position 64


def test_streams_join_and_leave_between_rounds(make_rig):
    rig = make_rig(draft={"noise": 0.1}, engine={"max_running_requests": 4})
    prompts = [[(i * 7 + j) % 250 for j in range(3 + 2 * i)] for i in range(12)]
    kwargs = [{"max_tokens": 5 + 3 * i, "temperature": 0.8 * (i % 2), "seed": i} for i in range(12)]
    alone = [rig.generate(p, **kw).tokens for p, kw in zip(prompts, kwargs, strict=True)]
    waves = []
    for i, (prompt, kw) in enumerate(zip(prompts, kwargs, strict=True)):
        waves.append(rig.submit(prompt, **kw))
        rig.set_depth(DEPTHS[i % len(DEPTHS)])
        for _ in range(i % 3):
            rig.step()
        assert rig.thread._scheduler.num_running <= 4
    rig.thread.run_until_idle()
    assert [w.tokens for w in waves] == alone
    rig.assert_idle_and_clean()


def test_abort_frees_the_slot_before_the_next_round_and_harms_nobody(make_rig):
    rig = make_rig(engine={"max_running_requests": 2})
    rig.set_depth(3)
    expected = rig.generate(PROMPT, max_tokens=60).tokens
    one, two, queued = (rig.submit(PROMPT, max_tokens=60) for _ in range(3))
    for _ in range(4):
        rig.step()
    assert queued.request.phase is Phase.WAITING
    assert rig.thread.abort(one.request.id)
    assert not rig.thread.abort("") and not rig.thread.abort(one.request.id[:-1])
    rig.step()
    assert one.finish_reason == "abort"
    assert queued.request.phase is not Phase.WAITING  # its slot was given on at once
    assert not rig.thread.abort(one.request.id)
    rig.thread.run_until_idle()
    assert two.tokens == queued.tokens == expected
    rig.assert_idle_and_clean()


def test_a_full_queue_is_refused(make_rig):
    rig = make_rig(engine={"max_running_requests": 1, "max_waiting_requests": 2})
    for _ in range(3):
        rig.submit(PROMPT)
    with pytest.raises(QueueFull) as caught:
        rig.submit(PROMPT)
    assert caught.value.retry_after_seconds > 0
    rig.thread.run_until_idle()
    rig.assert_idle_and_clean()


@pytest.mark.parametrize("fault", ["nan", "exception"])
def test_a_failing_drafter_means_depth_0_and_a_count(make_rig, monkeypatch, fault):
    rig = make_rig()
    plain = rig.generate(PROMPT, max_tokens=30).tokens
    rig.set_depth(3)
    runner = rig.engine.drafter._runner
    decode, calls = runner.decode, 0

    def faulty(tokens, segments, **kwargs):
        nonlocal calls
        calls += 1
        logits = decode(tokens, segments, **kwargs)
        if 4 <= calls <= 6:
            if fault == "exception":
                raise RuntimeError("planted")
            return logits * float("nan")
        return logits

    monkeypatch.setattr(runner, "decode", faulty)
    done = rig.generate(PROMPT, max_tokens=30)
    assert done.tokens == plain
    stats = rig.thread.stats()
    assert stats.draft_failures >= 1
    assert any(b.num_steps == 0 for b in stats.buckets)
    assert all(b.correct == b.reached for b in stats.buckets)  # acceptance is whole again afterwards
    rig.assert_idle_and_clean()


@pytest.mark.parametrize("fault", ["nan", "exception"])
def test_a_failing_target_ends_the_round_s_requests_and_the_server_lives(make_rig, monkeypatch, fault):
    rig = make_rig()
    rig.set_depth(2)
    plain = rig.generate(PROMPT, max_tokens=10).tokens
    runner = rig.engine._runner
    with monkeypatch.context() as patch:
        decode = runner.decode

        def faulty(tokens, segments, **kwargs):
            if fault == "exception":
                raise RuntimeError("planted")
            runner.kv.layers[0][:, segments[0].slot, :, 3] = float("nan")
            return decode(tokens, segments, **kwargs)

        patch.setattr(runner, "decode", faulty)
        done = rig.generate(PROMPT, max_tokens=10)
        assert done.finish_reason == "error"
        assert "internal error" in done.chunks[-1].error
    assert rig.generate(PROMPT, max_tokens=10).tokens == plain
    rig.assert_idle_and_clean()


def test_a_broken_sink_aborts_its_own_request_only(make_rig):
    rig = make_rig()
    good = rig.submit(PROMPT, max_tokens=20)
    bad = rig.submit(PROMPT, max_tokens=20)
    bad.request.sink = lambda chunk: 1 / 0
    rig.thread.run_until_idle()
    assert len(good.tokens) == 20
    assert bad.request.finish_reason == "abort"
    rig.assert_idle_and_clean()


def test_draft_kv_length_is_committed_minus_one_after_catch_up(make_rig):
    """At partial acceptance right after the round; at full one short, which the next first forward makes up."""
    rig = make_rig(draft={"noise": 0.1})
    drafter = rig.engine.drafter
    rig.set_depth(3)
    stream = rig.submit(PROMPT, max_tokens=60)
    seen = set()
    while rig.thread._scheduler.has_work():
        before = stream.request.spec.correct_drafts
        rounds = stream.request.spec.rounds
        rig.step()
        request = stream.request
        if request.phase is not Phase.RUNNING or request.spec.rounds == rounds:
            continue
        if rig.engine.state.num_steps != 3:
            continue  # the last rounds run a smaller tier
        full = request.spec.correct_drafts - before == 3
        seen.add(full)
        assert drafter.kv_length(request.slot) == request.committed - (2 if full else 1)
        drafter._catch_up(request)
        assert drafter.kv_length(request.slot) == request.committed - (2 if full else 1)
    assert seen == {True, False}


def test_acceptance_right_after_depth_0_equals_acceptance_before(make_rig):
    rig = make_rig(engine={"prefill_chunk_tokens": 8})
    rig.set_depth(3)
    stream = rig.submit(PROMPT, max_tokens=120)
    for _ in range(5):
        rig.step()
    rig.set_depth(0)
    forwards = rig.engine.drafter._runner.num_forwards
    for _ in range(40):
        rig.step()
    assert rig.engine.drafter._runner.num_forwards == forwards  # at depth 0 no drafter runs
    rig.set_depth(3)
    rig.thread.run_until_idle()
    assert all(b.correct == b.reached for b in rig.thread.stats().buckets)
    assert any(b.catch_up_seconds > 0 for b in rig.thread.stats().buckets if b.num_steps)
    assert len(stream.tokens) == 120


def test_a_round_runs_exactly_num_steps_draft_forwards(make_rig):
    rig = make_rig()
    runner = rig.engine.drafter._runner
    for num_steps in DEPTHS:
        rig.set_depth(num_steps)
        stream = rig.submit(PROMPT, max_tokens=40)
        rig.step()  # prefill
        for _ in range(3):
            before = runner.num_forwards
            rig.step()
            assert runner.num_forwards - before == num_steps
        rig.thread.abort(stream.request.id)
        rig.step()


def test_slow_path_serves_the_same_tokens(make_rig):
    fast, slow = make_rig(draft={"noise": 0.1}), make_rig(draft={"noise": 0.1}, spec={"fast_path": "off"})
    assert (fast.thread.info.fast_path, slow.thread.info.fast_path) == ("on", "off")
    for num_steps in (1, 3, 7):
        fast.set_depth(num_steps)
        slow.set_depth(num_steps)
        assert fast.generate(PROMPT, max_tokens=30).tokens == slow.generate(PROMPT, max_tokens=30).tokens
    ours, reference = ([(b.num_steps, b.correct) for b in rig.thread.stats().buckets] for rig in (fast, slow))
    assert ours == reference


def test_ragged_drafts_of_every_length_in_one_round(make_rig, monkeypatch):
    """Drafts of 0, 1 and num_steps tokens side by side, right and wrong ones."""
    rig = make_rig(drafter="ngram")
    prompts = [PROMPT[: 4 + i] for i in range(4)]
    plain = [rig.generate(p, max_tokens=20).tokens for p in prompts]
    streams = [rig.submit(p, max_tokens=20) for p in prompts]

    def scripted(batch):
        tokens = torch.zeros(batch.size, batch.num_steps, dtype=torch.long)
        counts = []
        for row, request in enumerate(batch.requests):
            which = next(i for i, s in enumerate(streams) if s.request is request)
            count = min(batch.row_budgets[row], [0, 1, 5, 5][which])
            right = plain[which][len(request.output_ids) :][:count]
            tokens[row, : len(right)] = torch.tensor(right, dtype=torch.long)
            if which == 3 and count > 2:
                tokens[row, 2] += 1  # wrong at the third position
            counts.append(count)
        return DraftOutput(tokens, counts)

    monkeypatch.setattr(rig.engine.drafter, "draft", scripted)
    rig.set_depth(5)
    rig.thread.run_until_idle()
    assert [s.tokens for s in streams] == plain
    assert streams[2].request.spec.correct_drafts == streams[2].request.spec.proposed_drafts > 0
    assert streams[0].request.spec.proposed_drafts == 0
    rig.assert_idle_and_clean()


def test_the_row_budget_and_batched_tokens_hold_in_every_step(make_rig, monkeypatch):
    rig = make_rig(engine={"max_num_batched_tokens": 96, "prefill_chunk_tokens": 32})
    runner, rows = rig.engine._runner, []
    for name in ("decode", "prefill"):
        inner = getattr(runner, name)

        def count(*args, inner=inner, name=name, **kwargs):
            rows[-1] += len(args[0] if name == "decode" else args[2])
            return inner(*args, **kwargs)

        monkeypatch.setattr(runner, name, count)
    rig.set_depth(7)
    for i in range(12):
        rig.submit([(i + j) % 250 for j in range(90)], max_tokens=20)
    while rig.thread._scheduler.has_work():
        rows.append(0)
        rig.step()
    assert max(rows) <= 96
    rig.assert_idle_and_clean()


def test_stats_are_plain_data_that_the_wire_accepts(make_rig):
    rig = make_rig(drafter="ngram")
    rig.set_depth(2)
    rig.generate(PROMPT * 3)
    stats = rig.thread.stats()
    assert type(stats).model_validate_json(stats.model_dump_json()) == stats
