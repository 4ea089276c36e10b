"""The commands for a running controller, against one: what they print, for people and machines, and how they end."""

import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from controller import console, remote
from controller.app import create_app
from controller.cli import main
from controller.clock import SystemClock
from controller.config import ControllerConfig
from controller.console import duration
from controller.controlled import ControlledWorker
from controller.remote import Event, Remote, parse_events
from controller.tables import printable

CHANGE, READ = "token-for-changes", "token-for-reading"
Run = Callable[..., tuple[int, str, str]]


class Served:
    """A controller on a port of its own, with a simulated worker `a` behind it."""

    def __init__(self, simulation: ModuleType, **server: str) -> None:
        self.worker = simulation.SimulatedWorker(simulation.VirtualClock())
        config = ControllerConfig.model_validate(
            {
                "server": server,
                "loop": {
                    "poll_interval_seconds": 0.02,
                    "confirm_timeout_seconds": 0.1,
                    "backoff_max_seconds": 0.02,
                },
                "journal": {"path": ":memory:"},
                "workers": [{"id": "a", "url": "http://a:1"}],
            }
        )
        app = create_app(
            config, clock=SystemClock(), registry=CollectorRegistry(), clients={"a": self.worker}
        )
        self.app = app
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=30)
        )
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()
        give_up = time.monotonic() + 30
        while not (self._server.started and app.state.loop.workers["a"].is_reachable):
            assert self._thread.is_alive() and time.monotonic() < give_up
            time.sleep(0.01)

    def stop(self) -> None:
        self.app.state.feed.close()
        self._server.should_exit = True
        self._thread.join(60)
        self._listener.close()
        assert not self._thread.is_alive()


@pytest.fixture
def serve(simulation: ModuleType) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(**server: str) -> Served:
        made.append(Served(simulation, **server))
        return made[-1]

    yield make
    for served in made:
        served.stop()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()


@pytest.fixture
def run(capsys: Any) -> Run:
    """`run("pin", "a", "3", url=…)` -> exit status, stdout, stderr."""

    def call(*arguments: str, url: str) -> tuple[int, str, str]:
        try:
            status = main([*arguments, "--url", url])
        except SystemExit as end:  # argparse
            status = int(end.code or 0)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return status, said.out, said.err

    return call


def test_status_and_workers(served: Served, run: Run, simulation: ModuleType) -> None:
    status, out, _ = run("status", url=served.url)
    assert status == 0
    assert re.search(r"controller +ready\nmode +active\nworkers +1 of 1 up\njournal +ok\n", out), out
    assert re.search(r"^a +up +2 +policy ", out, re.M)
    status, out, _ = run("status", "--json", url=served.url)
    body = json.loads(out)
    assert body["ready"]["ready"] and body["mode"] == "active" and body["workers"][0]["id"] == "a"
    status, out, _ = run("workers", url=served.url)
    assert status == 0 and "simulated, ngram, none" in out and "1:2 2:2 4:2 8:2" in out
    assert json.loads(run("workers", "--json", url=served.url)[1])["workers"][0]["depth"]["tiers"] == [
        0,
        1,
        2,
        3,
        5,
        7,
    ]
    served.worker.failure = simulation.UNREACHABLE
    while httpx.get(f"{served.url}/readyz", trust_env=False).json()["unreachable_workers"] == []:
        time.sleep(0.01)
    assert "0 of 1 up" in (out := run("status", url=served.url)[1]) and "down: connection refused" in out


def test_orders(served: Served, run: Run, simulation: ModuleType) -> None:
    status, out, _ = run("pin", "a", "5", "--for", "10m", "--reason", "incident 7", url=served.url)
    assert status == 0 and re.match(
        r"a: pinned at 5 until 2.*; the worker follows \(depth 5, by pin\)\n", out
    )
    assert served.worker.plans[-1].pin.num_steps == 5 and 590 < served.worker.plans[-1].pin.ttl_seconds <= 600
    status, out, _ = run("release", "a", "--json", url=served.url)
    assert status == 0 and json.loads(out)["source"] == "policy"
    status, out, _ = run("rollback", "a", "--for", "1h", url=served.url)
    assert status == 0 and "rolled back" in out and "the policy is held until" in out and "by pin" in out
    assert run("mode", url=served.url)[1] == "all workers: active\n"
    assert run("mode", "frozen", url=served.url)[1] == "all workers: frozen\n"
    assert run("mode", "advisory", "--worker", "a", url=served.url)[1] == "a: advisory (its own)\n"
    assert run("mode", url=served.url)[1] == "all workers: frozen\n  a: advisory\n"
    assert run("mode", "inherit", "--worker", "a", url=served.url)[1] == "a: frozen (as all workers)\n"
    put = served.worker.put_plan

    async def lagging(plan: Any) -> Any:
        return (await put(plan)).model_copy(update={"num_steps": 1})

    status_of = served.worker.plan_status

    async def lagging_status() -> Any:
        return (await status_of()).model_copy(update={"num_steps": 1})

    served.worker.put_plan, served.worker.plan_status = lagging, lagging_status
    status, out, _ = run("pin", "a", "7", url=served.url)
    assert status == console.NOT_CONFIRMED == 3 and "not yet seen to follow" in out
    served.worker.put_plan, served.worker.plan_status = put, status_of
    served.worker.failure = simulation.UNREACHABLE
    status, _, err = run("pin", "a", "3", url=served.url)
    assert status == 1 and "the wish is kept" in err


