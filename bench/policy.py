"""`make bench-policy`: every policy on every scenario of a set, against the best fixed depths; JSON in the last line.

    python -m bench.policy                       # the test set, 10 seeds
    python -m bench.policy --set tuning --seeds 4
    python -m bench.policy --set recorded        # the default model on the demo texts

Figures are those of `spec-controller simulate` (docs/policy.md). Everything is seeded: the same tree gives the same
figures on any machine, however busy. One process per core; a scenario's seeds stay together.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from controller.simulate.command import best_fixed, table
from controller.simulate.contenders import RIVALS, contenders, play, play_oracle
from controller.simulate.scenario import load_scenario
from controller.simulate.score import interval, score

SCENARIOS = Path(__file__).with_name("scenarios")


def measure(path: Path, variant: int, seeds: int) -> tuple[str, dict[str, Any]]:
    """Play one variant of one scenario with everybody."""
    scenario = load_scenario(path).variants()[variant]
    oracle = play_oracle(scenario, range(seeds))
    names = [*contenders(), *(f"fixed:{depth}" for depth in scenario.candidate_steps)]
    policies = {name: score(scenario, oracle, play(name, scenario, range(seeds))) for name in names}
    best = policies[f"fixed:{oracle.best_single}"]
    return scenario.name, {
        "policies": {**policies, "best_single": best},
        "best_fixed_depth": best_fixed(scenario, oracle),
        "best_single_depth": oracle.best_single,
    }


def compare(report: Mapping[str, Any], ours: str) -> list[str]:
    """Return lines on how `ours` does against each rival: pooled over scenarios, and where it is behind.

    Differences are taken seed by seed: both meet the same texts.
    """
    lines = []
    for rival in [*RIVALS, "threshold", "best_single"]:
        pooled, behind = [], []
        for name, figures in report.items():
            policies = figures["policies"]
            pairs = zip(
                policies[ours]["oracle_pct_by_seed"], policies[rival]["oracle_pct_by_seed"], strict=True
            )
            differences = [own - other for own, other in pairs]
            low, high = interval(differences)
            pooled.append(differences)
            if high < 0:
                behind.append(f"{name} ({statistics.fmean(differences):+.2f} [{low:+.2f}, {high:+.2f}])")
        by_seed = [statistics.fmean(values) for values in zip(*pooled, strict=True)]
        low, high = interval(by_seed)
        lines.append(
            f"{ours} against {rival}: {statistics.fmean(by_seed):+.2f} points [{low:+.2f}, {high:+.2f}] pooled; "
            f"behind beyond the interval on {', '.join(behind) or 'none'}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.policy", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--set", choices=["test", "tuning", "recorded"], default="test", help="which scenarios"
    )
    parser.add_argument("--seeds", type=int, default=10, help="runs per policy and scenario (default 10)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("names", nargs="*", help="scenarios by file name without .toml (default: all)")
    options = parser.parse_args(arguments)
    paths = sorted((SCENARIOS / options.set).glob("*.toml"))
    paths = [path for path in paths if not options.names or path.stem in options.names]
    if not paths or options.seeds < 1:
        parser.error("no such scenario, or no seeds")
    work = [(path, variant) for path in paths for variant in range(len(load_scenario(path).variants()))]
    report: dict[str, Any] = {}
    with ProcessPoolExecutor(max_workers=max(1, options.jobs)) as pool:
        done = pool.map(measure, *zip(*[(p, v, options.seeds) for p, v in work], strict=True))
        for name, figures in done:
            report[name] = figures
            print("\n".join(table(name, figures)), flush=True)
    print("\n".join(compare(report, "goodput")))
    for length in sorted({name.rpartition("@")[2] for name in report if "@" in name}):
        ours = [f["policies"]["goodput"] for name, f in report.items() if name.endswith(f"@{length}")]
        mean = statistics.fmean(f["oracle_pct"] for f in ours)
        worst = min(f["worst_phase_pct"] for f in ours)
        print(f"goodput with phases of {length}: mean {mean:.2f} % of the oracle, worst phase {worst:.2f} %")
    scenarios = {name: figures["policies"] for name, figures in report.items()}
    print(json.dumps({"bench": "policy", "scenarios": scenarios}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
