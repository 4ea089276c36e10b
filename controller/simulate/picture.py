"""A picture of runs: depth and goodput over time, the best fixed depth of each phase behind. Needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controller.simulate.run import RunResult
from controller.simulate.scenario import Scenario
from controller.simulate.score import Oracle

BIN_SECONDS = 0.5


def draw(path: Path, scenario: Scenario, oracle: Oracle, runs: Mapping[str, RunResult]) -> None:
    """Write a PNG.

    Raises:
        ImportError: matplotlib is not installed (extra `bench`).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(12, 6), sharex=True, layout="constrained")
    for name, run in runs.items():
        _depth(axes[0], name, run)
        _goodput(axes[1], name, run)
    first = next(iter(runs.values()))
    for phase, (began, depth) in enumerate(zip(first.phase_started, oracle.best, strict=True)):
        axes[0].hlines(depth, began, began + first.phase_seconds[phase], color="0.8", linewidth=6, zorder=0)
        for axis in axes:
            axis.axvline(began, color="0.9", zorder=0)
    axes[0].set_ylabel("num_steps")
    axes[0].set_title(f"{scenario.name} (grey: best fixed depth of the phase, in the first policy's time)")
    axes[1].set_ylabel("tokens/s")
    axes[1].set_xlabel("seconds")
    axes[0].legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _depth(axis: Any, name: str, run: RunResult) -> None:
    times = [s.started for s in run.stretches]
    axis.step(times, [s.num_steps for s in run.stretches], where="post", label=name, linewidth=1)


def _goodput(axis: Any, name: str, run: RunResult) -> None:
    """Tokens per second in bins; a stretch's tokens spread evenly over it."""
    tokens: dict[int, float] = {}
    for stretch in run.stretches:
        begin, end = stretch.started, stretch.started + stretch.seconds
        for number in range(int(begin / BIN_SECONDS), int(end / BIN_SECONDS) + 1):
            overlap = min(end, (number + 1) * BIN_SECONDS) - max(begin, number * BIN_SECONDS)
            tokens[number] = tokens.get(number, 0.0) + stretch.tokens * max(0.0, overlap) / stretch.seconds
    bins = sorted(tokens)
    axis.plot(
        [b * BIN_SECONDS for b in bins], [tokens[b] / BIN_SECONDS for b in bins], label=name, linewidth=1
    )