MISTAKES = [
    (["pin", "a", "4"], 2, r"4 is not a tier of this worker; allowed: \[0, 1, 2, 3, 5, 7\]"),
    (["pin", "a", "99"], 2, "num_steps"),
    (["pin", "a", "three"], 2, "invalid int"),
    (["pin", "a", "3", "--for", "0"], 2, "such as 90s, 15m"),
    (["pin", "a", "3", "--for", "2weeks"], 2, "such as 90s, 15m"),
    (["pin", "a", "3", "--for", "30d"], 2, "ttl_seconds"),
    (["pin", "b/../a", "3"], 2, r"no worker is called 'b/\.\./a'; known: \['a'\]|Not Found"),
    (["release", "b"], 2, r"no worker is called 'b'; known: \['a'\]"),
    (["rollback", "a"], 1, "no change of depth to undo"),
    (["mode", "off"], 2, "invalid choice"),
    (["mode", "inherit"], 2, "--worker"),
    (["mode", "active", "--worker", "b"], 2, "known"),
    (["pin", "a", "3", "--reason", "\udcff"], 2, "--reason: must be UTF-8 text"),
    (["rollback", "a", "--reason", "\udcff"], 2, "--reason: must be UTF-8 text"),
    (["decisions", "--last", "0"], 2, "from 1 to 1000"),
    (["decisions", "--worker", "b"], 2, "known"),
    (["explain"], 2, "name the worker"),
    (["explain", "b"], 2, "known"),
    (["status", "--token-file", "/nowhere"], 2, "--token-file"),
]


def test_mistakes_are_named(served: Served, run: Run) -> None:
    for arguments, status, said in MISTAKES:
        found, out, err = run(*arguments, url=served.url)
        assert found == status and re.search(said, err) and out == "", (arguments, err)


