"""What must hold on a GPU: replays equal the forwards they were captured from, both paths draft the same, one read.

Each check raises `CheckFailed` or returns its figures for the last line.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.gpu_check.rig import Rig
from worker.graphs.shapes import Shape
from worker.models.attention import Segment
from worker.self_check import NEAR_TIE
from worker.spec.model_draft import ModelDrafter

REPEATS_OF_READS = 3


class CheckFailed(RuntimeError):
    """Something that must hold does not."""


@torch.inference_mode()
def graphs_equal_eager(rig: Rig) -> dict[str, Any]:
    """Replay every captured shape with fresh inputs, and run it once more without the graph.

    The same kernels over the same numbers: what differs is told, and by more than a near-tie it fails.
    """
    limit = NEAR_TIE[rig.runner.decoder.dtype]
    shapes, bitwise, worst = 0, 0, 0.0
    for stage, graphs in rig.graphs().items():
        for shape in graphs.captured:
            segments = _segments(shape, graphs.captured, rig)
            count = sum(segment.count for segment in segments)
            tokens = torch.arange(count, device=rig.device) * 7 % rig.runner.vocab_size
            replayed = graphs.replay(tokens, segments, _hidden(rig, stage, count))
            if replayed is None or graphs.shape_of(segments) != shape:
                raise CheckFailed(f"{stage}: {shape} is captured, but rows of its size do not find it")
            values = [value.clone() for value in replayed]
            again = graphs.rerun(segments)
            difference = max(_difference(*pair) for pair in zip(values, again, strict=True))
            if not difference <= limit:
                raise CheckFailed(f"{stage}, {shape}: replay and eager differ by {difference:.3g}")
            shapes += 1
            bitwise += difference == 0
            worst = max(worst, difference)
    return {"shapes": shapes, "bitwise_equal": bitwise, "worst_difference": worst}


@torch.inference_mode()
def rounds_equal_ragged(rig: Rig, batch_sizes: Sequence[int]) -> dict[str, Any]:
    """Run rounds of every tier and batch size with graphs, and with the ragged forwards that they stand in for.

    Verify is compared over the same rows. Drafts that fall otherwise are near-ties of random models and only counted.
    """
    limit = NEAR_TIE[rig.runner.decoder.dtype]
    worst, drafts_same, drafts_all = 0.0, 0, 0
    for batch_size in batch_sizes:
        for num_steps in rig.limits.tiers:
            drafts = torch.zeros(batch_size, 0, dtype=torch.long, device=rig.device)
            if num_steps:
                drafts = rig.draft(batch_size, num_steps).clone()
                with rig.eager():
                    drafts_same += int((rig.draft(batch_size, num_steps) == drafts).sum())
                drafts_all += drafts.numel()
            eager_before = rig.runner.launches.eager
            logits = rig.verify_logits(batch_size, num_steps, drafts)[1].clone()
            if rig.runner.launches.eager != eager_before:
                raise CheckFailed(f"batch size {batch_size}, depth {num_steps}: verify ran without a graph")
            with rig.eager():
                difference = _difference(logits, rig.verify_logits(batch_size, num_steps, drafts)[1])
            if not difference <= limit:
                raise CheckFailed(
                    f"batch size {batch_size}, depth {num_steps}: graph and ragged verify differ by {difference:.3g}"
                )
            worst = max(worst, difference)
    return {"worst_difference": worst, "same_drafts": drafts_same / max(1, drafts_all)}


@torch.inference_mode()
def fast_equals_slow(rig: Rig, batch_sizes: Sequence[int]) -> dict[str, Any]:
    """Draft on the fast and on the slow path over the same replays: the same tokens."""
    cells = 0
    for batch_size in batch_sizes:
        for num_steps in [tier for tier in rig.limits.tiers if tier]:
            fast = rig.draft(batch_size, num_steps).clone()
            with rig.slow_path():
                slow = rig.draft(batch_size, num_steps)
            if fast.dtype != slow.dtype or not torch.equal(fast, slow):
                raise CheckFailed(
                    f"batch size {batch_size}, depth {num_steps}: fast and slow path draft otherwise"
                )
            cells += 1
    return {"cells": cells}


def reads_per_round(rig: Rig) -> dict[str, Any]:
    """Count how often a round makes the host wait for the GPU, as CUDA itself sees it; None elsewhere."""
    if rig.device.type != "cuda":
        return {"waits": None}
    rig.round(1, rig.limits.tiers[-1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(REPEATS_OF_READS):
                rig.round(1, rig.limits.tiers[-1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(warning.message) for warning in caught) / REPEATS_OF_READS
    if waits != 1:
        messages = {str(warning.message) for warning in caught}
        raise CheckFailed(f"a round waits for the GPU {waits:g} times instead of once: {messages}")
    return {"waits": waits}


def _segments(shape: Shape, captured: Sequence[Shape], rig: Rig) -> list[Segment]:
    """Return rows that just this shape holds: a request short of the bucket and of the width where that may be."""
    less = [other.bucket for other in captured if other.bucket < shape.bucket]
    requests = max(shape.bucket - 1, max(less, default=0) + 1)
    segments = []
    for index in range(requests):
        count = shape.width if index == 0 else max(1, shape.width - index % 2)
        segments.append(Segment(index, shape.context - count - (3 * index) % 32, count))
    return segments


def _hidden(rig: Rig, stage: str, rows: int) -> Tensor | None:
    if stage != "draft step" or isinstance(rig.drafter, ModelDrafter):
        return None
    width = rig.runner.decoder.config.hidden_size
    values = torch.arange(rows * width, device=rig.device, dtype=torch.float32).view(rows, width).sin()
    return values.to(rig.runner.decoder.dtype)


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest magnitude; tokens outside a vocabulary are −inf in both."""
    one, other = one.double(), other.double()
    if not torch.equal(one.isinf(), other.isinf()):
        return float("inf")
    finite = one.isfinite()
    return float((one[finite] - other[finite]).abs().max() / other[finite].abs().max().clamp(min=1e-9))
