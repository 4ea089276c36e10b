"""Trees in service: plain decoding's tokens at every depth, more of them per round, and caches that follow."""

import pytest
import torch
from pydantic import ValidationError

from worker.config import WorkerConfig
from worker.models.attention import Segment
from worker.models.tree_attention import TreeSegment
from worker.spec.plan import UnknownTier

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 5}
DRAFTERS = [("model", {"noise": 0.3}), ("eagle", {"layout": "EAGLE-1"}), ("eagle", {"layout": "EAGLE-3"})]


@pytest.mark.parametrize(("drafter", "draft"), DRAFTERS)
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_every_depth_gives_the_tokens_of_plain_decoding(make_rig, drafter, draft, params):
    rig = make_rig(drafter=drafter, draft=draft, spec={"topk": 3, "num_draft_tokens": 12})
    plain = rig.generate(PROMPT, max_tokens=60, **params)
    for num_steps in (1, 2, 3, 5, 7):
        rig.set_depth(num_steps)
        assert rig.generate(PROMPT, max_tokens=60, **params).tokens == plain.tokens
    for bucket in rig.thread.stats().buckets:
        most = rig.thread.info.draft_tokens_at(bucket.num_steps)
        assert bucket.request_rounds <= bucket.verify_rows <= most * bucket.request_rounds
        # Levels count once, however many drafts they hold: what is correct was proposed, one per request-round.
        for correct, reached, proposed in zip(bucket.correct, bucket.reached, bucket.proposed, strict=True):
            assert correct <= min(reached, proposed) and max(reached, proposed) <= bucket.request_rounds
    rig.assert_idle_and_clean()


def test_a_tree_is_right_more_often_than_a_chain_of_its_depth(make_rig):
    def accepted(topk):
        rig = make_rig(draft={"noise": 0.3}, spec={"topk": topk})
        before = rig.engine.drafter.slow_path_rounds  # of the self-check
        rig.set_depth(3)
        for seed in range(3):
            rig.generate(PROMPT, max_tokens=100, temperature=0.8, seed=seed)
        buckets = [bucket for bucket in rig.thread.stats().buckets if bucket.num_steps]
        slow = rig.engine.drafter.slow_path_rounds - before
        assert slow == (0 if topk == 1 else sum(bucket.rounds for bucket in buckets))
        return buckets[-1].num_steps, sum(buckets[-1].correct) / buckets[-1].request_rounds

    (depth, tree), (_, chain) = accepted(4), accepted(1)
    assert depth == 3
    assert tree > 1.2 * chain > 0


def test_what_the_worker_says_about_itself(make_rig):
    info = make_rig(draft={"noise": 0.1}, spec={"topk": 2, "candidate_steps": [0, 1, 2, 4]}).thread.info
    assert (info.topk, info.num_draft_tokens, info.fast_path) == (2, [1, 3, 5, 9], "off")
    assert info.adaptation is False and "spec.topk is 2" in info.adaptation_off_reason
    bounded = make_rig(draft={"noise": 0.1}, spec={"topk": 4, "num_draft_tokens": 8}).thread.info
    assert bounded.num_draft_tokens == [1, 5, 8, 8, 8, 8]
    chain = make_rig(draft={"noise": 0.1}).thread.info
    assert (chain.topk, chain.num_draft_tokens, chain.fast_path, chain.adaptation) == (
        1,
        [1, 2, 3, 4, 6, 8],
        "on",
        True,
    )


def test_the_drafters_kv_after_a_round_is_that_of_the_text(make_rig, monkeypatch):
    """At no, partial and full acceptance its first forward has one or two rows a request, and the right past."""
    rig = make_rig(draft={"noise": 0.2}, spec={"topk": 3})
    drafter, firsts = rig.engine.drafter, []
    runner = drafter._runner
    decode = runner.decode

    def noting(token_ids, segments, **kwargs):
        if not isinstance(segments[0], TreeSegment):
            firsts.append(segments[0].count)
        return decode(token_ids, segments, **kwargs)

    monkeypatch.setattr(runner, "decode", noting)
    rig.set_depth(3)
    running = rig.submit(PROMPT, max_tokens=120, temperature=0.9, seed=1)
    compared = 0
    while rig.thread._scheduler.has_work():
        rig.step()
        request = running.request
        if request.slot is None or not (length := drafter.kv_length(request.slot)):
            continue
        assert request.committed - 2 <= length <= request.committed - 1
        other = (request.slot + 1) % runner.kv.num_slots
        decode(torch.tensor(request.tokens(0, length)), [Segment(other, 0, length)])
        for layer in runner.kv.layers:
            torch.testing.assert_close(layer[:, request.slot, :, :length], layer[:, other, :, :length])
        compared += 1
    assert compared > 20
    assert set(running.request.spec.histogram) == {0, 1, 2, 3}
    assert set(firsts) == {1, 2}


