"""Optimisation of a head within a time: Muon for matrices, AdamW for norms, and a rate that falls with the clock.

Knows nothing about where data comes from or where the result goes.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.train.data import Text
from worker.train.material import Frozen, epoch, make_batch
from worker.train.muon import Muon
from worker.train.network import TrainedHead
from worker.train.objective import Objective

CALM = 0.05
"""The last layer adds to a residual stream that is far larger than its norm's output, in which the head works."""


@dataclass(frozen=True)
class Recipe:
    """What decides the result beside data and time."""

    tokens_per_batch: int = 2048
    matrix_rate: float = 0.02
    norm_rate: float = 0.003
    weight_decay: float = 0.05
    warm_up_batches: int = 20
    falling_share: float = 0.25
    """Share of the time, at its end, in which the rate falls."""
    final_rate: float = 0.02
    """Share of the rate that is left at the end."""
    num_steps: int = 2
    """Steps that are trained: the first on the target's features, the others on the head's own hidden states."""
    first_share: float = 0.7
    """Share of the time in which only the first step is trained."""
    prompt_weight: float = 0.5
    """Of rows that predict a prompt's tokens: the target did not write them, but says what it would."""
    feature_noise: float = 0.05
    """Uniform noise on features, as a share of each number's size."""
    num_negatives: int = 512


@dataclass
class Progress:
    """Where an optimisation stands; kept with the weights so that it can go on."""

    seconds: float = 0.0
    batches: int = 0
    rows: int = 0
    epochs: int = 0


def initial_head(frozen: Frozen, num_features: int) -> TrainedHead:
    """Begin with the target's last layer, reading its output and the token's embedding at like sizes."""
    head = TrainedHead(frozen.config, num_features)
    hidden = frozen.config.hidden_size
    last = frozen.last_layer
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # Only the target's output (the last feature) is read at first.
        head.fuse.copy_(1e-3 * torch.randn(head.fuse.shape, generator=generator))
        head.fuse[:, -hidden:] += torch.eye(hidden)
        head.join[:, :hidden] = 1.5 * torch.eye(hidden)
        head.join[:, hidden:] = 0.5 * torch.eye(hidden)
        head.input_norm.copy_(last["input_layernorm.weight"])
        head.qkv.copy_(torch.cat([last[f"self_attn.{name}_proj.weight"] for name in "qkv"]))
        head.output.copy_(CALM * last["self_attn.o_proj.weight"])
        head.post_attention_norm.copy_(last["post_attention_layernorm.weight"])
        head.gate_up.copy_(torch.cat((last["mlp.gate_proj.weight"], last["mlp.up_proj.weight"])))
        head.down.copy_(CALM * last["mlp.down_proj.weight"])
    return head


def make_optimisers(head: TrainedHead, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest."""
    matrices = [p for p in head.parameters() if p.dim() == 2]
    others = [p for p in head.parameters() if p.dim() != 2]
    return [
        Muon(matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(others, lr=recipe.norm_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def optimise(
    head: TrainedHead,
    objective: Objective,
    optimisers: Sequence[torch.optim.Optimizer],
    texts: Sequence[Text],
    frozen: Frozen,
    recipe: Recipe,
    progress: Progress,
    *,
    seconds: float,
    report: Callable[[float], None],
    report_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train until `progress.seconds` reaches `seconds`; `report` gets the mean loss now and then, and at the end."""
    last, told = clock(), progress.seconds
    base_rates = [[group["lr"] for group in optimiser.param_groups] for optimiser in optimisers]
    losses: list[float] = []
    while progress.seconds < seconds:
        for group in epoch(texts, recipe.tokens_per_batch, random.Random(progress.epochs)):
            share = progress.seconds / seconds
            factor = _rate_factor(recipe, share, progress.batches)
            _set_rates(optimisers, [[rate * factor for rate in rates] for rates in base_rates])
            num_steps = 1 if share < recipe.first_share else recipe.num_steps
            losses.append(_step(head, objective, optimisers, group, frozen, recipe, num_steps))
            progress.batches += 1
            progress.rows += sum(len(text.token_ids) - 2 for text in group)
            now = clock()
            progress.seconds, last = progress.seconds + now - last, now
            if progress.seconds - told >= report_seconds or progress.seconds >= seconds:
                _set_rates(optimisers, base_rates)  # what is saved has the rates of the beginning
                report(sum(losses) / len(losses))
                losses, told, last = [], progress.seconds, clock()
            if progress.seconds >= seconds:
                break
        else:
            progress.epochs += 1


def _rate_factor(recipe: Recipe, share: float, batches: int) -> float:
    """Return the rate's factor after a share of the time: warm-up by batches, steady, a straight fall at the end."""
    left = min(1.0, max(0.0, 1 - share) / recipe.falling_share)
    falling = recipe.final_rate + (1 - recipe.final_rate) * left
    return falling * min(1.0, (batches + 1) / recipe.warm_up_batches)


def _set_rates(optimisers: Sequence[torch.optim.Optimizer], rates: Sequence[Sequence[float]]) -> None:
    for optimiser, own in zip(optimisers, rates, strict=True):
        for parameters, rate in zip(optimiser.param_groups, own, strict=True):
            parameters["lr"] = rate


def _step(
    head: TrainedHead,
    objective: Objective,
    optimisers: Sequence[torch.optim.Optimizer],
    group: Sequence[Text],
    frozen: Frozen,
    recipe: Recipe,
    num_steps: int,
) -> float:
    batch = make_batch(group, frozen, recipe.prompt_weight)
    if recipe.feature_noise:
        batch.features.mul_(1 + recipe.feature_noise * (2 * torch.rand_like(batch.features) - 1))
    loss: Tensor = objective.losses(head, batch, num_steps)
    for optimiser in optimisers:
        optimiser.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    for optimiser in optimisers:
        optimiser.step()
    return float(loss.detach())
