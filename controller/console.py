"""The commands for a running controller: `status`, `workers`, `pin`, `release`, `rollback`, `mode`, `decisions`.

Tables for people, `--json` for machines. Everything goes through the public API.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from controller import remote, tables
from controller.remote import NOT_CONFIRMED, NOT_DONE, Remote, RemoteError, worker_path
from controller.types import MODES

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
SHOWN_DECISIONS = 20
PAGE = 1000
"""So many records are asked for at a time; the interface gives no more."""

Command = Callable[[Remote, argparse.Namespace], int]


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands."""
    _add(commands, "status", _status, "is the controller well, and what does every worker do?")
    _add(commands, "workers", _workers, "the workers in detail")
    pin = _add(commands, "pin", _pin, "hold a worker at a depth for a time, whatever the policy thinks")
    pin.add_argument("worker", metavar="WORKER")
    pin.add_argument("num_steps", metavar="NUM_STEPS", type=int, help="drafts per round; 0 is plain decoding")
    _add_ttl(pin, "15m")
    _worker(_add(commands, "release", _release, "give a worker back to the policy: end its pin or hold"))
    rollback = _add(
        commands, "rollback", _rollback, "undo the newest change of a worker's depth; hold the policy"
    )
    _worker(rollback)
    _add_ttl(rollback, "5m")
    mode = _add(commands, "mode", _mode, "show or set the mode: of all workers, or of one")
    mode.add_argument("mode", nargs="?", choices=[*MODES, "inherit"], help="inherit: end a worker's own mode")
    mode.add_argument("--worker", metavar="ID")
    decisions = _add(commands, "decisions", _decisions, "what was decided, newest last")
    decisions.add_argument("--worker", metavar="ID", help="only this worker's")
    decisions.add_argument(
        "--last",
        type=_count,
        default=SHOWN_DECISIONS,
        metavar="N",
        help=f"so many (default {SHOWN_DECISIONS})",
    )
    decisions.add_argument("--follow", "-f", action="store_true", help="go on as they happen, until Ctrl-C")


def _add(commands: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}",
        epilog="exit status: 0 done · 1 not reached, or refused · 2 wrong arguments · "
        "3 taken, but the worker was not seen to follow · 4 a token is needed, or another one",
    )
    parser.set_defaults(ask=run)
    remote.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the controller's answer as it is")
    return parser


def _worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER")


def _add_ttl(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--for",
        dest="ttl_seconds",
        type=duration,
        default=default,
        metavar="TIME",
        help=f"e.g. 90s, 15m, 8h, 1d (default {default})",
    )
    parser.add_argument("--reason", type=_reason, default="", help="for the record")


def duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `15m`, `8h` or `1d` (argparse's error otherwise)."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)", text)
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"must be a time such as 90s, 15m, 8h or 1d, got {text!r}")
    return float(found[1]) * UNITS[found[2]]


