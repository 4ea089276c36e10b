"""The official openai client against a worker: sync, async, streaming, both APIs, and errors as its own exceptions.

    python bench/clients/openai_client.py http://127.0.0.1:8100/v1 MODEL

Needs nothing but the `openai` package; runs in an environment of its own.
"""

import asyncio
import sys
from typing import Any

import openai

QUESTION: Any = [{"role": "user", "content": "Count from one to ten in words, separated by commas."}]


def check_sync(client: openai.OpenAI, model: str) -> None:
    """Whole answers and streams agree; usage, stops, models and text completions are there."""
    assert [card.id for card in client.models.list()] == [model]
    ask: dict[str, Any] = {
        "model": model,
        "messages": QUESTION,
        "temperature": 0,
        "max_completion_tokens": 32,
    }
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 0
    assert len(text) > 8, text
    stop = text[5:7]
    stopped = client.chat.completions.create(**ask, stop=[stop])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == text.partition(stop)[0]
    completion = client.completions.create(
        model=model, prompt=["One, two,", "Red, green,"], max_tokens=8, temperature=0
    )
    assert [choice.index for choice in completion.choices] == [0, 1]


async def check_async(url: str, model: str) -> None:
    """Streams side by side."""

    async def read(client: openai.AsyncOpenAI, seed: int) -> int:
        stream = await client.chat.completions.create(
            model=model, messages=QUESTION, seed=seed, max_tokens=24, stream=True
        )
        return sum([bool(chunk.choices and chunk.choices[0].delta.content) async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        pieces = await asyncio.gather(*(read(client, seed) for seed in range(4)))
    assert all(pieces), pieces


def check_errors(client: openai.OpenAI, model: str) -> None:
    """A client's mistake arrives as the client's own exception, naming the field."""
    try:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)
    except openai.BadRequestError as error:
        assert error.param == "temperature", error.param
    else:
        raise AssertionError("a negative temperature was taken")
    try:
        client.chat.completions.create(model="another", messages=QUESTION)
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("an unknown model was taken")


def main() -> None:
    """Run every check; the first that fails ends the program."""
    url, model = sys.argv[1:]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        check_sync(client, model)
        check_errors(client, model)
    asyncio.run(check_async(url, model))
    print(f"openai {openai.__version__}: sync, async, streaming, stops, completions and errors are fine")


if __name__ == "__main__":
    main()
