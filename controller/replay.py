"""Replay: recorded turns through the same pure core, compared bit for bit with what was decided then.

A life is played from its beginning, or from its first checkpoint where the beginning is no longer kept; at later
checkpoints the state itself is compared too. With another policy the recorded life is followed as a shadow does: what
would it have changed, from where the worker really was. Reads the journal, writes nothing.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from controller.config import ControllerConfig, PolicyConfig
from controller.journal_rows import OtherFields, brief, digest, dump, turn_from
from controller.journal_store import Store
from controller.life import Life
from controller.shadow import Shadow
from controller.snapshot import NotASnapshot
from controller.tape import checkpoint, config_from, life_from, resume
from controller.turn import decide, estimate, guard

PAGE = 2000
"""Rows read at a time."""


@dataclass
class WouldBe:
    """What another policy would have done in a life."""

    turns: int = 0
    differing_turns: Counter[int] = field(default_factory=Counter)
    """Slot -> turns in which it would have had another depth there."""
    gains: dict[int, list[float]] = field(default_factory=dict)
    """Slot -> estimated relative gains of those turns, where its scores say."""
    changes: list[tuple[float, int, int, int, str]] = field(default_factory=list)
    """(Unix time, slot, depth in force, depth wanted, reason), when it newly wanted something."""


@dataclass
class LifeReplay:
    """What became of one recorded life."""

    life: int
    worker: str
    wall_seconds: float
    code_version: str
    policy: str = ""
    turns: int = 0
    """Turns played."""
    decisions: int = 0
    """Verdicts among them."""
    skipped: int = 0
    """Turns that could not be played: nothing kept to start from."""
    checkpoints: int = 0
    difference: str | None = None
    """Where it first came out otherwise; None: all the same."""
    problem: str | None = None
    """Why it could not be played."""
    would_be: WouldBe | None = None


Row = tuple[int, int, float, str, str]
"""place, number, wall, kind, body."""


def replay(
    store: Store, *, worker: str | None = None, policy: PolicyConfig | None = None
) -> Iterator[LifeReplay]:
    """Play every recorded life, oldest first.

    Args:
        store: the journal.
        worker: only lives of this worker.
        policy: what to look on with, on the recorded slots; None: only compare.
    """
    sql = (
        "SELECT life, worker, lives.wall, body, code_version, config FROM lives JOIN starts USING (epoch)"
        " WHERE ? IS NULL OR worker = ? ORDER BY life"
    )
    for life, name, wall, body, code_version, config in store.read(sql, (worker, worker)):
        result = LifeReplay(life, name, wall, code_version)
        try:
            recorded = config_from(json.loads(config))
            result.policy = recorded.policy.name
            looking_on = policy.beside(recorded.policy) if policy is not None else None
            _Player(result, recorded, json.loads(body), looking_on).play(_rows(store, life))
        except (OtherFields, NotASnapshot, ValidationError, LookupError, TypeError, ValueError) as error:
            result.problem = f"{type(error).__name__}: {error}"
        yield result


def _rows(store: Store, life: int) -> Iterator[Row]:
    place = 0
    while True:
        sql = "SELECT place, number, wall, kind, body FROM turns WHERE life = ? AND place > ? ORDER BY place LIMIT ?"
        rows = store.read(sql, (life, place, PAGE))
        for row in rows:
            yield row[0], row[1], row[2], row[3], row[4]
        if len(rows) < PAGE:
            return
        place = rows[-1][0]


class _Player:
    """Plays one life."""

    def __init__(
        self, result: LifeReplay, config: ControllerConfig, body: dict[str, Any], policy: PolicyConfig | None
    ) -> None:
        self._result = result
        self._config = config
        self._body = body
        self._policy = policy
        self._life: Life | None = None
        self._shadow: Shadow | None = None
        self._expected = 1
        self._wanted: dict[int, tuple[int, int]] = {}
        """Slot -> the shadow's newest wish."""

    def play(self, rows: Iterator[Row]) -> None:
        """Play the rows until the end or the first difference."""
        for _, number, wall, kind, text in rows:
            if number == 1:
                self._begin()
            elif number != self._expected:
                self._life = None  # something between is gone: go on at the next checkpoint
            self._expected = number + 1
            if kind == "checkpoint":
                self._checkpoint(wall, text)
            elif self._life is None:
                self._result.skipped += kind == "turn"
            elif kind == "turn":
                self._turn(self._life, wall, text)
            elif kind == "adopt":
                self._life.adopt(dict(json.loads(text)))
                self._follow(self._life)
            elif kind == "end_probe":
                self._life.end_probe()
            if self._result.difference is not None:
                return

    def _begin(self) -> None:
        self._life = life_from(self._result.worker, self._body, self._config)
        if self._policy is not None:
            self._result.would_be = self._result.would_be or WouldBe()
            self._shadow = Shadow(
                self._result.worker, self._policy, self._config, life=self._life, now=self._body["now"]
            )

    def _checkpoint(self, wall: float, text: str) -> None:
        if self._life is None:
            self._begin()
            assert self._life is not None
            resume(self._life, json.loads(text))
            self._follow(self._life)
            return
        self._result.checkpoints += 1
        if dump(checkpoint(self._life)) != text:
            self._result.difference = f"at the checkpoint of {wall:.3f} the state of the core is another one"

    def _turn(self, life: Life, wall: float, text: str) -> None:
        turn, recorded, recorded_digest = turn_from(text)
        found = estimate(life, turn)
        verdicts = guard(life, turn, decide(life, turn, found))
        self._result.turns += 1
        self._result.decisions += len(verdicts)
        if digest(verdicts) != recorded_digest:
            now = brief(verdicts)
            where = "in their scores or inputs" if now == recorded else f"{recorded} then, {now} now"
            self._result.difference = (
                f"in the turn at {wall:.3f} (turn {self._result.turns}) the decisions differ: {where}"
            )
        if self._shadow is not None and self._result.would_be is not None:
            for verdict in self._shadow.turn(turn):
                slot, before, after = (
                    verdict.proposal.slot,
                    verdict.proposal.num_steps_before,
                    verdict.num_steps,
                )
                if self._wanted.get(slot) != (before, after):
                    self._wanted[slot] = before, after
                    change = wall, slot, before, after, verdict.proposal.reason
                    self._result.would_be.changes.append(change)
            self._follow(life)
            self._count(self._result.would_be)

    def _follow(self, life: Life) -> None:
        if self._shadow is not None:
            self._shadow.follow(life.depths)

    def _count(self, would_be: WouldBe) -> None:
        assert self._shadow is not None
        would_be.turns += 1
        for wish in self._shadow.wished():
            if wish.num_steps != wish.num_steps_now:
                would_be.differing_turns[wish.slot] += 1
                if wish.gain is not None:
                    would_be.gains.setdefault(wish.slot, []).append(wish.gain)
