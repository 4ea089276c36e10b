"""`spec-controller simulate`: play scenarios on virtual time and compare policies with the best fixed depths."""

import argparse
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from controller.config import load_config
from controller.simulate.contenders import contenders, play, play_oracle
from controller.simulate.scenario import Scenario, load_scenario
from controller.simulate.score import Oracle, score


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "simulate",
        help="play a scenario on virtual time and compare policies",
        description="Plays a scenario through the controller's own core on virtual time. The file's format and the "
        "figures are described in docs/policy.md.",
    )
    parser.add_argument("--scenario", type=Path, required=True, metavar="FILE", help="scenario (TOML)")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help=f"{', '.join(contenders())} or fixed:K; may be given several times (default: all, and every depth)",
    )
    parser.add_argument("--seeds", type=_count, default=10, metavar="N", help="runs per policy (default 10)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="parameters and guards to play with")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="picture of depth and goodput over time (needs matplotlib)"
    )


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns the exit status (2: bad input)."""
    try:
        base = load_config(options.config) if options.config else None
    except (OSError, tomllib.TOMLDecodeError, ValueError) as error:
        return _refuse(options.config, "configuration", error)
    try:
        variants = load_scenario(options.scenario).variants()
        seeds = range(options.seeds)
        report = {}
        for scenario in variants:
            oracle = play_oracle(scenario, seeds)
            names = options.policy or [*contenders(), *(f"fixed:{k}" for k in scenario.candidate_steps)]
            runs = {name: play(name, scenario, seeds, base) for name in names}
            report[scenario.name] = {
                "policies": {name: score(scenario, oracle, runs[name]) for name in names},
                "best_fixed_depth": best_fixed(scenario, oracle),
                "best_single_depth": oracle.best_single,
            }
            if options.png:
                from controller.simulate.picture import draw

                draw(
                    _png(options.png, scenario, variants),
                    scenario,
                    oracle,
                    {n: r[0] for n, r in runs.items()},
                )
    except (OSError, tomllib.TOMLDecodeError, ValueError, ImportError) as error:
        return _refuse(options.scenario, "scenario", error)
    if options.json:
        sys.stdout.write(json.dumps({"seeds": options.seeds, "scenarios": report}) + "\n")
    else:
        for name, figures in report.items():
            sys.stdout.write("\n".join(table(name, figures)) + "\n")
    return 0


def best_fixed(scenario: Scenario, oracle: Oracle) -> list[dict[str, object]]:
    """Return the best fixed depth of each phase, for the report."""
    phases = list(scenario.phases) * scenario.repeat
    return [
        {
            "phase": phase.name or str(number),
            "num_steps": depth,
            "seconds": round(oracle.mean_seconds[depth][number], 3),
        }
        for number, (phase, depth) in enumerate(zip(phases, oracle.best, strict=True))
    ]


def table(name: str, figures: dict[str, object]) -> list[str]:
    """Return lines for people."""
    phases = figures["best_fixed_depth"]
    assert isinstance(phases, list)
    lines = [f"{name}: best fixed depth per phase {[p['num_steps'] for p in phases]}"]
    lines.append(
        f"  {'policy':<18} {'% of oracle':>20} {'worst':>7} {'changes':>8} {'probe %':>8} {'adapt s':>8}"
    )
    policies = figures["policies"]
    assert isinstance(policies, dict)
    for policy, f in sorted(policies.items(), key=lambda item: -item[1]["oracle_pct"]):
        low, high = f["oracle_pct_ci"]
        adapt = "-" if f["adapt_seconds"] is None else f"{f['adapt_seconds']:.2f}"
        lines.append(
            f"  {policy:<18} {f['oracle_pct']:>6.2f} [{low:>5.2f}, {high:>5.2f}] {f['worst_phase_pct']:>7.2f} "
            f"{f['changes_per_1000']:>8.2f} {f['probe_pct']:>8.2f} {adapt:>8}"
        )
    return lines


def _png(path: Path, scenario: Scenario, variants: Sequence[Scenario]) -> Path:
    """One picture per variant: the variant's name goes into the file's."""
    if len(variants) == 1:
        return path
    return path.with_stem(f"{path.stem}-{scenario.name.rpartition('@')[2]}")


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"must be within 1…1000, got {text}")
    return int(text)


def _refuse(file: Path, whole: str, error: Exception) -> int:
    """Say what is wrong with a file; what concerns no single field concerns the `whole`."""
    if isinstance(error, ValidationError):
        for item in error.errors(include_url=False, include_input=False):
            where = ".".join(str(part) for part in item["loc"]) or whole
            _say(f"{file}: {where}: {item['msg'].removeprefix('Value error, ')}")
    else:
        _say(f"{file}: {error}")
    return 2


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
