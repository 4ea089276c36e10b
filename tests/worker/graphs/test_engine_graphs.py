"""Rounds over captured forwards equal rounds without, at every depth and across every boundary."""

from collections import Counter

import pytest
import torch

from worker.graphs.tape import TapeCapture

PROMPT = [5, 9, 7] * 8
DRAFTERS = ["none", "ngram", "model", "eagle", "ngram+eagle"]
TARGETS = {
    "llama": {},
    "window": {"architecture": "MistralForCausalLM", "sliding_window": 16},
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
}


@pytest.fixture
def graphed(make_rig):
    """`graphed(is_on, …)`: a rig whose forwards are captured, or not."""

    def make(is_on: bool, *, max_batch_size: int = 4, **parameters):
        engine = {"cuda_graph_max_batch_size": max_batch_size, **parameters.pop("engine", {})}
        return make_rig(engine=engine, capture=TapeCapture() if is_on else None, **parameters)

    return make


def play(rig, depths, **sampling):
    """Streams of unlike lengths join and end in waves while the depth changes; return tokens and what was counted."""
    streams = []
    for turn in range(60):
        if turn in (0, 3, 7):
            for i in range(2):
                length = 3 + 7 * turn + 11 * i
                streams.append(
                    rig.submit([*PROMPT, turn, i][i:], max_tokens=length, **{**sampling, "seed": turn + i})
                )
        rig.set_depth(depths[turn % len(depths)])
        rig.step()
    rig.thread.run_until_idle()
    rig.assert_idle_and_clean()
    buckets = rig.thread.stats().buckets
    return [stream.tokens for stream in streams], [(b.num_steps, b.proposed, b.correct) for b in buckets]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "min_tokens": 5}], ids=["greedy", "sampled"])
def test_rounds_over_graphs_equal_rounds_without(graphed, drafter, sampling):
    depths = [0] if drafter == "none" else [0, 1, 2, 5]
    parameters = {"drafter": drafter, "spec": {"candidate_steps": depths}}
    if drafter == "model":
        parameters["draft"] = {"noise": 0.05}
    rig = graphed(True, max_batch_size=8, **parameters)
    assert play(rig, depths, **sampling) == play(graphed(False, **parameters), depths, **sampling)
    telemetry = rig.thread.telemetry()
    assert telemetry.eager_rounds == 0
    assert rig.engine._runner.launches.replayed > 0


@pytest.mark.parametrize("target", TARGETS)
def test_architectures(graphed, target):
    parameters = {"drafter": "ngram", "target": TARGETS[target], "spec": {"candidate_steps": [0, 3]}}
    rig = graphed(True, **parameters)
    assert play(rig, [3, 0]) == play(graphed(False, **parameters), [3, 0])


def test_batches_cross_the_largest_bucket_both_ways(graphed):
    """Case 34: above the largest captured batch rounds run without a graph, and are counted."""
    parameters = {"draft": {"noise": 0.05}, "spec": {"candidate_steps": [0, 1, 3]}}
    rig, plain = graphed(True, max_batch_size=2, **parameters), graphed(False, **parameters)
    assert play(rig, [3, 1, 0]) == play(plain, [3, 1, 0])
    rounds = sum(bucket.rounds for bucket in rig.thread.stats().buckets)
    assert 0 < rig.thread.telemetry().eager_rounds < rounds
    assert plain.thread.telemetry().eager_rounds == sum(b.rounds for b in plain.thread.stats().buckets)


def test_contexts_beyond_the_first_bucket(graphed):
    parameters = {
        "drafter": "ngram",
        "target": {"max_positions": 1024},
        "engine": {"max_context_tokens": 600},
        "spec": {"candidate_steps": [0, 3]},
    }
    tokens = []
    for is_on in (True, False):
        rig = graphed(is_on, max_batch_size=2, **parameters)
        rig.set_depth(3)
        streams = [rig.submit([7, 8] * (252 - 240 * i), max_tokens=40) for i in range(2)]
        rig.thread.run_until_idle()
        tokens.append([stream.tokens for stream in streams])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("drafter", ["model", "eagle"])
