"""`spec-controller`: run the controller, check its configuration, ask why, replay, simulate."""

import argparse
import dataclasses
import gc
import json
import logging
import math
import os
import signal
import socket
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from controller import console, inquire
from controller.app import create_app
from controller.app.access import AccessError
from controller.clock import SystemClock
from controller.config import ControllerConfig, load_config
from controller.journal import JournalError
from controller.logs import set_up
from controller.simulate import command as simulate

logger = logging.getLogger("controller")

_EPILOG = """\
examples:
  spec-controller run --config configs/controller.toml
  SPEC_CONTROLLER_LOOP__POLL_INTERVAL_SECONDS=0.5 spec-controller run --config configs/controller.toml
  spec-controller config check --config configs/controller.toml
  spec-controller status                                       is it well, and what does every worker do?
  spec-controller pin local 3 --for 15m --reason "incident 7"  hold a worker at a depth; `release local` ends it
  spec-controller decisions --follow                           what is decided, as it happens
  spec-controller explain local                                why does it run at this depth?
  spec-controller replay --journal data/controller.sqlite3     do the recorded inputs give the same decisions?

Every field can be overridden by an environment variable: SPEC_CONTROLLER_<SECTION>__<FIELD>;
the list of workers as JSON in SPEC_CONTROLLER_WORKERS='[{"id": "local", "url": "http://127.0.0.1:8101"}]'.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0 fine, 1 cannot start, 2 bad configuration)."""
    options = _parser().parse_args(arguments)
    tools = {"simulate": simulate.run, "explain": inquire.explain, "replay": inquire.replay}
    if options.command in tools:
        return tools[options.command](options)
    if hasattr(options, "ask"):
        return console.run(options)
    try:
        config = load_config(options.config)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            where = ".".join(str(part) for part in item["loc"]) or "configuration"
            _say(f"{where}: {item['msg'].removeprefix('Value error, ')}")
        return 2
    except (OSError, tomllib.TOMLDecodeError, ValueError) as error:
        _say(f"{options.config}: {error}" if options.config else str(error))
        return 2
    if options.command == "config":
        resolved = config.model_dump(mode="json")
        resolved["policy"]["parameters"] = dataclasses.asdict(config.policy.policy_parameters())
        sys.stdout.write(json.dumps(resolved, indent=2) + "\n")
        return 0
    return _run(config, options.log_level or config.log.level)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spec-controller",
        description="Watches the workers and keeps their speculation depth where it pays.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run the controller until SIGTERM or SIGINT")
    _add_config(run)
    run.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], help="overrides [log] level"
    )
    config = commands.add_parser("config", help="look at the configuration")
    actions = config.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser(
        "check", help="print what was resolved as JSON; status 2 and the fields if it is bad"
    )
    _add_config(check)
    console.add_parsers(commands)
    inquire.add_parsers(commands)
    simulate.add_parser(commands)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; without it the defaults hold")


def collect_seldom() -> None:
    """Let Python look for garbage cycles seldom: a turn makes thousands of small objects, and none of them is in one.

    With 1000 workers a tenth to a third of the core's time went into looking (`python -m bench.scale`).
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def _run(config: ControllerConfig, log_level: str) -> int:
    set_up(config.log.format, log_level)
    try:
        app = create_app(config, clock=SystemClock(), registry=CollectorRegistry())
    except (AccessError, JournalError) as error:
        _say(str(error))
        return 1
    collect_seldom()
    if not config.workers:
        logger.warning("no workers are configured: nothing to control")
    server = _Server(
        uvicorn.Config(
            app,
            host=config.server.host,
            port=config.server.port,
            log_config=None,
            access_log=False,
            workers=1,
            timeout_graceful_shutdown=math.ceil(config.server.grace_seconds),
        ),
        on_exit=app.state.feed.close,
    )
    try:
        server.run()
    except SystemExit:  # uvicorn's way to say that it could not start; it has logged why
        return 1
    except KeyboardInterrupt:
        return 0
    return 0 if server.has_started else 1


class _Server(uvicorn.Server):
    """uvicorn's server, with a log line per address and a normal end after SIGTERM and SIGINT."""

    def __init__(self, config: uvicorn.Config, *, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self.has_started = False
        self._on_exit = on_exit
        """Called first, in a signal handler: what would never end by itself is told to end."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say where."""
        await super().startup(sockets)
        self.has_started = self.started
        for listener in self.servers if self.started else []:
            for bound in listener.sockets:
                host, port = bound.getsockname()[:2]
                logger.info(
                    "listening on http://%s:%d (the page is at /)", f"[{host}]" if ":" in host else host, port
                )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop cleanly; at the second signal at once. Unlike uvicorn's own, does not raise the signal again."""
        if self.should_exit:
            _say("a second signal: ending at once")
            os._exit(1)
        logger.info("%s: ending", signal.Signals(sig).name)
        self._on_exit()
        self.should_exit = True


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
