"""How the command line shows the API's answers to people. Text from elsewhere is printed as text, whatever is in it."""

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 160
"""Columns where stdout is no terminal."""
OUTCOMES = {"applied": "green", "unconfirmed": "yellow", "held": "yellow", "advisory": "cyan", "noted": ""}


def show(*shown: RenderableType) -> None:
    """Print to stdout."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    for item in shown:
        console.print(item, soft_wrap=isinstance(item, Text))


def printable(text: str) -> str:
    """Return text in which no character can steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def status(ready: Any, mode: str, workers: Sequence[Any]) -> list[RenderableType]:
    """Return the controller's health above a short table of the workers."""
    is_well = ready["ready"]
    up = sum(1 for worker in workers if worker["reachable"])
    lines = Text.assemble(
        "controller  ",
        ("ready", "green") if is_well else (f"NOT READY: {printable(ready['detail'])}", "bold red"),
        f"\nmode        {mode}\nworkers     ",
        (f"{up} of {len(workers)} up", "green" if up == len(workers) else "bold red"),
        "\njournal     ",
        ("ok", "green") if ready["journal"] == "ok" else (printable(ready["journal"]), "bold red"),
    )
    table = _table("worker", "state", "depth", "by", "tokens/round", "tokens/s", "mode")
    for worker in workers:
        table.add_row(*_short(worker))
    return [lines, table] if workers else [lines]


def _short(worker: Any) -> list[Text]:
    is_up = worker["reachable"]
    return [
        _text(worker["id"], "bold"),
        _state(worker),
        _text(worker["depth"]["effective"] if is_up else None),
        _by(worker["depth"]),
        _text(_number(worker["accept_length"], 2) if is_up else None),
        _text(_number(worker["tokens_per_second"], 1) if is_up else None),
        _mode(worker),
    ]


def workers(listed: Sequence[Any]) -> RenderableType:
    """Return the workers in detail."""
    table = _table(
        "worker", "state", "what", "depth", "by", "batch ≤: depth", "running", "waiting", "accepted by position",
        "tokens/round", "tokens/s", "mode",
    )  # fmt: skip
    for worker in listed:
        name, state, depth, by, per_round, per_second, mode = _short(worker)
        queue = worker["queue"] or {}
        slots = " ".join(f"{slot['max_batch_size']}:{slot['num_steps']}" for slot in worker["depth"]["slots"])
        what = (
            f"{worker['model']}, {worker['drafter']}, {worker['device']}"
            if worker["model"]
            else worker["url"]
        )
        rates = " ".join(_number(rate, 2) or "-" for rate in worker["position_acceptance"])
        table.add_row(
            name, state, _text(what), depth, by, _text(slots), _text(queue.get("running")),
            _text(queue.get("waiting")), _text(rates), per_round, per_second, mode,
        )  # fmt: skip
    return (
        table
        if listed
        else Text("no workers are configured: add [[workers]] to the controller's configuration")
    )


def ordered(depth: Any, what: str, *, is_followed: bool) -> RenderableType:
    """Return what became of an order."""
    line = Text.assemble((printable(depth["worker"]), "bold"), f": {what}")
    if depth["expires_at"] and depth["source"] == "pin":
        line.append(f" until {_time(depth['expires_at'])}")
    if depth["held_until"]:
        line.append(f"; the policy is held until {_time(depth['held_until'])}")
    if is_followed:
        line.append(f"; the worker follows (depth {depth['effective']}, by {depth['source']})")
    else:
        line.append("; the worker was not yet seen to follow", "yellow")
    return line


def modes(body: Any) -> RenderableType:
    """Return the answer of either mode route."""
    if "worker" in body:
        own = "its own" if body["own"] else "as all workers"
        return Text.assemble((printable(body["worker"]), "bold"), f": {body['mode']} ({own})")
    others = [f"{printable(name)}: {mode}" for name, mode in body["workers"].items() if mode != body["mode"]]
    return Text(f"all workers: {body['mode']}" + "".join(f"\n  {line}" for line in others))


def decision(record: Any) -> RenderableType:
    """Return a decision as one line."""
    before, after, slot = record["num_steps_before"], record["num_steps"], record["max_batch_size"]
    change = "" if after is None else f" {after}" if before in (None, after) else f" {before}→{after}"
    where = "" if slot is None else f" batch≤{slot}"
    guard = f" by {record['guard']}" if record["guard"] else ""
    return Text.assemble(
        (f"{_time(record['time'])} ", "dim"),
        (printable(record["worker"]), "bold"),
        f" {record['kind']}{change}{where} ",
        (f"[{record['outcome']}{guard}]", OUTCOMES.get(record["outcome"], "")),
        f" {record['reason']}: {printable(record['message'])}",
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _text(value: Any, style: str = "") -> Text:
    return Text("-" if value is None or value == "" else printable(str(value)), style)


def _state(worker: Any) -> Text:
    if not worker["reachable"]:
        return _text(f"down: {worker['last_error'] or 'never seen'}", "red")
    if worker["adaptation"] is False:
        return _text(f"cannot adapt: {worker['adaptation_off_reason']}", "yellow")
    return _text("up", "green")


def _by(depth: Any) -> Text:
    by = depth["source"]
    if by == "pin" and depth["expires_at"]:
        by = f"pin until {_time(depth['expires_at'])}"
    return _text(f"{by}, held until {_time(depth['held_until'])}" if depth["held_until"] else by)


def _mode(worker: Any) -> Text:
    return _text(worker["mode"] + (" (own)" if worker["own_mode"] else ""))


def _number(value: float | None, places: int) -> str | None:
    return None if value is None else f"{value:.{places}f}"


def _time(text: str) -> str:
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")
