"""From a checked body to running requests: encode the prompts, check them against the model, submit all or none.

What both APIs share on the way in. Knows no wire format but the names of the fields it complains about.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from worker.api.errors import ApiError
from worker.api.generation import Generation
from worker.api.live import LiveRequests
from worker.api.prompts import Prompt
from worker.api.sampling import SamplingFields
from worker.api.served import ServedModel
from worker.metrics import ServerMetrics
from worker.tokenization import TokenizationError

INLINE_CHARACTERS = 2000
"""Longer prompts are encoded on another thread, so that no client stalls the others."""


class Limits(NamedTuple):
    """How many tokens an answer may and must have. Where they contradict each other the maximum holds."""

    max_tokens: int | None
    """None: as many as the context leaves."""
    min_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Intake:
    """What makes generations out of prompts."""

    model: ServedModel
    metrics: ServerMetrics
    max_waiting_requests: int
    clock: Callable[[], float] = time.monotonic
    live: LiveRequests = field(default_factory=LiveRequests)

    async def generation(
        self, prompt: Prompt, sampling: SamplingFields, limits: Limits, seed: int | None, prefix: str = ""
    ) -> Generation:
        """Make a generation that is not submitted yet. `prefix` goes before the names of sampling fields."""
        ids = list(prompt.token_ids)
        if prompt.text:
            tokenizer, text = self.model.tokenizer, prompt.text
            ids = await self.encode(lambda: tokenizer.encode(text), len(text), prompt.param)
        return self.prepare(ids, sampling, limits, seed, param=prompt.param, prefix=prefix)

    async def encode(self, work: Callable[[], list[int]], characters: int, param: str) -> list[int]:
        """Run the tokenizer, on another thread where it may take long (ApiError 400 when it refuses)."""
        try:
            return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)
        except TokenizationError as error:
            raise ApiError(400, f"{param}: {error}", param=param, code="invalid_value") from None

    def prepare(
        self,
        ids: list[int],
        sampling: SamplingFields,
        limits: Limits,
        seed: int | None,
        *,
        param: str,
        prefix: str = "",
    ) -> Generation:
        """Check a prompt against the model and clip the output to what the context leaves.

        A prompt that fits is never refused because of `max_tokens`: the answer ends with reason "length" when
        the context is full.

        Raises:
            ApiError: 400 naming the field and its bound.
        """
        engine, tokenizer = self.model.engine, self.model.tokenizer
        if not ids:
            raise ApiError(400, f"{param}: the prompt is empty", param=param, code="invalid_value")
        _check_vocabulary(ids, tokenizer.vocab_size, param)
        _check_vocabulary(sampling.stop_token_ids or (), tokenizer.vocab_size, f"{prefix}stop_token_ids")
        context = engine.info.max_context_tokens
        left = context - len(ids)
        if left < 1:
            raise ApiError(
                400,
                f"{param}: the prompt has {len(ids)} tokens; prompt and answer together may have {context}",
                param=param,
                code="context_length_exceeded",
            )
        params = sampling.sampling_params(
            max_tokens=min(limits.max_tokens or left, left), min_tokens=limits.min_tokens or 0, seed=seed
        )
        return Generation(
            engine,
            tokenizer,
            ids,
            params,
            stops=sampling.stop or (),
            timeout_seconds=sampling.timeout_seconds,
            metrics=self.metrics,
            clock=self.clock,
        )

    def check_count(self, prompts: Sequence[Prompt]) -> None:
        """Raise ApiError (400) for a list that could never fit the queue."""
        capacity = self.model.engine.info.max_running_requests + self.max_waiting_requests
        if len(prompts) > capacity:
            param = prompts[0].param
            raise ApiError(400, f"{param}: a list may have at most {capacity} prompts here", param=param)

    def submit_all(self, generations: Sequence[Generation]) -> None:
        """Submit all or none: a batch that does not fit the queue is taken back."""
        self.live.add(generations)
        try:
            for generation in generations:
                generation.submit()
        except BaseException:
            self.close_all(generations)
            raise

    def close_all(self, generations: Sequence[Generation]) -> None:
        """Nobody reads these any more: what still runs is aborted, and their ids are forgotten."""
        self.live.remove(generations)
        for generation in generations:
            generation.close()


def _check_vocabulary(ids: Sequence[int], vocab_size: int, param: str) -> None:
    if ids and max(ids) >= vocab_size:
        raise ApiError(
            400,
            f"{param}: token id {max(ids)} is not below the vocabulary's size {vocab_size}",
            param=param,
            code="invalid_value",
        )
