"""Drafting with an EAGLE head: plain decoding's tokens always, and drafts that depend on nothing but the text."""

import pytest

from worker.request import Phase

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]
LONG = [(i * 29 + 7) % 250 for i in range(50)]
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 5}
DEPTHS = (0, 1, 2, 3, 5, 7)
SMALL = {"prefill_chunk_tokens": 8, "max_running_requests": 3}


def watch_drafts(rig, monkeypatch):
    """Note what is drafted, by (request, committed tokens)."""
    drafter, seen = rig.engine.drafter, {}
    draft = drafter.draft

    def noting(batch):
        output = draft(batch)
        for request, row, count in zip(
            batch.requests, output.draft_tokens.tolist(), output.num_proposed, strict=True
        ):
            seen[request.id, request.committed] = row[:count]
        return output

    monkeypatch.setattr(drafter, "draft", noting)
    return seen


@pytest.mark.parametrize("layout", ["EAGLE-1", "own", "EAGLE-3", "speculators eagle3"])
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_every_depth_gives_the_tokens_of_plain_decoding(make_rig, layout, params):
    rig = make_rig(drafter="eagle", draft={"layout": layout})
    assert (rig.thread.info.drafter, rig.thread.info.fast_path) == ("eagle", "on")
    plain = rig.generate(PROMPT, max_tokens=40, **params)
    for num_steps in DEPTHS[1:]:
        rig.set_depth(num_steps)
        assert rig.generate(PROMPT, max_tokens=40, **params).tokens == plain.tokens
    correct = sum(sum(b.correct) for b in rig.thread.stats().buckets)
    assert correct > 0 or "3" in layout  # a random EAGLE-3 head agrees by chance only
    rig.assert_idle_and_clean()


def test_streams_join_and_leave_and_depths_change_between_rounds(make_rig):
    rig = make_rig(drafter="eagle", engine={"max_running_requests": 4})
    prompts = [[(i * 7 + j) % 250 for j in range(3 + 2 * i)] for i in range(10)]
    kwargs = [{"max_tokens": 5 + 3 * i, "temperature": 0.8 * (i % 2), "seed": i} for i in range(10)]
    alone = [rig.generate(p, **kw).tokens for p, kw in zip(prompts, kwargs, strict=True)]
    waves = []
    for i, (prompt, kw) in enumerate(zip(prompts, kwargs, strict=True)):
        waves.append(rig.submit(prompt, **kw))
        rig.set_depth(DEPTHS[(i * 5) % len(DEPTHS)])
        for _ in range(i % 3):
            rig.step()
    rig.thread.run_until_idle()
    assert [w.tokens for w in waves] == alone
    rig.assert_idle_and_clean()
    assert not rig.engine.drafter._kv_lengths


def test_kv_length_after_the_extension_is_committed_minus_one(make_rig, monkeypatch):
    """At partial and at full acceptance, and at none."""
    rig = make_rig(drafter="eagle")
    drafter, lengths = rig.engine.drafter, []
    extend = drafter.draft_extend

    def checked(requests):
        logits = extend(requests)
        lengths.extend(drafter.kv_length(r.held_slot) - r.committed for r in requests)
        return logits

    monkeypatch.setattr(drafter, "draft_extend", checked)
    rig.set_depth(2)
    spec = rig.generate(PROMPT, max_tokens=230, temperature=0.9, seed=1).request.spec
    assert set(spec.histogram) == {0, 1, 2}
    assert set(lengths) == {-1}
    assert len(lengths) > 50


def test_drafts_depend_on_the_text_alone(make_rig, monkeypatch):
    """Whatever came between (depth 0, other depths, a prefix hit, preemption): the same drafts at the same place."""
    rig = make_rig(drafter="eagle", engine=SMALL)
    seen = watch_drafts(rig, monkeypatch)
    rig.set_depth(3)
    first = rig.generate(LONG, max_tokens=100, **SAMPLED)
    expected = {place: tokens for (_, place), tokens in seen.items()}
    seen.clear()

    def compare(request):
        places = [place for name, place in seen if name == request.id]
        common = [place for place in places if place in expected]
        assert len(common) > 8
        for place in common:
            length = min(len(expected[place]), len(seen[request.id, place]))
            assert seen[request.id, place][:length] == expected[place][:length]

    again = rig.submit(LONG, max_tokens=100, **SAMPLED)  # its prompt is a prefix hit
    forwards = []
    for num_steps, rounds in ((3, 9), (0, 25), (2, 4), (7, 2), (0, 12), (3, 99)):
        rig.set_depth(num_steps)
        before = rig.engine.drafter.kv_length(again.request.slot or 0)
        for _ in range(rounds):
            rig.step()
        if num_steps == 0:
            forwards.append(rig.engine.drafter.kv_length(again.request.slot) - before)
    assert again.request.cached_tokens == 48
    assert again.tokens == first.tokens
    assert forwards == [0, 0]  # at depth 0 no drafter runs
    compare(again.request)
    assert any(b.catch_up_seconds > 0 for b in rig.thread.stats().buckets if b.num_steps)
    seen.clear()

    moved = rig.submit(LONG, max_tokens=100, **SAMPLED)
    for _ in range(20):
        rig.step()
    other = rig.submit(PROMPT, max_tokens=60)  # takes the slot that the moved one leaves
    rig.engine._release_draft(rig.thread._scheduler.preempt(moved.request))
    rig.thread.run_until_idle()
    assert moved.tokens == first.tokens
    assert len(other.tokens) == 60
    compare(moved.request)
    rig.assert_idle_and_clean()


