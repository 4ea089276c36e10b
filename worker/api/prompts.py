"""Prompts as bodies carry them: text or token ids, one or a list.

Shapes only; what a model makes of them is `intake`'s business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from worker.api.errors import ApiError

MAX_PROMPTS = 1024

TEXT_SCHEMA = {"type": "string", "minLength": 1}
IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _list_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": MAX_PROMPTS}


def is_text_or_texts(value: Any) -> bool:
    """Whether it is a string or a list of strings."""
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    )


def is_ids_or_lists(value: Any) -> bool:
    """Whether it is [id, …] or [[id, …], …] of non-negative integers (bool is none)."""
    rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    return all(isinstance(row, list) and all(type(item) is int and item >= 0 for item in row) for row in rows)


def _check_texts(value: Any) -> Any:
    if value is None or is_text_or_texts(value):
        return value
    raise ValueError("must be a string or a list of strings")


def _check_ids(value: Any) -> Any:
    if value is None or is_ids_or_lists(value):
        return value
    raise ValueError("must be a list of token ids, or a list of such lists")


def _check_either(value: Any) -> Any:
    if is_text_or_texts(value) or is_ids_or_lists(value):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


TextField = Annotated[
    Any,
    BeforeValidator(_check_texts),
    WithJsonSchema({"anyOf": [TEXT_SCHEMA, _list_of(TEXT_SCHEMA), {"type": "null"}]}),
]
IdsField = Annotated[
    Any,
    BeforeValidator(_check_ids),
    WithJsonSchema({"anyOf": [IDS_SCHEMA, _list_of(IDS_SCHEMA), {"type": "null"}]}),
]
PromptField = Annotated[
    Any,
    BeforeValidator(_check_either),
    WithJsonSchema({"anyOf": [TEXT_SCHEMA, _list_of(TEXT_SCHEMA), IDS_SCHEMA, _list_of(IDS_SCHEMA)]}),
]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a body: text or ids, and the name of the field it came from."""

    text: str | None = None
    token_ids: Sequence[int] = ()
    param: str


def read_prompts(value: Any, param: str) -> tuple[list[Prompt], bool]:
    """Return the prompts of a checked value, and whether it was a list of them.

    Raises:
        ApiError: 400 for a list that is empty or too long.
    """
    if isinstance(value, str):
        return [Prompt(text=value, param=param)], False
    is_batch = bool(value) and isinstance(value[0], str | list)
    if value and not is_batch:
        return [Prompt(token_ids=value, param=param)], False
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise ApiError(
            400, f"{param}: a list must have 1 to {MAX_PROMPTS} prompts", param=param, code="invalid_value"
        )
    return [
        Prompt(text=item, param=param) if isinstance(item, str) else Prompt(token_ids=item, param=param)
        for item in value
    ], True
