"""Journal rows: decisions, lives and turns as compact JSON, and back exactly (floats keep every bit).

A turn is a list without names, since there are several a second; the names of its fields are written once per life.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from controller.turn import Turn
from controller.types import MODES, CellDelta, Decision, Observation, TierScore, Verdict

BREVITY = (",", ":")


class OtherFields(ValueError):
    """The rows were written by a version whose observations have other fields."""


def dump(value: Any) -> str:
    """Return compact JSON."""
    return json.dumps(value, separators=BREVITY)


def decision_body(decision: Decision) -> str:
    """Return a decision without what is at its default."""
    body: dict[str, Any] = {}
    for field in dataclasses.fields(Decision):
        value = getattr(decision, field.name)
        if field.name == "scores":
            value = [[score.num_steps, score.score, score.sd] for score in value]
        has_default = (
            field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        )
        if not has_default or value not in (None, "", [], {}):
            body[field.name] = dict(value) if isinstance(value, Mapping) else value
    return dump(body)


def decision_from(body: str) -> Decision:
    """Return the decision of a body; fields that this version does not know are left out."""
    known = {field.name for field in dataclasses.fields(Decision)}
    values = {name: value for name, value in json.loads(body).items() if name in known}
    scores = (TierScore(num_steps=k, score=score, sd=sd) for k, score, sd in values.pop("scores", ()))
    return Decision(**values, scores=tuple(scores))


def field_names() -> dict[str, list[str]]:
    """Return the names behind the lists of a turn, for the life's row."""
    return {kind.__name__: [f.name for f in dataclasses.fields(kind)] for kind in (Observation, CellDelta)}


def check_fields(recorded: object) -> None:
    """Raise `OtherFields` unless the recorded names are this version's."""
    if recorded != field_names():
        raise OtherFields(f"recorded with the fields {recorded}, this version has {field_names()}")


def turn_body(turn: Turn, verdicts: Sequence[Verdict]) -> str:
    """Return a turn and what came out of it."""
    adopted = None if turn.adopted is None else [[edge, depth] for edge, depth in turn.adopted.items()]
    inputs = [
        turn.now,
        turn.age_seconds,
        MODES.index(turn.mode),
        int(turn.is_pinned),
        turn.hold_seconds,
        adopted,
    ]
    return _ROWS.encode([inputs, turn.observation, brief(verdicts), digest(verdicts)])


def turn_from(body: str) -> tuple[Turn, list[Any], str]:
    """Return a turn, its verdicts in brief, and their digest."""
    inputs, observed, verdicts, found = json.loads(body)
    now, age, mode, is_pinned, hold, adopted = inputs
    values = dict(zip((f.name for f in dataclasses.fields(Observation)), observed, strict=True))
    names = [f.name for f in dataclasses.fields(CellDelta)]
    values["cells"] = tuple(_cell(names, cell) for cell in values["cells"])
    turn = Turn(
        observation=Observation(**values),
        now=now,
        age_seconds=age,
        mode=MODES[mode],
        is_pinned=bool(is_pinned),
        hold_seconds=hold,
        adopted=None if adopted is None else dict(adopted),
    )
    return turn, verdicts, found


def _cell(names: Sequence[str], row: Sequence[Any]) -> CellDelta:
    values: dict[str, Any] = dict(zip(names, row, strict=True))
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return CellDelta(**values)


def brief(verdicts: Sequence[Verdict]) -> list[Any]:
    """Return what people want to see of verdicts: slot, depth before and after, reason, guard, allowed."""
    return [
        [
            verdict.proposal.slot,
            verdict.proposal.num_steps_before,
            verdict.num_steps,
            verdict.proposal.reason,
            verdict.guard,
            verdict.is_allowed,
        ]
        for verdict in verdicts
    ]


def digest(verdicts: Sequence[Verdict]) -> str:
    """Return a digest of everything in the verdicts, scores and inputs to the last bit; empty without verdicts."""
    if not verdicts:
        return ""
    return hashlib.blake2b(_ROWS.encode(verdicts).encode(), digest_size=8).hexdigest()


def _row(value: Any) -> list[Any]:
    """Return a dataclass's values in the order of its fields; a mapping among them becomes pairs."""
    return [list(v.items()) if isinstance(v, Mapping) else v for v in vars(value).values()]


_ROWS = json.JSONEncoder(separators=BREVITY, default=_row)
"""Writes dataclasses as rows."""
