"""Prompts to generate training text from: topics × tasks, and made-up lists, tables, code and settings to repeat.

Every prompt is a function of (seed, number), so data generation can be resumed. The evaluation texts in
`bench/texts` share no prompt with these. Knows nothing about models.
"""

import random
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from worker.train.prompt_words import (
    CODE_TASKS,
    CODE_WORDS,
    FORMS,
    LANGUAGES,
    NAMES,
    PLACES,
    PROSE_FIGURES,
    PROSE_FORMS,
    PROSE_TURNS,
    QUESTIONS,
    THINGS,
    TOPICS,
)

PromptKind = Literal["chat", "code", "prose", "repeat"]
KINDS: tuple[PromptKind, ...] = ("chat", "code", "prose", "repeat")


class Prompt(NamedTuple):
    """One user message and its nature."""

    kind: PromptKind
    text: str


def prompts(seed: int | str, start: int = 0) -> Iterator[Prompt]:
    """Yield prompt number `start`, `start + 1`, … of a seed, without end; kinds take turns."""
    number = start
    while True:
        kind = KINDS[number % len(KINDS)]
        yield Prompt(kind, _MAKERS[kind](random.Random(f"{seed}/{number}")))
        number += 1


def _chat(rng: random.Random) -> str:
    return rng.choice(QUESTIONS).format(
        topic=rng.choice(TOPICS), other=rng.choice(TOPICS), form=rng.choice(FORMS), n=rng.randint(3, 8)
    )


def _prose(rng: random.Random) -> str:
    form, figure, turn = rng.choice(PROSE_FORMS), rng.choice(PROSE_FIGURES), rng.choice(PROSE_TURNS)
    return form.format(figure=figure, turn=turn, place=rng.choice(PLACES), thing=rng.choice(THINGS))


