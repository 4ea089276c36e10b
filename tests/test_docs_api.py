"""docs/api.md is true: its requests are sent to the real applications and answered as it says; no route is missing.

Real engine with a tiny model, the worker's two ports, and a controller that steers that worker.
"""

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from controller.app import create_app as create_controller
from controller.clock import SystemClock
from controller.config import ControllerConfig
from controller.worker_client import HttpWorkerClient
from worker.api.served import ServedModel
from worker.build import build_engine
from worker.config import WorkerConfig
from worker.control import create_control_app
from worker.server import create_app as create_worker
from worker.tokenization import Tokenizer

TEXT = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
SECTIONS = ("Inference port", "Control port", "Controller")
MORE = "…"
EXACT = {
    "object", "mode", "source", "title", "status", "candidate_steps", "tiers", "own", "finish_reason", "ready",
    "desired", "effective", "aborted",
}  # fmt: skip
"""Members whose very value is compared; of the others the type."""


@dataclass(frozen=True)
class Example:
    """A request of the page and the answer that it promises."""

    section: str
    request: str
    answer: str
    running: str | None
    """A request with this id runs meanwhile."""

    @property
    def line(self) -> tuple[str, str]:
        method, _, target = self.request.partition("\n")[0].partition(" ")
        return method, target


def examples() -> list[Example]:
    found: list[Example] = []
    for part in re.split(r"^## ", TEXT, flags=re.M):
        section = part.partition("\n")[0]
        blocks = re.findall(r"^```http([^\n]*)\n(.*?)^```", part, re.M | re.S)
        assert len(blocks) % 2 == 0, f"{section}: each request has an answer"
        for (tag, request), (_, answer) in zip(blocks[::2], blocks[1::2], strict=True):
            running = tag.strip().partition("running=")[2] or None
            found.append(Example(section, request.strip(), answer.strip(), running))
    return found


EXAMPLES = examples()


@dataclass
class Stage:
    """The applications, by section."""

    clients: dict[str, TestClient]
    boot_id: str
    close_feed: Callable[[], None]

    def send(self, example: Example) -> httpx.Response:
        method, target = example.line
        head, _, body = example.request.partition("\n\n")
        headers = dict(line.split(": ", 1) for line in head.splitlines()[1:])
        client = self.clients[example.section]
        if target.startswith("/v1/events"):
            threading.Timer(1.5, self.close_feed).start()  # the stream has no end of its own
        with self._running(example.running):
            answer: Any = client.request(
                method,
                target,
                content=body.replace("BOOT_ID", self.boot_id).encode() or None,
                headers=headers,
            )
        return answer  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _running(self, request_id: str | None) -> Iterator[None]:
        if request_id is None:
            yield
            return
        client = self.clients["Inference port"]
        body = {"prompt": "ab ", "max_tokens": 1500, "ignore_eos": True, "request_id": request_id}
        thread = threading.Thread(target=lambda: client.post("/v1/completions", json=body))
        thread.start()
        give_up = time.monotonic() + 60
        while self.clients["Control port"].get("/v1/spec/stats").json()["queue"]["running"] == 0:
            assert time.monotonic() < give_up
        yield
        thread.join(60)


