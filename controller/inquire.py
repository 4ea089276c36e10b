"""`spec-controller explain` and `replay`: questions to a running controller or to its journal. Changes nothing."""

import argparse
import json
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from controller.config import PolicyConfig
from controller.explain import clock_time, explanation, parse_time
from controller.journal_read import standing
from controller.journal_store import JournalError, Store
from controller.policies import policy_kinds
from controller.remote import DEFAULT_URL, Remote, RemoteError, worker_path
from controller.replay import LifeReplay
from controller.replay import replay as replay_lives
from controller.tables import printable
from controller.version import code_version


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands."""
    why = commands.add_parser("explain", help="why does a worker run at its depth?")
    why.add_argument("worker", nargs="?", metavar="WORKER")
    why.add_argument("--worker", dest="named", metavar="ID", help="the same, by name")
    why.add_argument("--at", metavar="TIME", help="an earlier time: ISO 8601 or Unix seconds (default: now)")
    source = why.add_mutually_exclusive_group()
    source.add_argument(
        "--journal", metavar="FILE", help="read a journal file instead of asking a controller"
    )
    source.add_argument("--url", default=DEFAULT_URL, help=f"the controller (default {DEFAULT_URL})")
    why.add_argument("--token-file", type=Path, metavar="FILE", help="holds the controller's bearer token")
    why.add_argument("--json", action="store_true", help="the controller's answer as it is (with --url)")
    again = commands.add_parser(
        "replay",
        help="play recorded inputs through the core again and compare the decisions",
        description="Status 0: all the same; 1: some came out otherwise, or could not be played.",
    )
    again.add_argument("--journal", required=True, metavar="FILE")
    again.add_argument("--worker", metavar="ID", help="only this worker")
    again.add_argument(
        "--policy", metavar="NAME", help=f"what would this one have done: {', '.join(sorted(policy_kinds()))}"
    )
    again.add_argument("--json", action="store_true", help="one JSON object per life")


def explain(options: argparse.Namespace) -> int:
    """Print why; returns the exit status (0 told, 1 not to be had, 2 bad arguments)."""
    options.worker = options.worker or options.named
    if options.worker is None:
        return _refuse("name the worker: spec-controller explain WORKER", 2)
    try:
        wall = time.time() if options.at is None else parse_time(options.at)
    except ValueError as error:
        return _refuse(f"--at: {error}", 2)
    if options.journal is None:
        return _explain_from_controller(options)
    try:
        store = Store.read_only(options.journal)
        try:
            lines = explanation(options.worker, standing(store, options.worker, wall), wall)
        finally:
            store.close()
    except JournalError as error:
        return _refuse(str(error), 1)
    _print(lines)
    return 0


def _explain_from_controller(options: argparse.Namespace) -> int:
    try:
        params = {} if options.at is None else {"at": options.at}
        with Remote(options.url, options.token_file) as controller:
            body: Any = controller.ask("GET", worker_path(options.worker, "explain"), params=params)[1]
    except RemoteError as error:
        return _refuse(str(error), error.status)
    _print([json.dumps(body, indent=2)] if options.json else body["lines"])
    return 0


def replay(options: argparse.Namespace) -> int:
    """Print what became of each life; returns the exit status (0 all the same, 1 not, 2 bad arguments)."""
    try:
        policy = PolicyConfig(name=options.policy) if options.policy else None
    except ValidationError as error:
        return _refuse(f"--policy: {error.errors()[0]['msg'].removeprefix('Value error, ')}", 2)
    try:
        store = Store.read_only(options.journal)
    except JournalError as error:
        return _refuse(str(error), 2)
    is_same, lives = True, 0
    try:
        for result in replay_lives(store, worker=options.worker, policy=policy):
            lives += 1
            is_same = is_same and result.difference is None and result.problem is None
            _print([json.dumps(_plain(result))] if options.json else _lines(result, options.policy))
    except sqlite3.Error as error:
        return _refuse(f"{options.journal}: {error}", 1)
    finally:
        store.close()
    if not lives:
        _print(["nothing is recorded" + (f" of worker {options.worker}" if options.worker else "")])
    return 0 if is_same else 1


def _lines(result: LifeReplay, policy: str | None) -> list[str]:
    lines = [
        f"life {result.life} of {result.worker}, met {clock_time(result.wall_seconds)}, policy {result.policy}, "
        f"code {result.code_version}"
    ]
    if result.code_version != code_version():
        lines.append(f"  NOTE: this program is {code_version()}; other decisions would be no surprise")
    if result.problem is not None:
        lines.append(f"  cannot be played: {result.problem}")
        return lines
    played = f"{result.turns} turns, {result.decisions} verdicts, {result.checkpoints} checkpoints compared"
    if result.skipped:
        played += f"; {result.skipped} turns before the first checkpoint could not be played"
    lines.append(
        f"  {played}: " + (f"DIFFERENT {result.difference}" if result.difference else "all the same")
    )
    found = result.would_be
    if found is not None and found.turns:
        lines.append(f"  {policy} would have")
        for slot, turns in sorted(found.differing_turns.items()):
            gains = found.gains.get(slot)
            gain = f", estimated gain {100 * sum(gains) / len(gains):+.1f} %" if gains else ""
            lines.append(
                f"    had another depth up to batch {slot} in {100 * turns / found.turns:.1f} % of turns{gain}"
            )
        if not found.differing_turns:
            lines.append("    changed nothing")
        for wall, slot, before, after, reason in found.changes[:20]:
            lines.append(f"    {clock_time(wall)} batch <= {slot}: {before} -> {after} [{reason}]")
        if len(found.changes) > 20:
            lines.append(f"    … {len(found.changes) - 20} more")
    return lines


def _plain(result: LifeReplay) -> dict[str, Any]:
    plain = {name: value for name, value in vars(result).items() if name != "would_be"}
    found = result.would_be
    if found is not None:
        means = {slot: sum(gains) / len(gains) for slot, gains in found.gains.items()}
        plain["would_be"] = {
            "turns": found.turns,
            "differing_turns": dict(found.differing_turns),
            "mean_estimated_gain": means,
            "changes": [
                dict(
                    zip(
                        ("time", "max_batch_size", "num_steps_before", "num_steps", "reason"),
                        change,
                        strict=True,
                    )
                )
                for change in found.changes
            ],
        }
    return plain


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{printable_lines(line)}\n" for line in lines))


def printable_lines(text: str) -> str:
    """Return text in which nothing but a line's end steers a terminal."""
    return "\n".join(printable(line) for line in text.split("\n"))


def _refuse(message: str, status: int) -> int:
    sys.stderr.write(message + "\n")
    return status
