"""Bring the containers up for real, use them, crash them, and take them down again.

    python -m bench.compose

Exit status 0: everything holds; 1: a step failed (the containers' last lines are shown); 2: no Docker engine here,
nothing was checked. It has a compose project of its own and touches no other; the images it builds stay, tagged
`check`. Build arguments and overrides come from the environment (PIP_INDEX_URL, TORCH_INDEX_URL, COMPOSE_FILE, …).
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.compose.check import Check, run
from bench.compose.stack import CheckFailed, Stack, engine_problem

EXIT_OK, EXIT_FAILED, EXIT_NOT_CHECKED = 0, 1, 2


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.compose", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--start-seconds", type=float, default=2400.0, metavar="S",
        help="how long the first start may take: download, conversion, profile (default: 2400)",
    )  # fmt: skip
    options = parser.parse_args()
    problem = engine_problem()
    if problem:
        print(
            f"Nothing was checked: no Docker engine with compose answers here ({problem}).", file=sys.stderr
        )
        return EXIT_NOT_CHECKED
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # an exception: the clean-up runs
    with tempfile.TemporaryDirectory(prefix="slipstream-check-") as directory:
        return checked(Stack(Path(directory)), options.start_seconds)


def checked(stack: Stack, start_seconds: float) -> int:
    """Run the check; whatever happens, nothing of it stays."""
    try:
        stack.draw_secrets()
        stack.down()  # what an interrupted run may have left
        run(Check(stack, start_seconds))
    except Exception as error:
        print(f"FAILED  {error if isinstance(error, CheckFailed) else repr(error)}", file=sys.stderr)
        print(quietly(stack.logs), file=sys.stderr)
        return EXIT_FAILED
    finally:
        quietly(stack.down)
    print("The deployment holds.")
    return EXIT_OK


def quietly(action: Callable[[], str | None]) -> str:
    """Run an action of the clean-up; return what it says or why it failed."""
    try:
        return action() or ""
    except CheckFailed as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
