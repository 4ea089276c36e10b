"""The event stream: what it tells, in which order, from where it goes on; bounded in places and in memory."""

import asyncio
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi.sse import ServerSentEvent
from prometheus_client import CollectorRegistry

from controller.app import create_app, feed
from controller.app.feed import Feed
from controller.app.history import SAMPLES
from controller.clock import SystemClock
from controller.config import ControllerConfig

MakeRig = Callable[..., Any]
TOKEN = "token-for-reading"


@pytest.fixture
def rig(worker: Any, make_rig: MakeRig) -> Any:
    worker.acceptance = [1.0] * 64
    return make_rig({"a": worker})


def feed_of(rig: Any, **options: Any) -> Feed:
    return Feed(rig.loop, rig.journal, clock=rig.clock, version="0", **options)


async def take(feed: Feed, count: int, *, after: int | None = None, recent: int = 0) -> list[ServerSentEvent]:
    found: list[ServerSentEvent] = []
    async with aclosing(feed.events(after=after, recent=recent)) as events:
        async for event in events:
            found.append(event)
            if len(found) == count:
                return found
    return found


def body(event: ServerSentEvent) -> Any:
    assert event.raw_data is not None
    return json.loads(event.raw_data)


def test_the_past_comes_first_then_the_workers_then_decisions(rig: Any) -> None:
    feed = feed_of(rig)

    async def scene() -> list[ServerSentEvent]:
        for _ in range(3):
            await rig.run(1)
            await feed.sample()
        return await take(feed, 4, recent=1000)

    begin, workers, *decisions = asyncio.run(scene())
    assert [e.event for e in (begin, workers, *decisions)] == ["begin", "workers", "decision", "decision"]
    past = body(begin)["history"]
    assert len(past["times"]) == 3 and past["times"] == sorted(past["times"])
    assert past["workers"]["a"]["num_steps"][0] == 2 and past["workers"]["a"]["num_steps"][-1] > 2
    assert past["workers"]["a"]["tokens_per_second"][-1] > 0
    assert (
        body(begin)["newest"] == rig.journal.newest and body(begin)["controller_epoch"] == rig.journal.epoch
    )
    (shown,) = body(workers)["workers"]
    assert shown["id"] == "a" and shown["reachable"] and shown["depth"]["effective"] > 2
    assert body(workers)["journal"] == "ok" and body(workers)["mode"] == "active"
    assert [e.id for e in decisions] == ["1", "2"] and body(decisions[0])["reason"] == "met"
    assert {e.id for e in (begin, workers)} == {None}, "only a decision is a place to go on from"


@pytest.mark.parametrize(
    ("after", "recent", "first"), [(None, 0, None), (None, 2, -1), (3, 0, 4), (0, 5, 1), (10**9, 0, 1)]
)
def test_where_a_stream_begins(rig: Any, after: int | None, recent: int, first: int | None) -> None:
    asyncio.run(rig.run(10))
    feed = feed_of(rig)
    newest = rig.journal.newest
    assert newest >= 5

    async def scene() -> list[ServerSentEvent]:
        async def later() -> None:
            await asyncio.sleep(0)
            rig.loop.recorder.event(rig.loop.workers["a"], "worker", "later", "something happens later")

        task = asyncio.create_task(later())
        found = await take(feed, 2, after=after, recent=recent)
        await task
        return found

    _, decision = asyncio.run(scene())
    expected = newest + 1 if first is None else newest + first if first < 0 else first
    assert decision.id == str(expected)


def test_a_reason_cannot_break_an_event_in_two(rig: Any) -> None:
    reason = "before\u2028after\x85end\u2029"
    rig.loop.recorder.event(next(iter(rig.loop.workers.values()), None), "worker", "later", reason)
    *_, decision = asyncio.run(take(feed_of(rig), 2, after=0))
    assert decision.raw_data is not None and len(decision.raw_data.splitlines()) == 1
    assert reason in body(decision).values()


