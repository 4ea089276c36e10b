"""Grafana dashboards as code, and checks of dashboards and alerts on a real run.

    python -m bench.dashboards generate          write configs/grafana/dashboards/*.json
    python -m bench.dashboards check             every panel's query on a real run, busy and idle
    python -m bench.dashboards alerts            every alert made to fire on a real run by a planted fault

The last two start a worker, a controller and a Prometheus of their own (`prometheus` in the PATH) and end them.
Exit status 0: everything holds; 1: something does not; 2: nothing was checked, no `prometheus` here.
"""

import argparse
import io
import shutil
import signal
import sys
from pathlib import Path

from bench.dashboards import acceptance, check, decisions, faults, latency, overview
from bench.demo.processes import DemoError

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "configs/grafana/dashboards"
LEAST_SECONDS = 30
EXIT_OK, EXIT_FAILED, EXIT_NOT_CHECKED = 0, 1, 2


def generated() -> dict[str, str]:
    """Return every dashboard's file name and JSON."""
    return {f"{made.UID}.json": made.build() for made in (overview, acceptance, latency, decisions)}


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.dashboards", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("generate", help="write the dashboards' JSON")
    checking = commands.add_parser("check", help="run every panel's query on a real run")
    checking.add_argument("--seconds", type=float, default=60.0, help="length of the traffic (default: 60)")
    checking.add_argument(
        "--picture", type=Path, metavar="PNG", help="also draw some panels (needs matplotlib)"
    )
    alerts = commands.add_parser("alerts", help="make every alert fire on a real run")
    alerts.add_argument("--only", metavar="ALERT", action="append", help="just this one; can be repeated")
    options = parser.parse_args()
    if options.command == "check" and options.seconds < LEAST_SECONDS:
        parser.error(f"--seconds must be at least {LEAST_SECONDS}: a rate needs its window")
    if options.command == "generate":
        for name, text in generated().items():
            (DIRECTORY / name).write_text(text, encoding="utf-8")
            print(f"wrote {(DIRECTORY / name).relative_to(ROOT)}")
        return EXIT_OK
    if shutil.which("prometheus") is None:
        print(
            "Nothing was checked: no `prometheus` in the PATH (Debian: apt install prometheus).",
            file=sys.stderr,
        )
        return EXIT_NOT_CHECKED
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # minutes pass between the lines
    # A SIGTERM is an exception, so that the children are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        holds = (
            check.run(options.seconds, options.picture)
            if options.command == "check"
            else faults.run(options.only)
        )
    except DemoError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK if holds else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