def test_trees_are_drafted_and_verified_without_graphs_and_depth_0_with(graphed, drafter):
    parameters = {"drafter": drafter, "spec": {"topk": 2, "candidate_steps": [0, 1, 3]}}
    rig = graphed(True, max_batch_size=8, **parameters)
    assert play(rig, [3, 0, 1]) == play(graphed(False, **parameters), [3, 0, 1])
    buckets = rig.thread.stats().buckets
    deep = sum(bucket.rounds for bucket in buckets if bucket.num_steps)
    assert rig.thread.telemetry().eager_rounds == deep < sum(bucket.rounds for bucket in buckets)


def test_buffers_stay_where_they_are_whatever_depth_is_in_force(graphed):
    rig = graphed(True, drafter="ngram", spec={"candidate_steps": [0, 1, 2, 5]})
    graphs = rig.engine._runner.graphs
    addresses = {width: tokens.data_ptr() for width, tokens in graphs._tokens.items()}
    outputs = [output.data_ptr() for output in graphs._outputs]
    for turn in range(100):
        rig.set_depth([0, 1, 2, 5][turn % 4])
        rig.generate(PROMPT, max_tokens=3)
    assert {width: tokens.data_ptr() for width, tokens in graphs._tokens.items()} == addresses
    assert [output.data_ptr() for output in graphs._outputs] == outputs


@pytest.mark.parametrize("drafter", ["model", "eagle"])
def test_only_reachable_shapes_are_captured(graphed, drafter):
    captured: Counter[str] = Counter()
    rig = graphed(True, max_batch_size=3, drafter=drafter, spec={"candidate_steps": [0, 1]})
    runner, part = rig.engine._runner, rig.engine.drafter
    captured["verify"] = len(runner.graphs._replays)
    assert captured["verify"] == 3 * 2  # batches of 1, 2 and 3 at depths 0 and 1
    if drafter == "eagle":
        assert len(part.extend_graphs._replays) == 3 * 2
        assert part.step_graphs is None  # at depth 1 extend gives the only draft
    else:
        assert len(part.runner.graphs._replays) == len(part.runner.last_row_graphs._replays) == 3


def test_graphs_are_off_where_none_are_wanted(graphed):
    assert graphed(True, max_batch_size=0).engine._runner.graphs is None


def test_a_shape_that_cannot_be_captured_runs_without(graphed, monkeypatch, caplog):
    expected = play(graphed(False, spec={"candidate_steps": [0, 1, 3]}), [3, 1, 0])
    calls = 0
    capture = TapeCapture.__call__

    def failing(self, run):
        nonlocal calls
        calls += 1
        if calls > 5:
            raise RuntimeError("planted")
        return capture(self, run)

    monkeypatch.setattr(TapeCapture, "__call__", failing)
    rig = graphed(True, spec={"candidate_steps": [0, 1, 3]})
    assert "capturing failed" in caplog.text
    assert play(rig, [3, 1, 0]) == expected
    assert rig.thread.telemetry().eager_rounds > 0


def test_filling_rows_touch_no_request(graphed):
    """What fills a batch up is stored in the padding slot: every other cell is as without graphs."""
    caches = []
    for is_on in (True, False):
        rig = graphed(is_on, drafter="ngram", spec={"candidate_steps": [0, 5]})
        rig.set_depth(5)
        streams = [rig.submit([*PROMPT, i], max_tokens=20 + i) for i in range(3)]
        while min(len(stream.tokens) for stream in streams) < 8:
            rig.step()
        kv = rig.engine._runner.kv
        caches.append((torch.stack(kv.layers)[:, :, : kv.num_slots], kv))
    assert caches[0][1].padding_slot == caches[0][1].num_slots
    assert torch.allclose(caches[0][0], caches[1][0], atol=1e-9)
    with pytest.raises(RuntimeError, match="no padding slot"):
        _ = caches[1][1].padding_slot
