"""The door to the engine: health, draining, death of the loop, and requests from many threads."""

import threading
import time

import pytest

from worker.request import EngineStopped, Request, SamplingParams

PROMPT = [72, 101, 108, 108, 111]


def wait_for(question, seconds=20.0):
    ends = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_requests_from_many_threads_get_their_own_answers(make_rig):
    rig = make_rig(engine={"max_running_requests": 3})
    plain = {n: rig.generate(PROMPT[:n], max_tokens=20, ignore_eos=True).tokens for n in (2, 3, 4, 5)}
    rig.set_depth(3)
    rig.thread.start()
    wrong = []

    def client(n):
        for _ in range(4):
            done, tokens = threading.Event(), []

            def sink(chunk, tokens=tokens, done=done):
                tokens.extend(chunk.token_ids)
                if chunk.finish_reason:
                    done.set()

            params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
            rig.thread.submit(Request(f"{n}-{time.monotonic_ns()}", PROMPT[:n], params, sink))
            if not done.wait(30) or tokens != plain[n]:
                wrong.append((n, tokens))

    clients = [threading.Thread(target=client, args=(n,)) for n in (2, 3, 4, 5)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert not wrong
    assert rig.thread.health().ready
    rig.thread.shutdown(5.0)
    rig.assert_idle_and_clean()


def test_draining_finishes_what_runs_and_refuses_what_comes(make_rig):
    rig = make_rig()
    rig.thread.start()
    running = rig.submit(PROMPT, max_tokens=30, ignore_eos=True)
    rig.thread.shutdown(30.0)
    assert (len(running.tokens), running.finish_reason) == (30, "length")
    health = rig.thread.health()
    assert not health.ready
    with pytest.raises(EngineStopped, match="shutting down"):
        rig.submit(PROMPT)
    rig.assert_idle_and_clean()


def test_after_the_grace_everybody_is_ended(make_rig):
    rig = make_rig(engine={"max_running_requests": 1})
    rig.thread.start()
    streams = [rig.submit(PROMPT, max_tokens=200, ignore_eos=True) for _ in range(3)]
    wait_for(lambda: streams[0].chunks)
    rig.thread.shutdown(0.0)
    assert all(s.finish_reason in ("abort", "length") for s in streams)
    assert streams[-1].finish_reason == "abort"
    rig.assert_idle_and_clean()


def test_a_hung_loop_is_not_ready(make_rig, monkeypatch):
    rig = make_rig(engine={"hang_seconds": 0.5})
    hold = threading.Event()
    step = rig.engine.step
    monkeypatch.setattr(rig.engine, "step", lambda: (hold.wait(20), step()))
    rig.thread.start()
    try:
        wait_for(lambda: not rig.thread.health().ready)
        health = rig.thread.health()
        assert health.alive
        assert "has not ticked" in health.detail
    finally:
        hold.set()
    wait_for(lambda: rig.thread.health().ready)
    time.sleep(0.7)
    assert rig.thread.health().ready  # idle is not hung
    rig.thread.shutdown(1.0)


def test_a_loop_that_dies_says_so_and_lets_nobody_wait(make_rig, monkeypatch):
    rig = make_rig()
    waiting = rig.submit(PROMPT, max_tokens=10)
    monkeypatch.setattr(rig.engine, "step", lambda: 1 / 0)
    rig.thread.start()
    wait_for(lambda: waiting.finish_reason is not None)
    assert (waiting.finish_reason, "died" in waiting.chunks[-1].error) == ("error", True)
    wait_for(lambda: not rig.thread.health().alive)
    with pytest.raises(EngineStopped, match="has stopped"):
        rig.submit(PROMPT)
    rig.thread.shutdown(0.0)


def test_a_device_that_is_gone_lets_nobody_wait(make_rig, monkeypatch):
    rig = make_rig()
    waiting = [rig.submit(PROMPT, max_tokens=10) for _ in range(3)]

    def gone(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(rig.engine._runner, "prefill", gone)
    monkeypatch.setattr(rig.engine._scheduler._kv, "clear", gone)
    rig.thread.start()
    wait_for(lambda: all(request.chunks for request in waiting))
    assert {request.chunks[-1].finish_reason for request in waiting} == {"error"}
    rig.thread.shutdown(0.0)


def test_when_not_even_ending_works_the_client_still_hears_of_it(make_rig, monkeypatch):
    rig = make_rig()
    waiting = [rig.submit(PROMPT, max_tokens=10) for _ in range(2)]
    monkeypatch.setattr(rig.engine, "step", lambda: 1 / 0)
    monkeypatch.setattr(rig.engine, "_finish", lambda *_: 1 / 0)
    rig.thread.start()
    wait_for(lambda: all(request.chunks for request in waiting))
    assert all("died" in request.chunks[-1].error for request in waiting)
    rig.thread.shutdown(0.0)