def _reason(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are no text come as lone surrogates
        raise argparse.ArgumentTypeError(f"must be UTF-8 text, got {text!r}") from None
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= PAGE:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to {PAGE}, got {text!r}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Carry a command out; returns the exit status."""
    try:
        command: Command = options.ask
        with Remote(options.url, options.token_file) as controller:
            return command(controller, options)
    except RemoteError as error:
        sys.stderr.write(f"spec-controller: {tables.printable(str(error))}\n")
        return error.status
    except (LookupError, TypeError) as error:
        sys.stderr.write(
            f"spec-controller: {options.url}: not the answer of a controller of this version: {error!r}\n"
        )
        return NOT_DONE
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # e.g. `| head`: the reader has enough
        sys.stderr.close()
        return 0


def _show(options: argparse.Namespace, body: Any, *shown: Any) -> None:
    if options.json:
        sys.stdout.write(json.dumps(body, indent=2) + "\n")
    else:
        tables.show(*shown)


def _status(controller: Remote, options: argparse.Namespace) -> int:
    status, ready = controller.ask("GET", "/readyz", taken=[503])
    if not isinstance(ready, dict) or "ready" not in ready:
        raise RemoteError(f"{options.url} is no controller; see --url", NOT_DONE)
    modes = controller.ask("GET", "/v1/mode")[1]
    workers = controller.ask("GET", "/v1/workers")[1]["workers"]
    body = {"ready": ready, "mode": modes["mode"], "workers": workers}
    _show(options, body, *tables.status(ready, modes["mode"], workers))
    return 0 if status == 200 else NOT_DONE


def _workers(controller: Remote, options: argparse.Namespace) -> int:
    body = controller.ask("GET", "/v1/workers")[1]
    _show(options, body, tables.workers(body["workers"]))
    return 0


def _pin(controller: Remote, options: argparse.Namespace) -> int:
    body = {"num_steps": options.num_steps, "ttl_seconds": options.ttl_seconds, "reason": options.reason}
    answer = controller.ask("PUT", worker_path(options.worker, "depth"), body=body)
    return _ordered(options, answer, f"pinned at {options.num_steps}")


def _release(controller: Remote, options: argparse.Namespace) -> int:
    return _ordered(options, controller.ask("DELETE", worker_path(options.worker, "depth")), "released")


def _rollback(controller: Remote, options: argparse.Namespace) -> int:
    body = {"ttl_seconds": options.ttl_seconds, "reason": options.reason}
    answer = controller.ask("POST", worker_path(options.worker, "depth", "rollback"), body=body)
    return _ordered(options, answer, "rolled back")


def _ordered(options: argparse.Namespace, answer: tuple[int, Any], what: str) -> int:
    status, depth = answer
    _show(options, depth, tables.ordered(depth, what, is_followed=status == 200))
    return 0 if status == 200 else NOT_CONFIRMED


def _mode(controller: Remote, options: argparse.Namespace) -> int:
    path = "/v1/mode" if options.worker is None else worker_path(options.worker, "mode")
    if options.mode is None:
        body = controller.ask("GET", path)[1]
    elif options.mode != "inherit":
        body = controller.ask("PUT", path, body={"mode": options.mode})[1]
    elif options.worker is None:
        raise RemoteError("inherit is for one worker: name it with --worker", remote.BAD_ARGUMENTS)
    else:
        body = controller.ask("DELETE", path)[1]
    _show(options, body, tables.modes(body))
    return 0


def _decisions(controller: Remote, options: argparse.Namespace) -> int:
    chosen = {} if options.worker is None else {"worker": options.worker}
    newest = controller.ask("GET", "/v1/decisions", params={**chosen, "limit": 1})[1]["newest"]
    found: list[Any] = []
    upper, span = newest, options.last if options.worker is None else PAGE
    while len(found) < options.last and upper > 0:  # a quiet worker's records may lie far back
        after = max(0, upper - span)
        found = _between(controller, chosen, after, upper) + found
        upper, span = after, 2 * span
    found = found[-options.last :]
    for decision in found:
        _tell(options, decision)
    if options.follow:
        for event in controller.follow(max(newest, *(d["cursor"] for d in found), 0), on_loss=_lost):
            if event.name == "decision" and options.worker in (None, event.body["worker"]):
                _tell(options, event.body)
    return 0


def _between(controller: Remote, chosen: dict[str, str], after: int, upper: int) -> list[Any]:
    """Return the records with a cursor above `after` and up to `upper`, oldest first."""
    found: list[Any] = []
    while True:
        params = {**chosen, "after": after, "limit": PAGE}
        page = controller.ask("GET", "/v1/decisions", params=params)[1]["decisions"]
        found += [decision for decision in page if decision["cursor"] <= upper]
        if len(page) < PAGE or page[-1]["cursor"] >= upper:
            return found
        after = page[-1]["cursor"]


def _tell(options: argparse.Namespace, decision: Any) -> None:
    if options.json:
        sys.stdout.write(json.dumps(decision) + "\n")
    else:
        tables.show(tables.decision(decision))
    sys.stdout.flush()


def _lost(reason: str) -> None:
    sys.stderr.write(f"spec-controller: the stream was lost ({tables.printable(reason)}); trying again\n")
