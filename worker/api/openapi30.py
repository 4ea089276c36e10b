"""JSON schemas of today (OpenAPI 3.1) in the words of OpenAPI 3.0, for both listeners' documents.

Why the older one: here `3.0` is not an integer. There, an integer is a number without a fractional part, so the
document could not say how strict the numbers are. Pure functions over JSON.
"""

from typing import Any

VERSION = "3.0.3"
_NULL = {"type": "null"}


def downgraded(node: Any) -> Any:
    """Return a copy of a document or a part of it without what 3.0 does not know."""
    if isinstance(node, list):
        return [downgraded(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "anyOf" in node and _NULL in node["anyOf"]:
        rest = {name: value for name, value in node.items() if name not in ("anyOf", "default")}
        alternatives = [_nullable(downgraded(item)) for item in node["anyOf"] if item != _NULL]
        if len(alternatives) == 1:
            return {**alternatives[0], **downgraded(rest)}
        return {**downgraded(rest), "anyOf": alternatives}
    copy = {name: downgraded(value) for name, value in node.items()}
    if copy.get("type") == "null":
        return {"enum": [None], "nullable": True}
    if "const" in copy:
        copy["enum"] = [copy.pop("const")]
    for side in ("Minimum", "Maximum"):
        bound = copy.get(f"exclusive{side}")
        if isinstance(bound, int | float) and not isinstance(bound, bool):
            copy[side.lower()] = bound
            copy[f"exclusive{side}"] = True
    return copy


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return {"allOf": [schema], "nullable": True}
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None], "nullable": True}
    return {**schema, "nullable": True}
