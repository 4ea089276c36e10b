"""Clients that leave or stop reading, on real sockets: the engine is told at once, the others are not disturbed."""

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from worker.engine_thread import EngineThread
from worker.request import TokenChunk

Live = Callable[[FastAPI], int]
WaitUntil = Callable[[Callable[[], bool]], None]

LONG = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 500}


def open_request(port: int, path: str, body: Any) -> socket.socket:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.socket()
    connection.settimeout(20)
    connection.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVBUF, 4096
    )  # so that a client that stops reading is noticed soon
    connection.connect(("127.0.0.1", port))
    connection.sendall(head.encode() + content)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        data += connection.recv(65536)
    return data


def test_streams_that_are_dropped_free_everything(
    app: FastAPI, engine: EngineThread, live: Live, wait_until: WaitUntil
) -> None:
    port = live(app)
    before = engine.stats().requests_finished.get("abort", 0)
    # More than fit at once: some are dropped while they wait in the queue.
    body = {"text": "abc", "sampling_params": LONG, "stream": True}
    dropped = [open_request(port, "/generate", body) for _ in range(8)]
    read_until(dropped[0], b"data: ")
    for connection in dropped:
        connection.close()
    wait_until(lambda: engine.stats().queue.running + engine.stats().queue.waiting == 0)
    queue = engine.stats().queue
    assert queue.kv_tokens_free == queue.kv_tokens_total
    assert engine.stats().requests_finished["abort"] > before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "abc"}),
        ("/generate", {"text": ["abc", "def"]}),
        ("/generate", {"text": "abc", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
    ],
)
def test_leaving_before_the_first_token_aborts(
    scripted_app: FastAPI, scripted: Any, live: Live, wait_until: WaitUntil, path: str, body: Any
) -> None:
    connection = open_request(live(scripted_app), path, body)
    wait_until(lambda: bool(scripted.submitted))
    assert scripted.aborted == []
    connection.close()
    wait_until(lambda: len(scripted.aborted) == len(scripted.submitted))
    assert scripted.aborted == [request.id for request in scripted.submitted]


def test_a_finished_request_is_not_aborted(scripted_app: FastAPI, scripted: Any, live: Live) -> None:
    scripted.script = [TokenChunk((72,), "length")]
    connection = open_request(live(scripted_app), "/generate", {"text": "abc", "stream": True})
    read_until(connection, b"[DONE]")
    connection.close()
    assert scripted.aborted == []


def test_a_client_that_stops_reading_is_dropped(
    scripted_app: FastAPI, scripted: Any, live: Live, wait_until: WaitUntil
) -> None:
    port = live(scripted_app)
    connection = open_request(
        port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}
    )
    wait_until(lambda: bool(scripted.submitted))
    request = scripted.submitted[0]

    def feed_until_dropped() -> bool:
        request.sink(TokenChunk(tuple(b"x" * 100_000)))
        return bool(scripted.aborted)

    wait_until(feed_until_dropped)
    assert scripted.aborted == [request.id]
    connection.close()


def test_a_slow_reader_gets_everything_in_fewer_pieces(
    scripted_app: FastAPI, scripted: Any, live: Live
) -> None:
    scripted.script = [TokenChunk((97,)) for _ in range(500)] + [TokenChunk((98,), "stop", matched_stop=98)]
    port = live(scripted_app)
    connection = open_request(port, "/generate", {"text": "abc", "stream": True})
    events = read_until(connection, b"[DONE]").split(b"data: ")[1:-1]
    connection.close()
    # The 501 chunks came before anybody read: they are merged, and nothing is lost.
    assert len(events) == 1
    answer, _ = json.JSONDecoder().raw_decode(events[0].decode())
    assert answer["text"] == "a" * 500
    assert answer["meta_info"]["completion_tokens"] == 501


def test_health_answers_while_the_engine_is_busy(app: FastAPI, engine: EngineThread, live: Live) -> None:
    port = live(app)
    busy = open_request(port, "/generate", {"text": "abc", "sampling_params": LONG, "stream": True})
    read_until(busy, b"data: ")
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in read_until(connection, b"}")
    busy.close()
