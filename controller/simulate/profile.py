"""The start-up profile that a simulated worker tells the controller: its true surface, with a profile's errors."""

import random

from controller.simulate.scenario import Scenario
from controller.simulate.surface import Surface
from worker.protocol import LatencyCell, LatencyProfile


def profile_of(scenario: Scenario, surface: Surface, seed: str) -> LatencyProfile | None:
    """Return the start-up profile that the controller is given: the true surface with its errors."""
    config = scenario.profile
    if config is None:
        return None
    rng = random.Random(f"{seed} profile")
    if surface.measured is not None:
        return surface.measured
    largest = scenario.largest_batch
    sizes = sorted({min(1 << i, largest) for i in range(largest.bit_length() + 1)})
    cells = []
    for size in sizes:
        for depth in scenario.candidate_steps:
            factor = rng.lognormvariate(0, config.error) if config.error else 1.0
            whole = factor * surface.seconds(size, depth, size * (depth + 1), config.context_tokens)
            draft = factor * surface.draft_seconds(size, depth)
            cells.append(
                LatencyCell(
                    batch_size=size,
                    num_steps=depth,
                    draft_seconds=draft,
                    verify_seconds=whole - draft,
                    round_seconds=whole,
                    samples=10,
                )
            )
    return LatencyProfile(context_tokens=config.context_tokens, cells=cells, error=config.error)
