"""Held-out figures: how often a head's first draft is the target's token, and how many it gets right in a row.

Along a greedy text the figures are exact: a draft behind correct ones reads the very tokens of the text, and the head's
own hidden states. Along a sampled one they compare with the target's likeliest token at each place.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.train.data import Text
from worker.train.material import Frozen, epoch, make_batch
from worker.train.network import TrainedHead
from worker.train.objective import Objective

EVALUATED_STEPS = 5


@dataclass(frozen=True)
class Figures:
    """Means over the answers' places."""

    places: int
    top1: float
    """Share of places where the first draft is the target's token."""
    survival: tuple[float, ...]
    """At index i: share of places where the first i + 1 drafts are all correct."""

    def accept_length(self, num_steps: int) -> float:
        """Expected tokens of a round at a depth."""
        return 1 + sum(self.survival[:num_steps])

    def __str__(self) -> str:
        lengths = " ".join(
            f"{self.accept_length(k):.2f}@{k}" for k in (1, 2, 3, 5) if k <= len(self.survival)
        )
        return f"top-1 {self.top1:.3f}, accept_length {lengths} ({self.places} places)"


def evaluate(
    head: TrainedHead,
    objective: Objective,
    texts: Sequence[Text],
    frozen: Frozen,
    tokens_per_batch: int = 4096,
) -> Figures:
    """Measure a head on texts that it was not trained on."""
    counts = torch.zeros(EVALUATED_STEPS)
    places = 0
    for group in epoch(texts, tokens_per_batch, random.Random(0)):
        batch = make_batch(group, frozen, prompt_weight=0.0)
        if batch.weights.shape[1] < EVALUATED_STEPS:
            continue  # no place has that many tokens behind it
        hits = objective.hits(head, batch, EVALUATED_STEPS)
        # Chain j of the draft that begins at row t: step j's row t + j.
        counted = batch.weights[:, : batch.weights.shape[1] - EVALUATED_STEPS + 1] > 0
        counted &= batch.weights[:, EVALUATED_STEPS - 1 :] > 0
        alive = counted
        for step, hit in enumerate(hits):
            alive = alive & hit[:, step : step + alive.shape[1]]
            counts[step] += alive.sum()
        places += int(counted.sum())
    survival = tuple(float(count) / max(1, places) for count in counts)
    return Figures(places, survival[0], survival)
