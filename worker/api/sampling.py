"""Sampling fields that both generation APIs share: their bounds, what is refused, and the way to `SamplingParams`.

Numbers are strict (`true` is not 1). A field that would change the output and is not supported is refused by
name, never ignored; unknown fields are tolerated, because clients send many harmless ones.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from worker.api.errors import ApiError
from worker.request import SamplingParams

GREEDY_BELOW = 1e-5
"""A lower temperature is greedy: dividing logits by it would overflow."""

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS = 1.0, 24 * 3600.0

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) or value is None:
        return value
    raise ValueError("must be a string or a list of strings")


_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
StopField = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]] | None,
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_list),
    WithJsonSchema(
        {"anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOPS}, {"type": "null"}]}
    ),
]  # fmt: skip
"""One string or several; an empty list is the same as none."""


class RequestBody(BaseModel):
    """Base of the request bodies: strict, but open to unknown fields."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class SamplingFields(RequestBody):
    """Fields with the same name and meaning in both APIs; null is the same as absent."""

    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """-1 and 0 keep all."""
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    ignore_eos: bool | None = None
    stop: StopField = None
    """The answer ends before the first of these strings (by where it begins, then the longer one)."""
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    num_steps: Annotated[int, Field(ge=0, le=64)] | None = None
    """The request's own cap on drafts per round. Its text does not depend on it."""
    speculation: bool | None = None
    """false decodes plainly, the same as `num_steps: 0`."""
    timeout_seconds: (
        Annotated[float, Field(ge=MIN_TIMEOUT_SECONDS, le=MAX_TIMEOUT_SECONDS, allow_inf_nan=False)] | None
    ) = None
    """The request is ended this long after its arrival, wherever it is; what it has said by then is the answer."""

    @property
    def max_num_steps(self) -> int | None:
        """The lower of the two caps, None for no cap."""
        return 0 if self.speculation is False else self.num_steps

    def sampling_params(self, *, max_tokens: int, min_tokens: int, seed: int | None) -> SamplingParams:
        """Return what the engine needs; absent fields get the defaults documented there."""
        temperature = 1.0 if self.temperature is None else self.temperature
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            # The engine's seeds have 63 bits; clients may send any signed 64-bit number.
            seed=None if seed is None else seed & (2**63 - 1),
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            min_tokens=min(min_tokens, max_tokens),
            max_num_steps=self.max_num_steps,
        )


RequestId = Annotated[str, Field(pattern=r"^[!-~]{1,256}$")]
"""Printable ASCII without spaces: it goes into a header and a path."""

Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


def is_number(*allowed: float) -> Callable[[Any], bool]:
    """Return a predicate: the value is one of these numbers (a bool is not)."""
    return lambda value: not isinstance(value, bool) and isinstance(value, int | float) and value in allowed


def is_falsy(value: Any) -> bool:
    """Whether the value asks for nothing: false, 0, or an empty string, list or object."""
    return not value


UNSUPPORTED_SAMPLING: Mapping[str, Callable[[Any], bool]] = {
    "stop_regex": is_falsy,
    "n": is_number(1),
    "presence_penalty": is_number(0),
    "frequency_penalty": is_number(0),
    "repetition_penalty": is_number(1),
    "length_penalty": is_number(1),
    "logit_bias": is_falsy,
    "bad_words": is_falsy,
    "allowed_token_ids": is_falsy,
    "typical_p": is_number(1),
    "json_schema": is_falsy,
    "regex": is_falsy,
    "ebnf": is_falsy,
    "structural_tag": is_falsy,
    "custom_params": is_falsy,
    "skip_special_tokens": lambda value: value is True,
    "no_stop_trim": is_falsy,
    "include_stop_str_in_output": is_falsy,
    "use_beam_search": is_falsy,
}
"""Fields not supported yet, each with the values that ask for nothing and pass."""


def refuse_unsupported(
    body: Mapping[str, Any], unsupported: Mapping[str, Callable[[Any], bool]], prefix: str = ""
) -> None:
    """Raise ApiError (400, naming the field) when the body asks for something that is not supported."""
    for name, asks_for_nothing in unsupported.items():
        value = body.get(name)
        if value is not None and not asks_for_nothing(value):
            raise ApiError(
                400,
                f"{prefix}{name}: this value is not supported; leave the field out",
                param=f"{prefix}{name}",
                code="unsupported_parameter",
            )
