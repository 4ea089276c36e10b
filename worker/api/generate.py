"""SGLang's native `/generate` on the wire: one prompt or a list, text or token ids, and `meta_info`.

Pure functions between JSON and the engine's nouns; starts nothing and waits for nothing.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from worker.api.errors import ApiError, from_validation
from worker.api.generation import Generation, failure_of
from worker.api.intake import Limits
from worker.api.prompts import IdsField, Prompt, TextField, read_prompts
from worker.api.sampling import (
    UNSUPPORTED_SAMPLING,
    PositiveInt,
    RequestBody,
    RequestId,
    SamplingFields,
    Seed,
    is_falsy,
    is_number,
    refuse_unsupported,
)

DEFAULT_NEW_TOKENS = 128
OWN_FIELDS = ("num_steps", "speculation", "timeout_seconds")
"""Not SGLang's: taken from the body as well as from `sampling_params`, which wins."""

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


SYNONYMS = {"seed": "sampling_seed", "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
"""Names that the other API has for the same; `/generate`'s own win."""


class GenerateSampling(SamplingFields):
    """`sampling_params` of the prompts."""

    max_new_tokens: PositiveInt | None = None
    min_new_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """No end-of-sequence or stop token is drawn before this many tokens; stop strings hold at once."""
    sampling_seed: Seed | None = None

    @property
    def limits(self) -> Limits:
        """How long the answer may and must be."""
        return Limits(self.max_new_tokens or DEFAULT_NEW_TOKENS, self.min_new_tokens)


class GenerateRequest(RequestBody):
    """Body of `POST /generate`. Lists make a batch, and the answer is a list then."""

    text: TextField = None
    input_ids: IdsField = None
    sampling_params: dict[str, Any] | None = None
    rid: RequestId | None = None
    """An id of the client's own, for aborting. Of a batch the prompts have `<rid>_<index>` beside it."""
    stream: bool | None = None


def read_body(body: Mapping[str, Any]) -> tuple[GenerateRequest, GenerateSampling]:
    """Return the checked body and its sampling.

    Raises:
        ApiError: 400 naming the field at fault.
    """
    refuse_unsupported(body, UNSUPPORTED)
    try:
        wanted = GenerateRequest.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    own = {name: body[name] for name in OWN_FIELDS if body.get(name) is not None}
    values = own | {k: v for k, v in (wanted.sampling_params or {}).items() if v is not None}
    values = {name: values[other] for other, name in SYNONYMS.items() if other in values} | values
    refuse_unsupported(values, UNSUPPORTED_SAMPLING, "sampling_params.")
    try:
        return wanted, GenerateSampling.model_validate(values)
    except ValidationError as error:
        raise from_validation(error, "sampling_params.") from None


def prompts_of(body: GenerateRequest) -> tuple[list[Prompt], bool]:
    """Return the prompts, and whether the client sent a list.

    Raises:
        ApiError: 400 unless exactly one of `text` and `input_ids` is given, and it is not an empty list.
    """
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "text, input_ids: give exactly one of them", param="text", code="invalid_value")
    if body.text is not None:
        return read_prompts(body.text, "text")
    return read_prompts(body.input_ids, "input_ids")


def answer(generation: Generation) -> dict[str, Any]:
    """Return the answer so far: in a stream too, `text` and `output_ids` are cumulative, as SGLang's clients expect."""
    return {
        "text": generation.text,
        "output_ids": list(generation.output_ids),
        "meta_info": _meta_info(generation),
    }


def _meta_info(generation: Generation) -> dict[str, Any]:
    """Return counts under SGLang's names.

    `spec_accept_length` is tokens per verify round, the target's own included; it is absent before the first
    round, like everything that would divide by nothing.
    """
    meta: dict[str, Any] = {
        "id": generation.names[0],
        "finish_reason": _finish_reason(generation),
        "prompt_tokens": len(generation.request.prompt_ids),
        "completion_tokens": len(generation.output_ids),
        "cached_tokens": generation.request.cached_tokens,
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


def _finish_reason(generation: Generation) -> dict[str, Any] | None:
    finish = generation.finish
    if finish is None:
        return None
    if finish.finish_reason == "length":
        return {"type": "length", "length": len(generation.output_ids)}
    if finish.finish_reason == "stop":
        return {"type": "stop", "matched": finish.matched_stop}
    failure = failure_of(generation)
    return {"type": "abort", "message": failure.message if failure else finish.error}