def test_an_eagle_heads_nodes_are_those_of_chains(make_rig, monkeypatch):
    """Each node's logits are what the head says at the end of a chain with the node's path."""
    rig = make_rig(drafter="eagle", draft={"layout": "EAGLE-3"}, spec={"topk": 3})
    drafter, steps = rig.engine.drafter, []
    forward = drafter._forward_frontier

    def noting(frontier, step):
        logits = forward(frontier, step)
        steps.append((frontier, logits))
        return logits

    monkeypatch.setattr(drafter, "_forward_frontier", noting)
    rig.set_depth(5)
    running = rig.submit(PROMPT, max_tokens=20)
    places = set()
    while rig.thread._scheduler.has_work():
        start, slot = running.request.committed - 1, running.request.slot
        steps.clear()
        rig.step()
        paths = [[]]
        for frontier, logits in steps:
            parents = frontier.parents[0].tolist()
            paths = [[*paths[p], t] for p, t in zip(parents, frontier.tokens[0].tolist(), strict=True)]
            places |= {tuple(parents)}
            for path, expected in zip(paths, logits[0], strict=True):
                drafter._kv.copy(slot, slot + 1, start)
                hidden = drafter._extended
                for step, token in enumerate(path):
                    segment = Segment(slot + 1, start + step, 1)
                    hidden = drafter._head.forward(
                        torch.tensor([token]), hidden, [segment], drafter._kv, phase="decode"
                    )
                torch.testing.assert_close(drafter._head.logits(hidden)[0], expected)
    assert len(places) > 3  # nodes that continue others than the first, and not in order


@pytest.mark.parametrize("room", [1, 2, 9])
def test_trees_at_the_end_of_the_context(make_rig, room):
    """A tree needs more cells than the text has places left."""
    engine = {"max_context_tokens": 64, "max_running_requests": 2}
    prompts = [[(7 * i + j) % 250 for i in range(64 - room)] for j in range(2)]
    plain = make_rig(drafter="none", spec={"candidate_steps": [0]}, engine=engine)
    expected = [plain.generate(prompt, max_tokens=room).tokens for prompt in prompts]
    rig = make_rig(draft={"noise": 0.3}, spec={"topk": 14, "num_steps": 7}, engine=engine)
    streams = [rig.submit(prompt, max_tokens=room) for prompt in prompts]
    rig.thread.run_until_idle()
    assert [stream.tokens for stream in streams] == expected
    assert all(len(tokens) == room for tokens in expected)
    assert rig.thread.stats().draft_failures == 0
    rig.assert_idle_and_clean()


def test_past_the_draft_models_context_a_request_goes_on_at_depth_0(make_rig):
    rig = make_rig(draft={"noise": 0.1, "max_positions": 48}, spec={"topk": 3, "num_steps": 5})
    plain = make_rig(drafter="none", spec={"candidate_steps": [0]}).generate(PROMPT, max_tokens=80)
    assert rig.generate(PROMPT, max_tokens=80).tokens == plain.tokens
    assert 0 in {bucket.num_steps for bucket in rig.thread.stats().buckets}
    rig.assert_idle_and_clean()


