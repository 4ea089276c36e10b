"""Links in the documents are alive: files that are there, headings that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def prose(text: str) -> str:
    """The text without code, which is no place for links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", prose(text))


def anchors(text: str) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(
        r"^#{1,6} +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M
    ):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        names.add(name if name not in found else f"{name}-{found[name]}")
        found[name] = found.get(name, 0) + 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_are_alive(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    dead = []
    for link in links(text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        is_there = path.exists() and path.is_relative_to(ROOT)
        if not is_there or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            dead.append(link)
    assert dead == []


def test_dead_ones_would_be_noticed() -> None:
    text = (
        "# A `b`: c, d!\n## A b\n## A b\n[x](#a-b-c-d) `[y](z)` ![p](q.png)\n```\n[n](m)\n# no heading\n```\n"
    )
    assert links(text) == ["#a-b-c-d", "q.png"]
    assert anchors(text) == {"a-b-c-d", "a-b", "a-b-1"}
