"""Draft heads that come with the package, each a directory named after its target. Knows nothing about loading."""

from pathlib import Path

SHIPPED = {"default": "smollm2-135m-instruct"}
"""Value of `model.path` → directory here."""


def shipped_head(model_path: str) -> Path | None:
    """Return the head that comes with a target, None where there is none."""
    name = SHIPPED.get(model_path)
    return None if name is None else Path(__file__).parent / name
