"""The generation routes: from a body to a running request, and from its output to an answer.

Each reads top to bottom as a request goes: check, encode, submit, answer. The formats are `chat`'s, `completions`' and
`generate`'s, the way in is `intake`'s, the waiting is `generation`'s and `streaming`'s.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.responses import Response

from worker.api import chat, completions, generate
from worker.api.errors import ApiError, from_validation, read_json_object
from worker.api.generation import CLIENT_CLOSED_REQUEST, Generation, failure_of, merged
from worker.api.intake import Intake, Limits
from worker.api.openai import OpenAIAnswer, OpenAIFields, StreamOptions
from worker.api.prompts import read_prompts
from worker.api.sampling import refuse_unsupported
from worker.api.streaming import DONE, ClientGone, EventStream, event, until_disconnect
from worker.config import MetricsLevel

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=OpenAIFields)
TURN_CHARACTERS = 30
"""About what a chat template adds to a turn: many empty turns are long, too."""
REQUEST_ID_HEADER = "X-Request-Id"
"""On every answer of a generation: the id by which it can be aborted."""


@dataclass(frozen=True, kw_only=True)
class GenerationRoutes:
    """The routes and what they share."""

    intake: Intake
    write_timeout_seconds: float
    metrics_level: MetricsLevel = "none"
    wall_clock: Callable[[], float] = time.time

    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        wanted = self._read_openai(await read_json_object(request), chat.ChatRequest, chat.UNSUPPORTED)
        messages = [message.for_template() for message in wanted.messages]
        limits = Limits(wanted.token_limit, wanted.min_tokens)
        tokenizer = self.intake.model.tokenizer
        size = sum(len(message["content"]) + TURN_CHARACTERS for message in messages)
        ids = await self.intake.encode(lambda: tokenizer.encode_chat(messages), size, "messages")
        generation = self.intake.prepare(ids, wanted, limits, wanted.seed, param="messages")
        return await self._answer_openai(request, wanted, [generation], chat.ChatAnswer, "chatcmpl")

    async def text_completions(self, request: Request) -> Response:
        """OpenAI's text completions."""
        wanted = self._read_openai(
            await read_json_object(request), completions.CompletionRequest, completions.UNSUPPORTED
        )
        limits = Limits(wanted.token_limit, wanted.min_tokens)
        prompts, _ = read_prompts(wanted.prompt, "prompt")
        self.intake.check_count(prompts)
        generations = [
            await self.intake.generation(prompt, wanted, limits, wanted.seed) for prompt in prompts
        ]
        return await self._answer_openai(request, wanted, generations, completions.CompletionAnswer, "cmpl")

    async def native_generate(self, request: Request) -> Response:
        """SGLang's native API: text or token ids in, text, token ids and counts out."""
        body = await read_json_object(request)
        _ = self.intake.model.engine  # 503 before anything is said about the body
        wanted, sampling = generate.read_body(body)
        limits = sampling.limits
        prompts, is_batch = generate.prompts_of(wanted)
        self.intake.check_count(prompts)
        generations = [
            await self.intake.generation(prompt, sampling, limits, sampling.sampling_seed, "sampling_params.")
            for prompt in prompts
        ]
        rid = wanted.rid or generations[0].id
        for index, generation in enumerate(generations):
            # Of a batch each prompt has an id of its own, and all have the body's.
            generation.names = (f"{rid}_{index}", rid) if is_batch else (rid,)
        self.intake.submit_all(generations)
        if wanted.stream:
            return self._stream(_generate_events(generations, is_batch), generations, rid)

        def answer() -> JSONResponse:
            answers = [generate.answer(generation) for generation in generations]
            return JSONResponse(answers if is_batch else answers[0])

        return await self._whole(request, generations, answer, rid)

    def _read_openai(
        self, body: Mapping[str, Any], kind: type[Body], unsupported: Mapping[str, Callable[[Any], bool]]
    ) -> Body:
        served = self.intake.model.engine.info.model
        refuse_unsupported(body, unsupported)
        try:
            wanted = kind.model_validate(body)
        except ValidationError as error:
            raise from_validation(error) from None
        if wanted.model not in (None, "", "default", served):
            raise ApiError(
                404, f"model: {wanted.model!r} is not served here, only {served!r} is",
                param="model", code="model_not_found",
            )  # fmt: skip
        return wanted

    async def _answer_openai(
        self,
        request: Request,
        wanted: OpenAIFields,
        generations: Sequence[Generation],
        kind: type[OpenAIAnswer],
        id_prefix: str,
    ) -> Response:
        answer = kind(
            generations,
            id=wanted.request_id or f"{id_prefix}-{generations[0].id}",
            model=self.intake.model.engine.info.model,
            created=int(self.wall_clock()),
            options=wanted.stream_options or StreamOptions(),
            metrics_level=wanted.per_request_spec_decode_metrics or self.metrics_level,
        )
        for generation in generations:
            generation.names = (answer.id,)
        self.intake.submit_all(generations)
        if wanted.stream:
            return self._stream(_openai_events(answer), generations, answer.id)
        return await self._whole(request, generations, lambda: _whole_openai(answer), answer.id)

    def _stream(
        self, events: AsyncGenerator[bytes, None], generations: Sequence[Generation], name: str
    ) -> EventStream:
        return EventStream(
            events,
            on_close=lambda: self.intake.close_all(generations),
            write_timeout_seconds=self.write_timeout_seconds,
            headers={REQUEST_ID_HEADER: name},
        )

    async def _whole(
        self, request: Request, generations: Sequence[Generation], answer: Callable[[], Response], name: str
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
            self.intake.close_all(generations)
        response = answer()
        response.headers[REQUEST_ID_HEADER] = name
        return response


def _whole_openai(answer: OpenAIAnswer) -> JSONResponse:
    for generation in answer.generations:
        failure = failure_of(generation)
        if failure is not None:
            return failure.response()
    return JSONResponse(answer.whole())


async def _openai_events(answer: OpenAIAnswer) -> AsyncGenerator[bytes, None]:
    opened: set[int] = set()
    async with aclosing(merged(answer.generations)) as pieces:
        async for index, piece in pieces:
            opening = None if index in opened else answer.opening(index)
            opened.add(index)
            if opening is not None:
                yield event(opening)
            if piece.text:
                yield event(answer.piece(index, piece.text))
            if piece.finish_reason is None:
                continue
            failure = failure_of(answer.generations[index])
            if failure is not None:
                yield event(failure.body())
                yield DONE
                return
            yield event(answer.closing(index, piece))
    trailing = answer.trailing()
    if trailing is not None:
        yield event(trailing)
    yield DONE


async def _generate_events(generations: Sequence[Generation], is_batch: bool) -> AsyncGenerator[bytes, None]:
    async with aclosing(merged(generations)) as pieces:
        async for index, _ in pieces:
            answer = generate.answer(generations[index])
            yield event({**answer, "index": index} if is_batch else answer)
    yield DONE
