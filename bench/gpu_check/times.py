"""What a clock or a profiler tells: rounds with graphs and without, kernels of the draft stage, a change of depth."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from bench.gpu_check.rig import Rig

SWAPS = 200
LEAST_ROUNDS = 3


def round_times(rig: Rig, batch_sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Time rounds of every tier and batch size with graphs and without, in turn; medians in microseconds.

    Drafting is only queued when it returns, so draft and verify are not told apart: a round ends with its read.
    """
    cells = [(batch_size, num_steps) for batch_size in batch_sizes for num_steps in rig.limits.tiers]
    samples: dict[tuple[int, int, str], list[float]] = {}
    ends = time.perf_counter() + rig.limits.seconds
    turn = -1  # the first turn warms up
    while turn < LEAST_ROUNDS or time.perf_counter() < ends:
        for cell in cells:
            for name in ("graphs", "eager"):
                seconds = _timed(rig, cell, name)
                if turn >= 0:
                    samples.setdefault((*cell, name), []).append(seconds)
        turn += 1
    return [
        {
            "batch_size": batch_size,
            "num_steps": num_steps,
            **{
                f"{name}_us": 1e6 * statistics.median(samples[batch_size, num_steps, name])
                for name in ("graphs", "eager")
            },
        }
        for batch_size, num_steps in cells
    ]


def draft_kernels(rig: Rig, batch_size: int, num_steps: int) -> dict[str, int]:
    """Count the kernels of one draft stage (on a CPU: operations), with graphs and without, on both paths."""
    found = {}
    for path in ("fast", "slow"):
        if path == "fast":
            found["graphs_fast"] = _kernels(rig, lambda: rig.draft(batch_size, num_steps))
            with rig.eager():
                found["eager_fast"] = _kernels(rig, lambda: rig.draft(batch_size, num_steps))
            continue
        with rig.slow_path():
            found["graphs_slow"] = _kernels(rig, lambda: rig.draft(batch_size, num_steps))
            with rig.eager():
                found["eager_slow"] = _kernels(rig, lambda: rig.draft(batch_size, num_steps))
    return found


def swap_microseconds(rig: Rig) -> float:
    """Return the median time of putting another tier in force."""
    times = []
    for turn in range(SWAPS):
        state = rig.states[rig.limits.tiers[turn % len(rig.limits.tiers)]]
        began = time.perf_counter()
        rig.drafter.apply_runtime_state(state)
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def depth_0_tax(rig: Rig, batch_size: int) -> float:
    """Return by how much a round at depth 0 takes longer than one of a worker without a drafter (0.01: 1 %).

    No drafter runs at depth 0, but a head's features are kept for the way back up.
    """
    plain = rig.plain_runner()
    with_drafter: list[float] = []
    without: list[float] = []
    ends = time.perf_counter() + rig.limits.seconds / 4
    while len(without) <= LEAST_ROUNDS or time.perf_counter() < ends:
        for runner, samples in ((rig.runner, with_drafter), (plain, without)):
            began = time.perf_counter()
            rig.plain_round(runner, batch_size)
            samples.append(time.perf_counter() - began)
    return statistics.median(with_drafter[1:]) / statistics.median(without[1:]) - 1


def _timed(rig: Rig, cell: tuple[int, int], name: str) -> float:
    def run() -> float:
        began = time.perf_counter()
        rig.round(*cell)
        return time.perf_counter() - began

    if name == "graphs":
        return run()
    with rig.eager():
        return run()


def _kernels(rig: Rig, work: Callable[[], object]) -> int:
    work()  # what the first call allocates is not counted
    on_gpu = rig.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return sum(event.device_type == wanted for event in profiler.events())
