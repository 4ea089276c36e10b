"""What is generated: phases of prompts that differ in nature, from `bench/texts`. Knows nothing about who generates."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TEXTS = Path(__file__).resolve().parents[1] / "texts"
SOURCES = {
    "predictable": ("predictable.jsonl", 0.0),
    "code": ("eval/code.jsonl", 0.0),
    "chat": ("chat.jsonl", 0.0),
    "prose": ("prose.jsonl", 1.0),
}
"""File and temperature."""
TRANSITION = ("predictable", "chat", "code", "prose")
"""One prompt of each in turn."""


@dataclass(frozen=True)
class Prompt:
    """One answer to write."""

    text: str
    temperature: float
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """Prompts in their order; the answers end at EOS or `max_tokens`, so every depth writes the same text."""

    name: str
    prompts: Sequence[Prompt]
    warm_up: Prompt | None
    """Answered before the clock starts; None where getting used to it is what is measured."""


def load(names: Sequence[str], *, prompts: int, max_tokens: int) -> list[Workload]:
    """Return workloads of so many prompts each; `transition` alternates between the others."""
    pools = {name: _read(name, max_tokens) for name in SOURCES}
    # One of each pool warms up, and a transition needs others than the pure phases.
    reserve = 1 + -(-max(4, prompts) // len(TRANSITION)) if "transition" in names else 1
    most = min(len(pool) for pool in pools.values()) - reserve
    if not 1 <= prompts <= most:
        raise ValueError(f"--prompts: must be within 1…{most} for these workloads, got {prompts}")
    workloads = []
    for name in names:
        if name == "transition":
            # The prompts that the pure phases do not use, so that nothing is known from there.
            streams = [iter(pools[kind][prompts + 1 :]) for kind in TRANSITION]
            mixed = [next(stream) for stream in itertools.islice(itertools.cycle(streams), max(4, prompts))]
            workloads.append(Workload(name, mixed, None))
        else:
            workloads.append(Workload(name, pools[name][1 : prompts + 1], pools[name][0]))
    return workloads


def _read(name: str, max_tokens: int) -> list[Prompt]:
    file, temperature = SOURCES[name]
    lines = (TEXTS / file).read_text(encoding="utf-8").splitlines()
    return [
        Prompt(json.loads(line)["text"], temperature, seed, max_tokens) for seed, line in enumerate(lines)
    ]
