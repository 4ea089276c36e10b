"""Explain: the records that stand at a time, in words for a person on call.

Reads records only, so the answer is the same from a running controller and from a journal file. Decides nothing.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from controller.journal_read import Record
from controller.types import Decision, TierScore

_LATEST_TIME = 253_402_300_799.0
"""End of the year 9999: the last time that can be written down."""

_OUTCOMES = {
    "applied": "done",
    "unconfirmed": "wanted, the worker had not confirmed it",
    "advisory": "advice only, nothing was sent",
    "held": "NOT done",
    "noted": "noted",
}


def parse_time(text: str) -> float:
    """Return Unix seconds of an ISO 8601 time (UTC without a zone) or of a number (ValueError: neither)."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            return unix_seconds(datetime.fromisoformat(text))
        except ValueError:
            raise ValueError("must be ISO 8601, e.g. 2026-12-01T16:00:00Z, or Unix seconds") from None
    if not 0 <= seconds <= _LATEST_TIME:
        raise ValueError("must be a time between 1970 and 9999")
    return seconds


def unix_seconds(moment: datetime | float) -> float:
    """Return Unix seconds of a time (UTC without a zone), moved into 1970 … 9999 where it is outside."""
    if isinstance(moment, datetime):
        moment = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    return min(max(0.0, moment), _LATEST_TIME)


def explanation(worker: str, records: Sequence[Record], wall_seconds: float) -> list[str]:
    """Return lines that say why a worker ran at its depth.

    Args:
        worker: its id.
        records: of every kind and slot the newest up to the time, by rising cursor.
        wall_seconds: the time, Unix seconds.
    """
    lines = [f"worker {worker} at {clock_time(wall_seconds)}"]
    if not records:
        return [*lines, "Nothing is known of it at that time: no record, or too old to be kept."]
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record.decision.kind, []).append(record)
    newest = records[-1].decision
    lines.append(f"mode: {newest.mode}" + _since(by_kind.get("mode")))
    lines += _whole_worker(by_kind)
    slots = sorted({r.decision.max_batch_size for r in records if r.decision.max_batch_size is not None})
    for slot in slots:
        lines += _slot(slot, [r for r in records if r.decision.max_batch_size == slot])
    if not slots:
        lines.append("No depth was decided yet: it runs at what it ran at when it was met.")
    return lines


def clock_time(wall_seconds: float) -> str:
    """Write a time down for people."""
    return datetime.fromtimestamp(wall_seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _since(records: Sequence[Record] | None) -> str:
    return f" (since {clock_time(records[-1].wall_seconds)})" if records else ""


def _whole_worker(by_kind: Mapping[str, Sequence[Record]]) -> list[str]:
    lines = []
    titles = {"worker": "worker", "pin": "pin", "rollback": "rollback", "plan": "plan", "guard": "guard"}
    for kind, title in titles.items():
        whole = [r for r in by_kind.get(kind, ()) if r.decision.max_batch_size is None]
        if whole:
            last = whole[-1]
            found = last.decision
            lines.append(f"{title}: {found.reason}, {clock_time(last.wall_seconds)}: {found.message}")
    return lines


def _slot(slot: int, records: Sequence[Record]) -> list[str]:
    """Tell of one slot: the newest change, what was held back or probed after it, and the numbers behind."""
    changes = [r for r in records if r.decision.kind == "depth" and r.decision.outcome != "held"]
    others = [r for r in records if r not in changes and r.decision.kind != "shadow"]
    lines = []
    if changes:
        last, found = changes[-1], changes[-1].decision
        lines.append(
            f"batch <= {slot}: num_steps {found.num_steps}, before that {found.num_steps_before}, "
            f"since {clock_time(last.wall_seconds)} ({_OUTCOMES[found.outcome]})"
        )
        lines += _why(found)
    else:
        lines.append(f"batch <= {slot}: no change is on record")
    for record in others:
        if changes and record.cursor < changes[-1].cursor:
            continue
        found = record.decision
        lines.append(f"  then, {clock_time(record.wall_seconds)}: {found.kind} {found.reason}, "
                     f"{_OUTCOMES[found.outcome]}")  # fmt: skip
        lines += _why(found)
    shadows = [r for r in records if r.decision.kind == "shadow"]
    if shadows:
        found = shadows[-1].decision
        lines.append(f"  the shadow policy {found.policy} would have had {found.num_steps}: {found.message}")
    return lines


def _why(found: Decision) -> list[str]:
    lines = [f"    why: {found.reason}: {found.message}"]
    if found.guard:
        lines.append(f"    guard that stepped in: {found.guard}")
    if found.inputs:
        lines.append("    inputs: " + ", ".join(f"{name} {_number(v)}" for name, v in found.inputs.items()))
    if found.scores:
        lines.append("    tiers: " + "; ".join(_score(score, found.num_steps) for score in found.scores))
    lines += _evidence(found.observed)
    if found.policy:
        lines.append(f"    policy {found.policy} {found.policy_version}, code {found.code_version}")
    return lines


def _score(score: TierScore, chosen: int | None) -> str:
    value = "unknown" if score.score is None else _number(score.score)
    spread = "" if score.sd is None else f" ± {_number(score.sd)}"
    return f"{score.num_steps}: {value}{spread}" + (" (chosen)" if score.num_steps == chosen else "")


def _evidence(observed: Mapping[str, Any]) -> list[str]:
    lines = []
    for cell in observed.get("cells", ()):
        rates = [
            f"{correct / reached:.2f}" if reached else "-"
            for correct, reached in zip(cell["correct"], cell["reached"], strict=False)
        ]
        timed = cell.get("timed_rounds", 0)
        pace = f", {1000 * cell['round_seconds'] / timed:.1f} ms a round" if timed else ""
        positions = f", acceptance by position {' '.join(rates)}" if rates else ""
        lines.append(
            f"    seen in {observed.get('seconds', 0):.1f} s: {cell['rounds']} rounds at {cell['num_steps']}, "
            f"batch <= {cell['max_batch_size']}{pace}{positions}"
        )
    return lines


def _number(value: float) -> str:
    return f"{value:.4g}"
