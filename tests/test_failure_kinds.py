"""docs/failure-kinds.md names tests that exist, and speaks of every case."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "failure-kinds.md").read_text(encoding="utf-8")


def test_every_case_is_listed_once() -> None:
    assert [int(n) for n in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)] == list(range(1, 110))


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 100
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert not missing
