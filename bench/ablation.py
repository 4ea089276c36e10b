"""`python -m bench.ablation`: the tuning scenarios with one mechanism of `goodput` left out at a time.

A mechanism that makes no difference should be removed; docs/policy.md shows the table. Figures are percent of the
oracle, mean over the tuning scenarios; the worst phase of all; changes per 1000 rounds; share of time probing.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from controller.config import ControllerConfig
from controller.simulate.contenders import configured, play_oracle
from controller.simulate.run import simulate
from controller.simulate.scenario import load_scenario
from controller.simulate.score import Oracle, score

TUNING = sorted((Path(__file__).with_name("scenarios") / "tuning").glob("*.toml"))
ACCEPTANCE, LATENCY, GOODPUT = (
    "controller.estimate.acceptance",
    "controller.estimate.latency",
    "controller.policies.goodput",
)

ABLATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: (policy parameters, guards, module constants)
    "as it is": ({}, {}, {}),
    "no change detection": ({}, {}, {f"{ACCEPTANCE}.CHANGE_ODDS": 0.0}),
    "no fading with time": ({}, {}, {f"{ACCEPTANCE}.HALF_LIFE_SECONDS": 1e9}),
    "no learned shape": ({}, {}, {f"{ACCEPTANCE}.SHAPE_PRIOR": 1e12}),
    "no online correction of costs": (
        {},
        {},
        {
            f"{LATENCY}.LEVEL_DRIFT": 0.0,
            f"{LATENCY}.PROFILE_SLOPE_SD": 1e-6,
            f"{LATENCY}.profile_cell_sd": lambda error: 1e-6,
        },
    ),
    "the profile's error is not told": ({}, {}, {f"{LATENCY}.profile_cell_sd": lambda error: 0.03}),
    "no doubt (z = 0)": ({"z": 0.0}, {}, {}),
    "no least gain (delta = 0)": ({"delta": 0.0}, {}, {}),
    "neither doubt nor least gain": ({"z": 0.0, "delta": 0.0}, {}, {}),
    "no dwell time": ({}, {"dwell_seconds": 0.0}, {}),
    "hardly any probes": ({"probe_share": 1e-5}, {}, {f"{GOODPUT}.BUDGET_START_SECONDS": 0.0}),
    "probes are not repeated": ({}, {}, {f"{GOODPUT}.REPEATS": 0}),
    "no worth of sight": ({"sight": 0.0}, {}, {}),
    "the way down as hard as up": ({"delta_down": 0.03}, {}, {}),
    "no sooner look": ({}, {}, {"controller.life.SOON": 1.0}),
    "no breaker": ({}, {"breaker_tolerance": 0.0}, {}),
}


def measure(path: Path, variant: int, seeds: int) -> tuple[str, dict[str, dict[str, Any]]]:
    """Play one variant of a scenario with every ablation."""
    scenario = load_scenario(path).variants()[variant]
    oracle = play_oracle(scenario, range(seeds))
    found = {}
    for name, (parameters, guards, constants) in ABLATIONS.items():
        base = ControllerConfig.model_validate(
            {"policy": {"name": "goodput", "parameters": parameters}, "guards": guards}
        )
        found[name] = _score(scenario, oracle, base, constants, seeds)
    return scenario.name, found


def _score(
    scenario: Any, oracle: Oracle, base: ControllerConfig, constants: dict[str, Any], seeds: int
) -> dict[str, Any]:
    config = configured("goodput", scenario, base)
    patches = [mock.patch(place, value) for place, value in constants.items()]
    for patch in patches:
        patch.start()
    try:
        runs = [simulate(scenario, seed, config=config) for seed in range(seeds)]
    finally:
        for patch in patches:
            patch.stop()
    return score(scenario, oracle, runs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6, help="runs per scenario (default 6)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    options = parser.parse_args(arguments)
    work = [(path, variant) for path in TUNING for variant in range(len(load_scenario(path).variants()))]
    with ProcessPoolExecutor(max_workers=max(1, options.jobs)) as pool:
        calls = [(p, v, options.seeds) for p, v in work]
        results = dict(pool.map(measure, *zip(*calls, strict=True)))
    print("| left out | % of oracle | short phases | long phases | worst phase | changes/1000 | probing % |")
    print("|---|---|---|---|---|---|---|")
    for name in ABLATIONS:
        figures = {scenario: found[name] for scenario, found in results.items()}
        short = [f["oracle_pct"] for s, f in figures.items() if float(s.rpartition("@")[2][:-1]) < 5]
        long = [f["oracle_pct"] for s, f in figures.items() if float(s.rpartition("@")[2][:-1]) >= 5]
        print(
            f"| {name} | {statistics.fmean([*short, *long]):.2f} | {statistics.fmean(short):.2f} "
            f"| {statistics.fmean(long):.2f} | {min(f['worst_phase_pct'] for f in figures.values()):.1f} "
            f"| {statistics.fmean(f['changes_per_1000'] for f in figures.values()):.2f} "
            f"| {statistics.fmean(f['probe_pct'] for f in figures.values()):.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