def test_what_answers_must_be_a_controller(run: Run) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        status, _, err = run("status", url=f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert status == 1 and "is it running (spec-controller run)?" in err and "--url" in err
    assert run("status", url="ftp://x")[0] == 2
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")

    thread = threading.Thread(target=answer)
    thread.start()
    status, _, err = run("mode", url=f"http://127.0.0.1:{listener.getsockname()[1]}")
    thread.join()
    listener.close()
    assert status == 1 and "not the answer of a controller" in err


def test_tokens(serve: Callable[..., Served], run: Run, tmp_path: Path) -> None:
    url = serve(token=CHANGE, read_token=READ).url
    files = {}
    for name, text in {"change": CHANGE, "read": READ, "wrong": "another-one"}.items():
        files[name] = str(tmp_path / name)
        (tmp_path / name).write_text(text + "\n")
    assert run("mode", url=url) == (4, "", f"spec-controller: a bearer token is needed; give {HINT}\n")
    assert run("mode", "--token-file", files["wrong"], url=url)[0] == 4
    assert run("mode", "--token-file", files["read"], url=url)[0] == 0
    status, _, err = run("mode", "frozen", "--token-file", files["read"], url=url)
    assert status == 4 and "this token is for reading" in err
    assert run("mode", "frozen", "--token-file", files["change"], url=url)[0] == 0
    assert run("explain", "a", "--token-file", files["read"], url=url)[0] == 0


HINT = "the file that holds it with --token-file"


def test_decisions_and_what_is_printed_of_a_hostile_one(served: Served, run: Run) -> None:
    for mode in ("frozen", "advisory", "frozen", "active"):
        run("mode", mode, url=served.url)
    run("pin", "a", "3", "--reason", "[bold]\x1b[31mred\x07\nnext line", url=served.url)
    out = run("decisions", "--last", "3", url=served.url)[1]
    lines = out.splitlines()
    assert len(lines) == 3 and "a mode [noted] frozen: advisory -> frozen" in lines[0]
    assert "a pin 3 [applied] pinned: pinned at 3 for 900 s: [bold]\\x1b[31mred\\x07\\nnext line" in lines[2]
    assert "\x1b" not in out and "\x1b" not in run("explain", "a", url=served.url)[1]
    assert "\x1b" not in run("workers", url=served.url)[1]
    whole = run("decisions", "--json", "--worker", "a", url=served.url)[1].splitlines()
    assert [json.loads(line)["reason"] for line in whole] == [
        "met",
        "frozen",
        "advisory",
        "frozen",
        "active",
        "pinned",
    ]


def test_a_quiet_workers_decisions_are_found_far_back(
    served: Served, run: Run, simulation: ModuleType
) -> None:
    event = served.app.state.loop.recorder.event
    clock = simulation.VirtualClock()
    busy = ControlledWorker("b", "", simulation.SimulatedWorker(clock), mode="active", rng=random.Random())
    quiet = served.app.state.loop.workers["a"]

    def shown(*arguments: str) -> list[str]:
        lines = run("decisions", "--json", "--worker", "a", *arguments, url=served.url)[1].splitlines()
        return [json.loads(line)["message"] for line in lines]

    for number in range(2500):
        event(quiet if number < 1200 else busy, "mode", "active", str(number))
    for number in range(1100):
        event(busy, "mode", "active", str(number))
    assert shown("--last", "3") == ["1197", "1198", "1199"]
    assert shown("--last", "1000") == [str(number) for number in range(200, 1200)]
    event(quiet, "mode", "active", "newest")
    assert shown("--last", "2") == ["1199", "newest"]


def test_follow_goes_on_and_survives_a_lost_stream(
    served: Served, run: Run, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Event] = []
    ended = threading.Event()

    def reopen(_: float) -> None:
        """The pause before the next try: this time the controller lets streams in again."""
        served.app.state.feed._is_closed = False

    def watch() -> None:
        with Remote(served.url) as controller:
            for event in controller.follow(0, on_loss=lambda reason: ended.set(), sleep=reopen):
                if event.name == "decision":
                    told.append(event)
                if event.body.get("reason") == "released":
                    return

    thread = threading.Thread(target=watch)
    thread.start()
    for mode in ("frozen", "active"):
        run("mode", mode, url=served.url)
    served.app.state.feed.close()
    assert ended.wait(30)
    run("mode", "released", url=served.url)
    thread.join(30)
    assert not thread.is_alive()
    assert [event.body["reason"] for event in told] == ["met", "frozen", "active", "released"]
    assert [event.cursor for event in told] == [1, 2, 3, 4]

    def only_two(*_: Any, **__: Any) -> Iterator[Event]:
        yield from told[:2]
        raise KeyboardInterrupt

    monkeypatch.setattr(Remote, "follow", only_two)
    status, out, _ = run("decisions", "--follow", "--last", "1", url=served.url)
    assert status == 0 and [line.split(": ")[0].split()[-1] for line in out.splitlines()] == [
        "released",
        "met",
        "frozen",
    ]


def test_refused_streams_say_so(serve: Callable[..., Served]) -> None:
    served = serve(token=CHANGE)
    with pytest.raises(remote.RemoteError, match="--token-file") as refusal, Remote(served.url) as controller:
        next(controller.follow(0, on_loss=print))
    assert refusal.value.status == 4


def test_events_come_whole_however_they_are_cut() -> None:
    text = 'event: a\ndata: {"x": "é\u2028"}\nid: 7\n\n: note\n\n'.encode()
    text += b'event: b\r\ndata:{"y":1}\r\n\r\nevent: c\ndata: {'
    for size in (1, 2, 3, 5, 1000):
        cut = [text[i : i + size] for i in range(0, len(text), size)]
        assert list(parse_events(cut)) == [Event("a", 7, {"x": "é\u2028"}), Event("b", None, {"y": 1})]


def test_times_and_text() -> None:
    assert [duration(text) for text in ("90", "90s", "1.5m", "8h", "1d")] == [90, 90, 90, 28800, 86400]
    assert printable("ok é\x1b[2J\u202e") == "ok é\\x1b[2J\\u202e"