def test_nan_in_one_branch_makes_a_round_at_depth_0(make_rig, monkeypatch):
    rig = make_rig(draft={"noise": 0.1}, spec={"topk": 3})
    plain = rig.generate(PROMPT, max_tokens=30)
    runner = rig.engine.drafter._runner
    decode, calls = runner.decode, []

    def spoiled(token_ids, segments, **kwargs):
        logits = decode(token_ids, segments, **kwargs)
        if isinstance(segments[0], TreeSegment):
            calls.append(1)
            if len(calls) == 2:
                logits[-1] = float("nan")
        return logits

    monkeypatch.setattr(runner, "decode", spoiled)
    rig.set_depth(3)
    assert rig.generate(PROMPT, max_tokens=30).tokens == plain.tokens
    stats = rig.thread.stats()
    assert stats.draft_failures == 1
    # The round ran a whole tree: its seconds are not those of depth 0.
    (plain,) = [bucket for bucket in stats.buckets if bucket.num_steps == 0]
    assert plain.rounds - plain.timed_rounds >= 1
    assert plain.verify_rows == plain.request_rounds
    rig.assert_idle_and_clean()


@pytest.mark.parametrize(
    "parts",
    [
        {"target": {"hidden_size": 64}, "draft": {"hidden_size": 64, "noise": 0.1}},
        {"drafter": "eagle", "draft": {"layout": "own"}},
        {"drafter": "eagle", "draft": {"layout": "EAGLE-1"}},
    ],
    ids=["model", "own", "EAGLE-1"],
)
def test_exact_grade_text_kv_and_features_are_bitwise_plain_decodings(make_rig, parts):
    """int8 over a tiny model: every token, and every bit of what is stored behind them."""

    def run(depths):
        rig = make_rig(dtype="int8", spec={"topk": 3}, **parts)
        prompts = [[(7 * i + index) % 250 for i in range(20 + 17 * index)] for index in range(3)]
        streams = [
            rig.submit(prompt, max_tokens=110, temperature=0.9 * (index % 2), seed=index)
            for index, prompt in enumerate(prompts)
        ]
        kv, stored, step = rig.engine._runner.kv, {}, 0
        while rig.thread._scheduler.has_work():
            rig.set_depth(depths[step % len(depths)])
            rig.step()
            step += 1
            for stream in streams:
                if stream.request.slot is not None:
                    stored[stream.request.id] = kv.swap_out(stream.request.slot, stream.request.kv_length)
        return [stream.tokens for stream in streams], stored, rig.thread.stats()

    plain, plain_kv, _ = run([0])
    tokens, tree_kv, stats = run([5, 2, 0, 1, 3])
    assert tokens == plain
    assert sum(sum(bucket.correct) for bucket in stats.buckets) > 50
    for name, layers in tree_kv.items():
        for ours, reference in zip(layers, plain_kv[name], strict=True):
            length = min(ours.shape[2], reference.shape[2])
            assert length > 100  # beyond the first KV length
            assert torch.equal(ours[:, :, :length], reference[:, :, :length])


def test_a_plan_for_chains_of_another_size_is_refused(make_rig):
    rig = make_rig(draft={"noise": 0.1}, spec={"topk": 2})
    rig.set_depth(3)
    held = rig.thread.plan_status().plan
    entries = [held.entries[0].model_copy(update={"num_draft_tokens": 4})]
    with pytest.raises(
        UnknownTier, match="num_draft_tokens 4 does not fit num_steps 3: this worker's trees have 7"
    ):
        rig.thread.put_plan(held.model_copy(update={"version": 9, "entries": entries}))
    assert rig.thread.plan_status().plan == held


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"topk": 2}, 'needs a drafter that runs a model: spec.drafter = "model" or "eagle", got \'ngram\''),
        ({"topk": 2, "drafter": "ngram+eagle", "draft_model_path": "x"}, "got 'ngram\\+eagle'"),
        ({"topk": 2, "num_draft_tokens": 7, "drafter": "eagle", "draft_model_path": "x"}, "need at least 8"),
        ({"topk": 17}, "less than or equal to 16"),
        ({"topk": 0}, "greater than or equal to 1"),
    ],
)
def test_what_does_not_go_together_is_refused(spec, complaint):
    with pytest.raises(ValidationError, match=complaint):
        WorkerConfig(spec=spec)


def test_rows_of_trees_count_in_the_step_budget():
    spec = {"topk": 4, "drafter": "eagle", "draft_model_path": "x"}
    assert WorkerConfig(spec=spec).spec.most_draft_tokens == 29
    with pytest.raises(ValidationError, match="num_draft_tokens of the deepest tier .* = 1184"):
        WorkerConfig(spec=spec, engine={"max_running_requests": 32})
