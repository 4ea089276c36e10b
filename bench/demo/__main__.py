"""Start a worker and a controller, send traffic in phases, show what the depth does; stop everything again.

    python -m bench.demo --duration 90      # ends by itself, with a summary
    python -m bench.demo --no-traffic       # only serve, until Ctrl-C

Exit status 0 at the end of the duration or on Ctrl-C; 1 when a request failed or a program died.
"""

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from bench.demo.phases import MINIMUM_SECONDS
from bench.demo.processes import Children, DemoError, own_foreground
from bench.demo.session import Session

PLAIN_WIDTH = 110
"""Columns of the summary where stdout is no terminal."""


def main() -> int:
    """Run the command line; return the exit status."""
    options = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    logs = Path(tempfile.mkdtemp(prefix="slipstream-demo-"))
    try:
        with own_foreground(), Children(logs) as children:
            asyncio.run(run(options, console, children))
    except DemoError as error:
        sys.stdout.flush()
        print(f"\nThe demo failed: {error}\nLogs are kept in {logs}", file=sys.stderr)
        return 1
    except BaseException:
        print(f"\nLogs are kept in {logs}", file=sys.stderr)
        raise
    shutil.rmtree(logs, ignore_errors=True)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the options; a bad one ends with status 2 and a sentence."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--duration", type=duration, metavar="SECONDS", help="end after so long (default: Ctrl-C)"
    )
    parser.add_argument("--no-traffic", action="store_true", help="serve only, send nothing")
    parser.add_argument("--worker-config", type=Path, default=Path("configs/worker.toml"), metavar="FILE")
    parser.add_argument(
        "--controller-config", type=Path, default=Path("configs/controller.toml"), metavar="FILE"
    )
    return parser.parse_args()


def duration(text: str) -> float:
    """Parse `--duration`."""
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not MINIMUM_SECONDS <= seconds <= 7 * 24 * 3600:
        raise argparse.ArgumentTypeError(f"must be {MINIMUM_SECONDS} seconds to a week, got {text}")
    return seconds


async def run(options: argparse.Namespace, console: Console, children: Children) -> None:
    """Run the session until it ends or a signal says so."""
    session = asyncio.create_task(Session(options, console, children).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, session.cancel)
    try:
        await session
    except asyncio.CancelledError:
        console.print("\nStopped by a signal; worker and controller are being ended.")


if __name__ == "__main__":
    sys.exit(main())
