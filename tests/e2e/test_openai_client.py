"""The official `openai` client against a real worker on a real socket: sync, async, streaming, errors."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from worker.api.served import ServedModel
from worker.build import build_engine
from worker.config import EngineConfig, ModelConfig, SpecConfig, WorkerConfig
from worker.server import create_app
from worker.tokenization import Tokenizer

MESSAGES = [{"role": "user", "content": "Tell me, tell me, tell me"}]
ASK = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def url(tiny_model_dir: Callable[..., Path]) -> Iterator[str]:
    directory = tiny_model_dir(max_positions=512)
    config = WorkerConfig(
        model=ModelConfig(path=str(directory), name="tiny", device="cpu", dtype="float64", threads=1),
        spec=SpecConfig(candidate_steps=[0, 2], num_steps=2),
        engine=EngineConfig(
            max_running_requests=2, max_waiting_requests=0, max_context_tokens=512, profile_seconds=0
        ),
    )
    engine = build_engine(config)
    engine.start()
    app = create_app(ServedModel(engine, Tokenizer.load(directory)), config, registry=CollectorRegistry())
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_config=None))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    give_up = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()
    engine.shutdown(0)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "slipstream"


def test_answer_and_stream_agree(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, max_completion_tokens=40)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40
    stream = client.chat.completions.create(
        **ASK, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage == answer.usage


def test_async_streams_side_by_side_equal_each_alone(url: str, client: openai.OpenAI) -> None:
    async def read(async_client: openai.AsyncOpenAI, question: str) -> str:
        ask = ASK | {"messages": [{"role": "user", "content": question}]}
        stream = await async_client.chat.completions.create(**ask, max_tokens=30, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def both() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as async_client:
            return list(await asyncio.gather(*(read(async_client, question) for question in ("one", "two"))))

    alone = [
        client.chat.completions.create(
            **ASK | {"messages": [{"role": "user", "content": question}]}, max_tokens=30
        ).choices[0].message.content
        for question in ("one", "two")
    ]  # fmt: skip
    assert asyncio.run(both()) == alone


def test_errors_arrive_as_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASK, stop=[""])
    assert refused.value.param == "stop.0"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**ASK | {"model": "gpt-4"})


def wait_until_nothing_runs(url: str) -> None:
    """A closed stream is noticed by the server a moment later."""
    give_up = time.monotonic() + 20
    while "spec_requests_running 0.0" not in httpx.get(url.removesuffix("/v1") + "/metrics").text:
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_a_full_queue_is_a_rate_limit(client: openai.OpenAI, url: str) -> None:
    streams = [client.chat.completions.create(**ASK, stream=True) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(**ASK)
    assert int(refused.value.response.headers["retry-after"]) >= 1
    for stream in streams:
        stream.close()
    wait_until_nothing_runs(url)


def test_closing_a_stream_makes_room(client: openai.OpenAI, url: str) -> None:
    stream = client.chat.completions.create(**ASK, stream=True)
    next(iter(stream))
    stream.close()
    wait_until_nothing_runs(url)