def _code(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(_CODE_EDITS)(rng)
    return rng.choice(CODE_TASKS).format(
        language=rng.choice(LANGUAGES), thing=rng.choice(CODE_WORDS), other=rng.choice(CODE_WORDS)
    )


def _repeat(rng: random.Random) -> str:
    return rng.choice(_REPEATS)(rng)


# ---- made-up material to repeat or to edit ----


def _table_rows(rng: random.Random, columns: int) -> list[list[str]]:
    makers: list[Callable[[], str]] = [
        lambda: f"{rng.choice(NAMES)} {rng.choice(NAMES)[0]}.",
        lambda: rng.choice(PLACES).title(),
        lambda: str(rng.randint(1, 9000)),
        lambda: f"{rng.uniform(1, 300):.2f}",
        lambda: rng.choice(THINGS),
        lambda: f"{rng.randint(1, 28):02d}.{rng.randint(1, 12):02d}.{rng.randint(1990, 2025)}",
        lambda: f"{rng.choice('ABCDEFGH')}-{rng.randint(100, 999)}",
    ]
    chosen = rng.sample(makers, columns)
    return [[make() for make in chosen] for _ in range(rng.randint(5, 11))]


def _copy_list(rng: random.Random) -> str:
    rows = _table_rows(rng, 2)
    numbered = rng.random() < 0.6
    lines = [
        f"{index}. {' - '.join(row)}" if numbered else f"- {': '.join(row)}"
        for index, row in enumerate(rows, 1)
    ]
    order = rng.choice(
        [
            "Copy this list exactly, with nothing before or after it:",
            "Write the following list again, word for word:",
            "Repeat this list, but end every line with a full stop:",
            "Here is a list. Print it once more, unchanged:",
        ]
    )
    return order + "\n" + "\n".join(lines)


def _copy_table(rng: random.Random) -> str:
    rows = _table_rows(rng, rng.randint(3, 5))
    header = rng.sample(["name", "city", "count", "price", "item", "date", "code", "owner"], len(rows[0]))
    order = rng.choice(
        [
            "Print this table again, as it is:",
            "Repeat the table below without any change:",
            "Write the same table once more and add a last column `checked` that is always `yes`:",
        ]
    )
    if rng.random() < 0.5:
        body = [",".join(header), *(",".join(row) for row in rows)]
    else:
        body = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
        body += [f"| {' | '.join(row)} |" for row in rows]
    return order + "\n\n" + "\n".join(body)


def _convert_table(rng: random.Random) -> str:
    rows = _table_rows(rng, 3)
    header = rng.sample(["name", "city", "count", "price", "item", "date"], 3)
    target = rng.choice(
        ["a Markdown table", "JSON, a list of objects", "an HTML table", "YAML", "SQL INSERTs"]
    )
    return f"Turn this CSV into {target}:\n\n" + "\n".join([",".join(header), *(",".join(r) for r in rows)])


def _settings(rng: random.Random) -> str:
    sections, changed = [], ""
    for section in rng.sample(CODE_WORDS, rng.randint(2, 4)):
        lines = [f"[{section}]"]
        for key in rng.sample(CODE_WORDS, rng.randint(2, 5)):
            value = rng.choice([str(rng.randint(1, 9999)), f'"{rng.choice(CODE_WORDS)}"', "true", "false"])
            lines.append(f"{key} = {value}")
            changed = f"`{key}` in [{section}] set to {rng.randint(1, 99)}"
        sections.append("\n".join(lines))
    order = rng.choice(
        [f"Write this configuration again with {changed}, everything else unchanged.", "Repeat this file:"]
    )
    return order + "\n\n" + "\n\n".join(sections)


def _verses(rng: random.Random) -> str:
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    number = rng.randint(5, 20)
    verse = "{n} {thing}s are left in {place}, one is taken and {less} remain."
    lines = [verse.format(n=number - i, thing=thing, place=place, less=number - i - 1) for i in range(3)]
    return "Continue in the same way for six more lines:\n" + "\n".join(lines)


def _function(rng: random.Random) -> tuple[str, str]:
    """Return a made-up Python function and its name."""
    name = f"{rng.choice(['load', 'count', 'merge', 'check', 'build', 'sort', 'print'])}_{rng.choice(CODE_WORDS)}"
    items, item, limit = (f"{word}s" if i == 0 else word for i, word in enumerate(rng.sample(CODE_WORDS, 3)))
    bodies = [
        f"    result = []\n    for {item} in {items}:\n        if {item}.{limit} > {rng.randint(0, 50)}:\n"
        f"            result.append({item})\n    return result",
        f"    total = 0\n    for {item} in {items}:\n        total += {item}.{limit} * {rng.randint(2, 9)}\n"
        "    return total",
        f"    found = {{}}\n    for index, {item} in enumerate({items}):\n        found[{item}.{limit}] = index\n"
        "    return found",
        f"    with open({items}) as file:\n        lines = [line.strip() for line in file]\n"
        f"    return [line for line in lines if line.startswith('{item}')][:{limit}]",
    ]
    return f"def {name}({items}, {limit}=None):\n{rng.choice(bodies)}", name


def _functions(rng: random.Random) -> tuple[str, str]:
    pairs = [_function(rng) for _ in range(rng.randint(1, 3))]
    return "\n\n\n".join(code for code, _ in pairs), pairs[0][1]


def _rename(rng: random.Random) -> str:
    code, name = _functions(rng)
    return (
        f"Repeat this code with the function `{name}` renamed to `{rng.choice(CODE_WORDS)}_{rng.choice(CODE_WORDS)}`. "
        f"Change nothing else.\n\n```python\n{code}\n```"
    )


def _document(rng: random.Random) -> str:
    order = rng.choice(
        [
            "Add a docstring to every function and change nothing else.",
            "Add type annotations to this code.",
            "Add a comment above every line of this code.",
            "Explain what this code does, line by line.",
            "Write unit tests for this code.",
            "Rewrite this code as a class.",
            "Rewrite this code in JavaScript.",
            "Print this code again, unchanged.",
        ]
    )
    return f"{order}\n\n```python\n{_functions(rng)[0]}\n```"


_CODE_EDITS: tuple[Callable[[random.Random], str], ...] = (_rename, _document, _document)
_REPEATS: tuple[Callable[[random.Random], str], ...] = (
    _copy_list,
    _copy_list,
    _copy_table,
    _copy_table,
    _convert_table,
    _settings,
    _verses,
    _rename,
    _document,
)
_MAKERS: dict[PromptKind, Callable[[random.Random], str]] = {
    "chat": _chat,
    "code": _code,
    "prose": _prose,
    "repeat": _repeat,
}
