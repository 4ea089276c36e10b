"""The two generation routes: from a body to a running request, and from its output to an answer.

Reads top to bottom as a request goes: check, encode, submit, answer. The formats are `chat`'s and `generate`'s, the
waiting is `generation`'s and `streaming`'s.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.responses import Response

from worker.api import chat, generate
from worker.api.errors import ApiError, from_validation, read_json_object
from worker.api.generation import Generation, Piece
from worker.api.sampling import SamplingFields, refuse_unsupported
from worker.api.served import ServedModel
from worker.api.streaming import DONE, ClientGone, EventStream, event, until_disconnect
from worker.metrics import ServerMetrics
from worker.tokenization import TokenizationError

log = logging.getLogger(__name__)

INLINE_CHARACTERS = 2000
"""Longer prompts are encoded on another thread, so that no client stalls the others."""
CLIENT_CLOSED_REQUEST = 499
"""Status of an answer that nobody will read."""


@dataclass(frozen=True, kw_only=True)
class GenerationRoutes:
    """The routes and what they share."""

    model: ServedModel
    metrics: ServerMetrics
    max_waiting_requests: int
    write_timeout_seconds: float
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = await read_json_object(request)
        engine, tokenizer = self.model.engine, self.model.tokenizer
        refuse_unsupported(body, chat.UNSUPPORTED)
        try:
            wanted = chat.ChatRequest.model_validate(body)
        except ValidationError as error:
            raise from_validation(error) from None
        name = engine.info.model
        if wanted.model not in (None, "", "default", name):
            raise ApiError(
                404, f"model: {wanted.model!r} is not served here, only {name!r} is",
                param="model", code="model_not_found",
            )  # fmt: skip
        messages = [message.for_template() for message in wanted.messages]
        size = sum(len(message["content"]) for message in messages)
        ids = await _encode(lambda: tokenizer.encode_chat(messages), size, "messages")
        generation = self._prepare(ids, wanted, wanted.token_limit, wanted.seed, "messages")
        options = wanted.stream_options or chat.StreamOptions()
        answer = chat.ChatAnswer(generation, model=name, created=int(self.wall_clock()), options=options)
        generation.submit()
        if wanted.stream:
            return self._stream(_chat_events(generation, answer), generation)
        return await self._whole(
            request, [generation], lambda: JSONResponse(_checked_chat(generation, answer))
        )

    async def native_generate(self, request: Request) -> Response:
        """`POST /generate`: SGLang's native API."""
        body = await read_json_object(request)
        refuse_unsupported(body, generate.UNSUPPORTED)
        try:
            wanted = generate.GenerateRequest.model_validate(body)
        except ValidationError as error:
            raise from_validation(error) from None
        prompts, is_batch = generate.read_prompts(wanted)
        capacity = self.model.engine.info.max_running_requests + self.max_waiting_requests
        if len(prompts) > capacity:
            param = prompts[0].param
            raise ApiError(400, f"{param}: a list may have at most {capacity} prompts here", param=param)
        generations = [await self._prepare_prompt(prompt) for prompt in prompts]
        _submit_all(generations)
        if wanted.stream:
            return self._stream(_generate_events(generations[0], wanted.rid), generations[0])

        def answer() -> JSONResponse:
            answers = [generate.answer(generation, wanted.rid) for generation in generations]
            return JSONResponse(answers if is_batch else answers[0])

        return await self._whole(request, generations, answer)

    async def _prepare_prompt(self, prompt: generate.Prompt) -> Generation:
        ids = prompt.input_ids
        if ids is None:
            tokenizer, text = self.model.tokenizer, prompt.text or ""
            ids = await _encode(lambda: tokenizer.encode(text), len(text), prompt.param) if text else []
        seed = prompt.sampling.sampling_seed
        return self._prepare(ids, prompt.sampling, prompt.token_limit, seed, prompt.param)

    def _prepare(
        self, ids: list[int], sampling: SamplingFields, limit: int | None, seed: int | None, param: str
    ) -> Generation:
        """Check the prompt against the model and clip the output to what the context leaves.

        A prompt that fits is never refused because of `max_tokens`: the answer ends with reason "length" when
        the context is full.
        """
        engine, tokenizer = self.model.engine, self.model.tokenizer
        if not ids:
            raise ApiError(400, f"{param}: the prompt is empty", param=param, code="invalid_value")
        vocab_size = tokenizer.vocab_size
        if max(ids) >= vocab_size:
            raise ApiError(
                400,
                f"{param}: token id {max(ids)} is not below the vocabulary's size {vocab_size}",
                param=param,
            )
        context = engine.info.max_context_tokens
        left = context - len(ids)
        if left < 1:
            raise ApiError(
                400,
                f"{param}: the prompt has {len(ids)} tokens; prompt and answer together may have {context}",
                param=param,
                code="context_length_exceeded",
            )
        params = sampling.sampling_params(max_tokens=min(limit or left, left), seed=seed)
        return Generation(engine, tokenizer, ids, params, metrics=self.metrics, clock=self.clock)

    def _stream(self, events: AsyncGenerator[bytes, None], generation: Generation) -> EventStream:
        return EventStream(
            events, on_close=generation.close, write_timeout_seconds=self.write_timeout_seconds
        )

    async def _whole(
        self, request: Request, generations: list[Generation], answer: Callable[[], Response]
    ) -> Response:
        """Wait for every generation, then answer; all are aborted when the client leaves."""

        async def collect() -> None:
            await asyncio.gather(*(generation.collect() for generation in generations))

        try:
            await until_disconnect(request.receive, collect())
        except ClientGone:
            log.info("client left before its answer was complete")
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            for generation in generations:
                generation.close()
        return answer()


async def _encode(work: Callable[[], list[int]], characters: int, param: str) -> list[int]:
    try:
        return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)
    except TokenizationError as error:
        raise ApiError(400, f"{param}: {error}", param=param, code="invalid_value") from None


def _submit_all(generations: list[Generation]) -> None:
    """Submit all or none: a batch that does not fit the queue is taken back."""
    try:
        for generation in generations:
            generation.submit()
    except ApiError:
        for generation in generations:
            generation.close()
        raise


def _failure(finish: Piece) -> ApiError | None:
    """Return the error that a request's end amounts to, None for an ordinary end."""
    if finish.finish_reason == "error":
        return ApiError(500, finish.error or "the generation failed", code="generation_failed")
    if finish.finish_reason == "abort":
        return ApiError(503, "the server is stopping; the answer ends early", code="aborted")
    return None


def _checked_chat(generation: Generation, answer: chat.ChatAnswer) -> dict[str, object]:
    failure = _failure(generation.finish) if generation.finish else None
    if failure is not None:
        raise failure
    return answer.whole()


async def _chat_events(generation: Generation, answer: chat.ChatAnswer) -> AsyncGenerator[bytes, None]:
    opened = False
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            if not opened:
                yield event(answer.opening())
                opened = True
            if piece.text:
                yield event(answer.piece(piece.text))
            if piece.finish_reason is None:
                continue
            failure = _failure(piece)
            yield event(failure.body() if failure else answer.closing(piece.finish_reason))
            trailing = answer.trailing_usage()
            if trailing is not None and failure is None:
                yield event(trailing)
    yield DONE


async def _generate_events(generation: Generation, rid: str | None) -> AsyncGenerator[bytes, None]:
    async with aclosing(generation.pieces()) as pieces:
        async for _ in pieces:
            yield event(generate.answer(generation, rid))
    yield DONE
