"""The client's errors where no worker is needed to see them: addresses and versions."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from controller.worker_client import BadAnswer, HttpWorkerClient, Unreachable
from worker.protocol import PROTOCOL_VERSION


def client_of(answer: Callable[[httpx.Request], httpx.Response]) -> HttpWorkerClient:
    http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://localhost")
    return HttpWorkerClient(http, timeout_seconds=5)


@pytest.mark.parametrize(
    "error",
    [
        OSError("no route"),
        OverflowError("getsockaddrarg: port must be 0-65535."),
        httpx.InvalidURL("bad port"),
    ],
)
def test_whatever_keeps_a_request_from_being_made_is_unreachable(error: Exception) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(Unreachable, match=str(error)):
        asyncio.run(client_of(fail).stats())


def test_another_protocol_is_named_before_its_fields() -> None:
    newer = PROTOCOL_VERSION + 1
    client = client_of(lambda _: httpx.Response(200, json={"protocol_version": newer, "other": 1}))
    for call in (client.info, client.stats):
        with pytest.raises(BadAnswer, match=f"speaks protocol {newer}, this controller {PROTOCOL_VERSION}"):
            asyncio.run(call())
