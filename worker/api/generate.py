"""SGLang's native `/generate` on the wire: one prompt or a list, text or token ids, and `meta_info`.

Pure functions between JSON and the engine's nouns; starts nothing and waits for nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from worker.api.errors import ApiError, from_validation
from worker.api.generation import Generation, Piece
from worker.api.sampling import (
    UNSUPPORTED_SAMPLING,
    PositiveInt,
    RequestBody,
    SamplingFields,
    Seed,
    is_falsy,
    is_number,
    refuse_unsupported,
)

DEFAULT_NEW_TOKENS = 128
MAX_PROMPTS = 1024

UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    "return_logprob": is_falsy,
    "top_logprobs_num": is_number(0),
    "token_ids_logprob": is_falsy,
    "return_hidden_states": is_falsy,
    "input_embeds": is_falsy,
    "image_data": is_falsy,
    "audio_data": is_falsy,
    "video_data": is_falsy,
    "lora_path": is_falsy,
    "custom_logit_processor": is_falsy,
}


class GenerateSampling(SamplingFields):
    """`sampling_params` of one prompt."""

    max_new_tokens: PositiveInt | None = None
    sampling_seed: Seed | None = None


def _is_text_or_texts(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise ValueError("must be a string or a list of strings")


def _is_ids_or_lists(value: Any) -> Any:
    """Accept [id, …] or [[id, …], …] of non-negative integers (bool is none)."""
    rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    for row in rows:
        if not isinstance(row, list) or any(type(item) is not int or item < 0 for item in row):
            raise ValueError("must be a list of token ids, or a list of such lists")
    return value


class GenerateRequest(RequestBody):
    """Body of `POST /generate`. Lists make a batch, and the answer is a list then."""

    text: Annotated[Any, BeforeValidator(_is_text_or_texts)] = None
    input_ids: Annotated[Any, BeforeValidator(_is_ids_or_lists)] = None
    sampling_params: dict[str, Any] | None = None
    rid: Annotated[str, Field(max_length=256)] | None = None
    stream: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of the body, as text or ids, with its sampling."""

    text: str | None
    input_ids: list[int] | None
    param: str
    """Name of the field it came from."""
    sampling: GenerateSampling

    @property
    def token_limit(self) -> int:
        """Tokens that the client allows."""
        return self.sampling.max_new_tokens or DEFAULT_NEW_TOKENS


def read_prompts(body: GenerateRequest) -> tuple[list[Prompt], bool]:
    """Return the prompts, and whether the client sent a list.

    Raises:
        ApiError: 400 unless exactly one of `text` and `input_ids` is given, and it is not an empty list.
    """
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "text, input_ids: give exactly one of them", param="text", code="invalid_value")
    sampling = _read_sampling(body.sampling_params or {})
    if body.text is not None:
        is_batch = isinstance(body.text, list)
        texts = body.text if is_batch else [body.text]
        prompts = [Prompt(text=text, input_ids=None, param="text", sampling=sampling) for text in texts]
    else:
        is_batch = bool(body.input_ids) and isinstance(body.input_ids[0], list)
        rows = body.input_ids if is_batch else [body.input_ids]
        prompts = [Prompt(text=None, input_ids=row, param="input_ids", sampling=sampling) for row in rows]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        param = "text" if body.text is not None else "input_ids"
        raise ApiError(400, f"{param}: a list must have 1 to {MAX_PROMPTS} prompts", param=param)
    if is_batch and body.stream:
        raise ApiError(400, "stream: not supported for a list of prompts", param="stream")
    return prompts, is_batch


def _read_sampling(values: dict[str, Any]) -> GenerateSampling:
    refuse_unsupported(values, UNSUPPORTED_SAMPLING, "sampling_params.")
    try:
        return GenerateSampling.model_validate(values)
    except ValidationError as error:
        raise from_validation(error, "sampling_params.") from None


def answer(generation: Generation, rid: str | None) -> dict[str, Any]:
    """Return the answer so far: in a stream too, `text` and `output_ids` are cumulative, as SGLang's clients expect."""
    return {
        "text": generation.text,
        "output_ids": list(generation.output_ids),
        "meta_info": _meta_info(generation, rid),
    }


def _meta_info(generation: Generation, rid: str | None) -> dict[str, Any]:
    """Return counts under SGLang's names.

    `spec_accept_length` is tokens per verify round, the target's own included; it is absent before the first
    round, like everything that would divide by nothing.
    """
    meta: dict[str, Any] = {
        "id": rid or generation.id,
        "finish_reason": _finish_reason(generation.finish, len(generation.output_ids)),
        "prompt_tokens": len(generation.request.prompt_ids),
        "completion_tokens": len(generation.output_ids),
        "cached_tokens": 0,
        "e2e_latency": generation.elapsed_seconds,
    }
    if generation.finish is not None:
        spec = generation.request.spec
        meta["spec_verify_ct"] = spec.rounds
        meta["spec_accept_token_num"] = spec.correct_drafts
        meta["spec_draft_token_num"] = spec.proposed_drafts
        deepest = max(spec.histogram, default=-1)
        meta["spec_accept_histogram"] = [spec.histogram.get(count, 0) for count in range(deepest + 1)]
        if spec.rounds:
            meta["spec_accept_length"] = 1 + spec.correct_drafts / spec.rounds
        if spec.proposed_drafts:
            meta["spec_accept_rate"] = spec.correct_drafts / spec.proposed_drafts
    return meta


def _finish_reason(finish: Piece | None, completion_tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.finish_reason == "length":
        return {"type": "length", "length": completion_tokens}
    if finish.finish_reason == "stop":
        return {"type": "stop", "matched": finish.matched_stop}
    return {"type": "abort", "message": finish.error or "the server is stopping; the answer ends early"}