def test_a_prefix_copied_from_a_busy_slot_brings_its_features(make_rig, monkeypatch):
    rig = make_rig(drafter="eagle", engine=SMALL)
    seen = watch_drafts(rig, monkeypatch)
    rig.set_depth(3)
    one = rig.submit(LONG, max_tokens=30)
    for _ in range(9):
        rig.step()
    two = rig.submit(LONG, max_tokens=30)
    rig.thread.run_until_idle()
    assert (one.request.cached_tokens, two.request.cached_tokens) == (0, 48)
    assert one.tokens == two.tokens
    places = [place for name, place in seen if name == one.request.id]
    shared = [place for place in places if (two.request.id, place) in seen]
    assert len(shared) > 5
    assert all(seen[one.request.id, place] == seen[two.request.id, place] for place in shared)


def test_past_its_own_context_a_request_goes_on_at_depth_0(make_rig):
    rig = make_rig(drafter="eagle", draft={"max_positions": 64})
    rig.set_depth(0)
    plain = rig.generate(LONG, max_tokens=60).tokens
    before = {b.num_steps: b.emitted_tokens for b in rig.thread.stats().buckets}
    rig.set_depth(5)
    assert rig.generate(LONG, max_tokens=60).tokens == plain
    after = {b.num_steps: b.emitted_tokens for b in rig.thread.stats().buckets}
    deep = sum(tokens for steps, tokens in after.items() if steps)
    assert 0 < deep <= 64 + 2 - len(LONG)
    assert after[0] - before[0] >= 40


@pytest.mark.parametrize("fault", ["nan", "exception"])
def test_a_failing_head_means_depth_0_and_a_count(make_rig, monkeypatch, fault):
    rig = make_rig(drafter="eagle")
    plain = rig.generate(PROMPT, max_tokens=60, **SAMPLED).tokens
    rig.set_depth(3)
    seen = watch_drafts(rig, monkeypatch)
    rig.generate(PROMPT, max_tokens=60, **SAMPLED)
    expected = {place: tokens for (_, place), tokens in seen.items()}
    seen.clear()
    head = rig.engine.drafter._head
    forward, calls = head.forward, 0

    def faulty(*args, **kwargs):
        nonlocal calls
        calls += 1
        hidden = forward(*args, **kwargs)
        if 4 <= calls <= 6:
            if fault == "exception":
                raise RuntimeError("planted")
            rig.engine.drafter._kv.layers[0][:, 0, :, 40] = float("nan")
            return hidden * float("nan")
        return hidden

    monkeypatch.setattr(head, "forward", faulty)
    done = rig.generate(PROMPT, max_tokens=60, **SAMPLED)
    assert done.tokens == plain
    assert rig.thread.stats().draft_failures >= 1
    common = [place for _, place in seen if place in expected]
    assert len(common) > 5
    sound = {place: tokens for (_, place), tokens in seen.items() if min(tokens) >= 0}
    assert all(tokens == expected[place] for place, tokens in sound.items() if place in expected)
    rig.assert_idle_and_clean()


def test_a_round_runs_num_steps_forwards_of_the_head(make_rig, monkeypatch):
    rig = make_rig(drafter="eagle")
    head, calls = rig.engine.drafter._head, []
    forward = head.forward
    monkeypatch.setattr(head, "forward", lambda *a, **kw: calls.append(kw["phase"]) or forward(*a, **kw))
    for num_steps in DEPTHS:
        rig.set_depth(num_steps)
        stream = rig.submit(PROMPT, max_tokens=40)
        rig.step()
        rig.step()
        for _ in range(3):
            calls.clear()
            rig.step()
            assert calls == ["decode"] * num_steps
        rig.thread.abort(stream.request.id)
        rig.step()


def test_slow_path_serves_the_same_tokens_and_drafts(make_rig):
    fast, slow = make_rig(drafter="eagle"), make_rig(drafter="eagle", spec={"fast_path": "off"})
    assert (fast.thread.info.fast_path, slow.thread.info.fast_path) == ("on", "off")
    for rig in (fast, slow):
        rig.set_depth(3)
        rig.generate(PROMPT, max_tokens=60, **SAMPLED)
    ours, reference = ([(b.num_steps, b.correct) for b in rig.thread.stats().buckets] for rig in (fast, slow))
    assert ours == reference


def test_aborting_leaves_nothing_behind(make_rig):
    rig = make_rig(drafter="eagle")
    rig.set_depth(3)
    stream = rig.submit(PROMPT, max_tokens=100)
    for _ in range(6):
        rig.step()
    assert stream.request.phase is Phase.RUNNING
    rig.thread.abort(stream.request.id)
    rig.thread.run_until_idle()
    assert not rig.engine.drafter._kv_lengths
    rig.assert_idle_and_clean()
