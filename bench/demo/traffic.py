"""The clients: concurrent streaming chats against the worker's public endpoint, for the length of a phase.

Knows the HTTP API of the worker as any client does, and nothing of speculation.
"""

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

from bench.demo.phases import Kind, Phase
from bench.demo.processes import DemoError

REQUEST_TIMEOUT = httpx.Timeout(120.0, connect=10.0)
"""Generous: on a busy machine the first token of the eighth stream waits for seven prefills."""


class RequestFailed(DemoError):
    """A request was not served as it should be."""


@dataclass
class Traffic:
    """Sends the phases' requests; texts go round and round over the whole demo."""

    client: httpx.AsyncClient
    """Its base URL is the worker's."""
    model: str
    finished_total: int = 0
    _prompts: dict[str, Iterator[str]] = field(default_factory=dict)
    _seeds: Iterator[int] = field(default_factory=itertools.count)

    async def run(self, phase: Phase) -> None:
        """Keep `phase.concurrency` streams busy until the phase is over; running ones are then broken off.

        Breaking off is a disconnect, after which the worker frees the request's slot at once.

        Raises:
            RequestFailed: the first failure of any stream.
        """
        try:
            async with asyncio.timeout(phase.seconds):
                async with asyncio.TaskGroup() as streams:
                    for _ in range(phase.concurrency):
                        streams.create_task(self._stream(phase.kind))
        except TimeoutError:
            return
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _stream(self, kind: Kind) -> None:
        while True:
            await self._request(kind, self._next_prompt(kind))
            self.finished_total += 1

    def _next_prompt(self, kind: Kind) -> str:
        return next(self._prompts.setdefault(kind.name, itertools.cycle(kind.prompts())))

    async def _request(self, kind: Kind, prompt: str) -> None:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": kind.temperature,
            "max_tokens": kind.max_tokens,
            "seed": next(self._seeds),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            stream = self.client.stream("POST", "/v1/chat/completions", json=body, timeout=REQUEST_TIMEOUT)
            async with stream as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise RequestFailed(f"a {kind.name} request got {response.status_code}: {text[:500]}")
                await _read_to_end(kind, response)
        except httpx.HTTPError as error:
            raise RequestFailed(f"a {kind.name} request failed: {type(error).__name__}: {error}") from error


async def _read_to_end(kind: Kind, response: httpx.Response) -> None:
    """Read the event stream; RequestFailed unless it ends in order, with a finish reason and a usage."""
    finish_reason, usage = None, None
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise RequestFailed(f"a {kind.name} stream ended with an error: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            finish_reason = choice.get("finish_reason") or finish_reason
    if finish_reason not in ("stop", "length") or not usage or usage["completion_tokens"] < 1:
        raise RequestFailed(f"a {kind.name} stream ended with finish reason {finish_reason}, usage {usage}")