@pytest.fixture(scope="module")
def stage(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Two workers: one with clients, whose plan the page changes by hand, and one that the controller steers."""
    directory = tiny_model_dir(max_positions=2048)
    config = WorkerConfig.model_validate(
        {
            "model": {
                "path": str(directory),
                "name": "tiny",
                "device": "cpu",
                "dtype": "float64",
                "threads": 1,
            },
            "engine": {
                "max_context_tokens": 2048,
                "max_running_requests": 4,
                "profile_seconds": 0.2,
                "profile_dir": str(tmp_path_factory.mktemp("profile")),
            },
        }
    )
    threads = torch.get_num_threads()
    engines = build_engine(config), build_engine(config)
    for engine in engines:
        engine.start()
    models = [ServedModel(engine, Tokenizer.load(directory)) for engine in engines]
    controller = controller_of(create_control_app(models[1], config))
    apps = (
        create_worker(models[0], config, registry=CollectorRegistry()),
        create_control_app(models[0], config),
        controller,
    )
    with contextlib.ExitStack() as stack:
        clients = {
            name: stack.enter_context(
                TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
            )
            for name, app in zip(SECTIONS, apps, strict=True)
        }
        give_up = time.monotonic() + 60
        while clients["Controller"].get("/v1/workers/local/depth").json()["source"] != "policy":
            assert time.monotonic() < give_up
            time.sleep(0.05)
        yield Stage(clients, engines[0].info.boot_id, controller.state.feed.close)
    for engine in engines:
        engine.shutdown(0)
    torch.set_num_threads(threads)


def controller_of(control: FastAPI) -> FastAPI:
    """A controller that steers one worker through its real control app."""
    http = httpx.AsyncClient(transport=httpx.ASGITransport(control), base_url="http://localhost")
    config = ControllerConfig.model_validate(
        {
            "workers": [{"id": "local", "url": "http://127.0.0.1:8101"}],
            "journal": {"path": ":memory:"},
            "guards": {"window_seconds": 3600},
        }
    )
    client = HttpWorkerClient(http, timeout_seconds=10)
    return create_controller(
        config, clock=SystemClock(), registry=CollectorRegistry(), clients={"local": client}
    )


def test_every_answer_is_what_the_page_says(stage: Stage) -> None:
    wrong = []
    for example in EXAMPLES:
        answer = stage.send(example)
        difference = compare(example.answer, answer)
        if difference is not None:
            wrong.append(f"{example.section}: {' '.join(example.line)}: {difference}")
    assert wrong == []


def test_every_route_has_an_example_and_every_example_a_route(stage: Stage) -> None:
    for section, client in stage.clients.items():
        document = client.get("/openapi.json").json()
        routes = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
        routes -= {("GET", "/openapi.json"), ("GET", "/metrics/")}
        shown = {example.line for example in EXAMPLES if example.section == section}
        covered = {route for route in routes for line in shown if fits(route, line)}
        assert routes - covered == set(), f"{section}: no example"
        assert [line for line in shown if not any(fits(route, line) for route in routes)] == []


def fits(route: tuple[str, str], line: tuple[str, str]) -> bool:
    """Whether a request line is one of a route; of two routes of one form the literal one is meant."""
    pattern = re.sub(r"\\\{[^}]+\\\}", "[^/]+", re.escape(route[1]))
    return route[0] == line[0] and re.fullmatch(pattern, line[1].partition("?")[0]) is not None


def compare(promised: str, answer: httpx.Response) -> str | None:
    """Return how an answer differs from what was promised; None: it does not."""
    head, _, body = promised.partition("\n\n")
    status, *headers = head.splitlines()
    if int(status) != answer.status_code:
        return f"status {answer.status_code}, not {status}: {answer.text[:300]}"
    media = dict(line.split(": ", 1) for line in headers).get("content-type", "application/json")
    if not answer.headers["content-type"].startswith(media):
        return f"content-type {answer.headers['content-type']}, not {media}"
    if "json" in media:
        return differs(json.loads(body), answer.json(), "")
    position = 0
    for line in body.splitlines():
        wanted = line.partition(MORE)[0]
        position = answer.text.find(wanted, position)
        if position < 0:
            return f"nowhere, in this order: {wanted!r}"
    return None


def differs(promised: Any, found: Any, where: str) -> str | None:
    """Compare members, types, and the values of `EXACT`; null stands for a value that may be missing."""
    if isinstance(promised, dict) and isinstance(found, dict):
        is_open = MORE in promised
        names = set(promised) - {MORE}
        if not is_open and names != set(found):
            return f"{where or 'the body'}: members {sorted(names ^ set(found))}"
        both = (
            differs(promised[name], found[name], f"{where}.{name}") for name in sorted(names & set(found))
        )
        return next((it for it in both if it is not None), None)
    if isinstance(promised, list) and isinstance(found, list):
        kinds = [item for item in promised if item != MORE]
        if len(kinds) == len(promised) and len(found) != len(promised):
            return f"{where}: {len(found)} items, not {len(promised)}"
        each = (
            min((differs(kind, item, f"{where}[]") or "" for kind in kinds), default="", key=len)
            for item in found
        )
        return next((it for it in each if it), None)
    if promised is None or found is None:
        return None
    if where.rpartition(".")[2] in EXACT and promised != found:
        return f"{where}: {found!r}, not {promised!r}"
    both_numbers = {type(promised), type(found)} == {int, float}
    return (
        None
        if type(promised) is type(found) or both_numbers
        else f"{where}: {found!r}, not like {promised!r}"
    )


@pytest.mark.parametrize(
    ("promised", "found"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"a": 1}, {"a": "1"}),
        ({"a": True}, {"a": 1}),
        ({"object": "x"}, {"object": "y"}),
        ([{"a": 1}, MORE], [{"a": 1}, {"b": 1}]),
        ([1, 2], [1, 2, 3]),
        ([[1]], [["1"]]),
    ],
)
def test_a_difference_is_noticed(promised: Any, found: Any) -> None:
    assert differs(promised, found, "") is not None


def test_what_may_differ_may() -> None:
    assert differs({"a": 1, MORE: 0, "c": [1, MORE]}, {"a": 2.5, "b": "x", "c": []}, "") is None
    assert differs({"a": 1}, {"a": None}, "") is None
