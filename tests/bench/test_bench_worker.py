"""bench-worker: workloads hold what they say, and the last line's figures are ratios within a repeat."""

import os
import sys
import threading
from pathlib import Path

import pytest

from bench.worker.arms import Sample
from bench.worker.clocks import of_process, of_threads
from bench.worker.host import Host
from bench.worker.peer_processes import LineProcess
from bench.worker.report import ADAPTIVE, PLAIN, TWIN, summary
from bench.worker.workloads import SOURCES, load


def test_a_transition_takes_other_prompts_than_the_pure_phases():
    workloads = {w.name: w for w in load([*SOURCES, "transition"], prompts=3, max_tokens=16)}
    for name, workload in workloads.items():
        assert len({prompt.text for prompt in workload.prompts}) == len(workload.prompts) >= 3
        assert (workload.warm_up is None) == (name == "transition")
        assert {prompt.max_tokens for prompt in workload.prompts} == {16}
    pure = {p.text for name in SOURCES for p in workloads[name].prompts}
    assert not pure & {prompt.text for prompt in workloads["transition"].prompts}
    assert {p.temperature for p in workloads["prose"].prompts} == {1.0}


def test_more_prompts_than_there_are_is_said():
    with pytest.raises(ValueError, match=r"--prompts: must be within 1…13"):
        load(["chat"], prompts=20, max_tokens=8)
    with pytest.raises(ValueError, match=r"--prompts: must be within 1…10"):
        load(["chat", "transition"], prompts=11, max_tokens=8)
    assert len(load(["chat", "transition"], prompts=10, max_tokens=8)[1].prompts) == 10


def test_ratios_are_taken_within_a_repeat():
    def samples(*seconds, lengths=1.0, drafts=(0, 0)):
        return [Sample(100, each, lengths, drafts) for each in seconds]

    found = summary(
        {
            ("code", PLAIN): samples(1.0, 4.0, 2.0),  # a neighbour came and went
            ("code", TWIN): samples(1.0, 4.0, 1.6),
            ("code", "depth 1"): samples(0.8, 3.2, 1.6, lengths=1.5, drafts=(30, 50)),
            ("code", "depth 3"): samples(0.5, 2.0, 1.0, lengths=2.0, drafts=(20, 50)),
            ("code", ADAPTIVE): samples(0.6, 2.5, 1.25, lengths=1.9, drafts=(9, 9)),
            ("code", "llama.cpp"): [Sample(100, each) for each in (0.5, 2.5, 1.0)],
            ("code", "vllm"): [Sample(100, each) for each in (3.0, 9.0, 5.0)],
            ("code", "vllm ngram 3"): [Sample(100, each) for each in (1.5, 5.0, 2.5)],
        },
        ["transformers: not here"],
    )
    assert found["noise_floor"] == 0.0
    assert found["adaptive_vs_plain"] == {"code": 1.6}
    assert found["best_fixed"] == {"code": "depth 3"}
    assert found["adaptive_vs_best_fixed"] == {"code": 0.8}
    assert found["vs_llamacpp_plain"] == {"code": 0.833}
    assert found["draft_top1"] == 0.5
    assert found["accept_length"] == {"code": 1.9}
    assert found["plain_vs_transformers"] is found["packed_vs_fp32"] is None
    assert found["vs_transformers_lookup"] is None
    assert found["vs_vllm"] == {"code": 2.0}, "against the faster of its arms"
    assert found["left_out"] == ["transformers: not here"]
    plain = found["rows"][0]
    assert (plain["tokens_per_second"], plain["range"], plain["vs_plain"]) == (50.0, [25.0, 100.0], 1.0)


def test_cpu_clocks_see_the_work_of_others():
    done, wake = threading.Event(), threading.Event()

    def work():
        sum(i * i for i in range(300_000))
        done.set()
        wake.wait()

    before = of_process(os.getpid())()
    thread = threading.Thread(target=work)
    thread.start()
    clock = of_threads(thread)
    done.wait()
    assert clock() > 0
    assert of_process(os.getpid())() >= before
    wake.set()
    thread.join()


class _Pid:
    """An arm that tells where it runs, and fails when asked to."""

    name = "pid"

    def run(self, workload):
        if workload.warm_up is not None:
            raise ValueError("no warm-up here")
        return Sample(os.getpid(), float(threading.active_count()))


def _arms(*, fails):
    if fails:
        raise FileNotFoundError("no weights")
    return [_Pid()]


def test_hosted_arms_run_in_a_process_of_their_own_and_their_failures_come_back():
    pure, transition = load(["code", "transition"], prompts=1, max_tokens=8)
    host = Host(_arms, fails=False)
    (arm,) = host.arms
    assert arm.name == "pid"
    first, second = arm.run(transition), arm.run(transition)
    assert first.tokens == second.tokens != os.getpid()
    assert first.seconds == 1.0, "the thread that built the arms has ended, and its OpenMP threads with it"
    with pytest.raises(RuntimeError, match="no warm-up here"):
        arm.run(pure)
    assert arm.run(transition) == first
    host.close()
    with pytest.raises(RuntimeError, match="no weights"):
        Host(_arms, fails=True)


def test_a_peer_that_prints_answers_all_the_same_and_its_end_is_told():
    program = """
print("loading ...")
say("ready")
for line in sys.stdin:
    print("thinking ...")
    os.write(1, b"of it")
    say(len(json.loads(line)))
    break
sys.exit(3)
"""
    peer = LineProcess("peer", Path(sys.executable), program)
    assert peer.ask([1, 2, 3]) == 3
    with pytest.raises(RuntimeError, match="peer: ended with status 3"):
        peer.ask([1])


def test_a_peer_that_cannot_be_imported_is_told():
    with pytest.raises(RuntimeError, match="peer: ended with status 1: .*no_such_library"):
        LineProcess("peer", Path(sys.executable), "import no_such_library")