def test_going_on_behind_a_cursor_misses_and_repeats_nothing(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in memory and whatever must come from the journal."""
    monkeypatch.setattr(feed, "RECENT_DECISIONS", 2)
    monkeypatch.setattr(feed, "PAGE", 2)
    told = feed_of(rig)
    asyncio.run(rig.run(10))
    newest = rig.journal.newest
    assert newest > 4

    async def all_after(cursor: int) -> list[str | None]:
        return [event.id for event in (await take(told, 1 + newest - cursor, after=cursor))[1:]]

    for cursor in range(newest):
        assert asyncio.run(all_after(cursor)) == [str(c) for c in range(cursor + 1, newest + 1)]


def test_a_slow_reader_skips_samples_and_no_decision(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.app.feed.PAGE", 1)
    feed = feed_of(rig)

    async def scene() -> list[ServerSentEvent]:
        found: list[ServerSentEvent] = []
        async with aclosing(feed.events(after=0, recent=0)) as events:
            async for event in events:
                found.append(event)
                if len(found) == 1:  # it was told `begin`, and does not come back for a long time
                    for _ in range(20):
                        await rig.run(0.5)
                        await feed.sample()
                if event.id == str(rig.journal.newest):
                    return found
        return found

    found = asyncio.run(scene())
    kinds = [event.event for event in found]
    assert kinds.count("workers") == 1 and kinds.count("decision") == rig.journal.newest > 3
    assert (
        body(found[1])["time"] == body(found[1])["time"]
        and body(found[1])["workers"][0]["depth"]["desired"] == 7
    )


def test_a_journal_that_cannot_be_read_costs_only_what_is_not_in_memory(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(rig.run(3))
    told = feed_of(rig)
    asyncio.run(rig.run(10))
    first_in_memory = told._recent[0].cursor
    assert first_in_memory > 1

    read = rig.journal._store.read

    def broken(sql: str, *values: Any) -> Any:
        if "FROM decisions" in sql:
            raise sqlite3.OperationalError("disk I/O error")
        return read(sql, *values)

    monkeypatch.setattr(rig.journal._store, "read", broken)
    _, decision = asyncio.run(take(told, 2, after=0))
    assert decision.id == str(first_in_memory)


def test_history_is_bounded_and_has_gaps_where_a_worker_was_away(
    rig: Any, worker: Any, simulation: ModuleType
) -> None:
    feed = feed_of(rig)

    async def scene() -> Any:
        await rig.run(3)
        for _ in range(SAMPLES + 10):
            await feed.sample()
        worker.failure = simulation.UNREACHABLE
        await rig.run(3)
        await feed.sample()
        return body((await take(feed, 1))[0])["history"]

    past = asyncio.run(scene())
    column = past["workers"]["a"]
    assert len(past["times"]) == SAMPLES == len(column["num_steps"])
    assert column["num_steps"][-2] is not None
    assert [column[name][-1] for name in ("num_steps", "accept_length", "tokens_per_second")] == [None] * 3


def test_a_sample_that_fails_is_not_the_last(rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise asyncio.CancelledError

    told = feed_of(rig, sleep=nap)
    once = iter([RuntimeError("planted")])
    state = feed.worker_state

    def fails_once(*arguments: Any) -> Any:
        for error in once:
            raise error
        return state(*arguments)

    monkeypatch.setattr(feed, "worker_state", fails_once)

    async def scene() -> list[ServerSentEvent]:
        with pytest.raises(asyncio.CancelledError):
            await told.run()
        return await take(told, 2)

    assert [event.event for event in asyncio.run(scene())] == ["begin", "workers"]
    assert "planted" in caplog.text and all(0 < nap <= feed.SAMPLE_SECONDS for nap in naps)


# ---- over HTTP ----


@pytest.fixture
def served(simulation: ModuleType) -> Iterator[tuple[str, Any]]:
    config = ControllerConfig.model_validate(
        {
            "server": {"token": "token-for-changes", "read_token": TOKEN},
            "loop": {"poll_interval_seconds": 0.05},
            "journal": {"path": ":memory:"},
            "workers": [{"id": "a", "url": "http://a:1"}],
        }
    )
    worker = simulation.SimulatedWorker(simulation.VirtualClock())
    app = create_app(config, clock=SystemClock(), registry=CollectorRegistry(), clients={"a": worker})
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=30)
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app
        app.state.feed.close()
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive(), "an open stream must not keep the controller from ending"


def read(lines: Iterator[str], event: str) -> tuple[str | None, Any]:
    """Read on to the next event of a name; returns its id and data."""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        fields[name] = value
        if not line:
            if fields.get("event") == event:
                return fields.get("id"), json.loads(fields["data"])
            fields = {}
    raise AssertionError("the stream ended")


def test_over_http_with_the_token_for_reading_and_to_its_end(served: tuple[str, Any]) -> None:
    url, app = served
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        assert client.get("/v1/events").status_code == 401
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        for bad in ({"recent": 1001}, {"after": -1}, {"after": "x"}):
            assert client.get("/v1/events", params=bad).status_code == 422
        assert client.get("/v1/events", headers={"Last-Event-ID": "x"}).status_code == 422
        with client.stream("GET", "/v1/events", params={"recent": 10}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-cache"
            lines = answer.iter_lines()
            read(lines, "begin")
            met, _ = read(lines, "decision")
            order = httpx.put(
                f"{url}/v1/workers/a/depth",
                json={"num_steps": 5, "reason": "a line\nand another"},
                headers={"Authorization": "Bearer token-for-changes"},
                trust_env=False,
            )
            assert order.status_code == 200
            cursor, pinned = read(lines, "decision")
            assert pinned["reason"] == "pinned" and "a line\nand another" in pinned["message"]
            assert read(lines, "workers")[1]["workers"][0]["depth"]["source"] == "pin"
        with client.stream("GET", "/v1/events", headers={"Last-Event-ID": str(met)}) as answer:
            lines = answer.iter_lines()
            assert read(lines, "decision")[0] == cursor
            app.state.feed.close()
            assert [line for line in lines if line.startswith("event: begin")] == [], "it ends, and by itself"


def test_places_are_bounded_and_given_back(served: tuple[str, Any]) -> None:
    url, app = served
    app.state.feed._max_streams = 2
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=30) as client:
        with client.stream("GET", "/v1/events") as one, client.stream("GET", "/v1/events") as two:
            kept_open = one.iter_lines(), two.iter_lines()
            for lines in kept_open:
                read(lines, "begin")
            third = client.get("/v1/events")
            assert third.status_code == 503 and "2 event streams" in third.json()["detail"]
            assert third.headers["content-type"] == "application/problem+json"
        for _ in range(200):
            with client.stream("GET", "/v1/events") as answer:
                if answer.status_code == 200:
                    break
        assert answer.status_code == 200


def test_the_document_tells_of_the_stream(served: tuple[str, Any]) -> None:
    url, _ = served
    document = httpx.get(
        f"{url}/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False
    ).json()
    operation = document["paths"]["/v1/events"]["get"]
    item = operation["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]
    named = {
        choice["$ref"].rsplit("/", 1)[1] for choice in item["properties"]["data"]["contentSchema"]["anyOf"]
    }
    assert named == {"BeginView", "LiveView", "DecisionView"} <= set(document["components"]["schemas"])
    assert {p["name"] for p in operation["parameters"]} == {"last-event-id", "after", "recent"}


def test_a_controller_with_an_open_stream_ends_when_told(tmp_path: Path) -> None:
    """Not only after the grace for running requests, which is longer here than this test waits."""
    settings = {
        "SERVER__PORT": "0",
        "SERVER__GRACE_SECONDS": "600",
        "JOURNAL__PATH": ":memory:",
        "WORKERS": "[]",
    }
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from controller.cli import main; sys.exit(main(['run']))"],
            env=os.environ | {f"SPEC_CONTROLLER_{name}": value for name, value in settings.items()},
            stderr=output,
        )
    try:
        give_up = time.monotonic() + 60
        while not (found := re.search(r"listening on (http://[\d.:]+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        with httpx.stream("GET", f"{found[1]}/v1/events", trust_env=False, timeout=60) as answer:
            lines = answer.iter_lines()
            read(lines, "workers")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
