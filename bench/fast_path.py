"""What the topk=1 fast path saves: the organising step and the whole of `draft_forward`, fast against slow.

    python -m bench.fast_path [--model DIR] [--head DIR] [--dtype int8] [--seconds-per-cell 1] [--cpu-time]

An EAGLE head drafts behind a real target. Without --head it has random weights in the sizes that `train-draft` gives
it: what it proposes has no influence on the times. Fast and slow path alternate call by call, so that a neighbour's
load hits both; medians are told. Both paths must give the same tree, or the bench fails. Prints a table and, as the
last line, one JSON object.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from worker.device import choose_device, choose_precision
from worker.model_runner import POST_NORM, ModelRunner
from worker.models.config import DecoderConfig
from worker.models.loader import load_decoder
from worker.models.locate import locate_model
from worker.request import Request, SamplingParams
from worker.sampling import Draw
from worker.spec.draft import ChainSteps
from worker.spec.eagle import EagleDrafter
from worker.spec.eagle_layouts import load_head
from worker.spec.runtime_state import build_runtime_states
from worker.train.export import export_head
from worker.train.material import READ_FEATURES
from worker.train.network import TrainedHead

CONTEXT_TOKENS = 128
DRAFT_VOCABULARY = 8192
BURST = 16
"""Organising is timed so many times in a row."""
LEAST_CALLS = 3
GREEDY = SamplingParams(max_tokens=64, temperature=0)


class Row(NamedTuple):
    """Medians of one batch size and depth, in microseconds."""

    batch_size: int
    num_steps: int
    organise_fast_us: float
    organise_slow_us: float
    organise_speedup: float
    draft_forward_fast_us: float
    draft_forward_slow_us: float
    draft_forward_speedup: float
    calls: int


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="target (default: the default model)")
    parser.add_argument("--head", type=Path, help="EAGLE head (default: random weights)")
    parser.add_argument("--dtype", help="as model.dtype of a worker (default: int8 on a CPU, else auto)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 3, 5, 7])
    parser.add_argument("--seconds-per-cell", type=float, default=1.0)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU time: for busy machines; one thread"
    )
    return parser.parse_args(argv)


class Pair:
    """One head behind one target, drafting on the fast path and on the slow one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        device = choose_device("auto")
        usual = "int8" if device.type == "cpu" else "auto"
        precision = choose_precision(arguments.dtype or usual, device)
        path = locate_model(arguments.model)
        decoder = load_decoder(path, dtype=precision.dtype, device=device, packing=precision.packing)
        rows, deepest = max(arguments.batch_sizes), max(arguments.depths)
        room = CONTEXT_TOKENS + deepest + 1
        vocab_size = decoder.config.vocab_size
        self.runner = ModelRunner(decoder, num_slots=rows, max_tokens=room, num_tokens=vocab_size)
        with tempfile.TemporaryDirectory() as made:
            head_path = arguments.head or write_random_head(decoder.config, Path(made))
            head = load_head(
                head_path, decoder, path, num_tokens=self.runner.vocab_size, packing=precision.packing
            )
        self.fast, self.slow = (
            EagleDrafter(
                head, self.runner, max_rows=rows, max_tokens=room, deepest_num_steps=deepest,
                use_fast_path=use_fast_path, catch_up_chunk_tokens=CONTEXT_TOKENS,
            )
            for use_fast_path in (True, False)
        )  # fmt: skip
        self.states = build_runtime_states([0, *arguments.depths], max_batch_size=rows, device=device)
        self.requests = [self._request(index) for index in range(rows)]

    def _request(self, index: int) -> Request:
        tokens = [(17 * i + 29) % self.runner.vocab_size for i in range(CONTEXT_TOKENS)]
        request = Request(f"bench-{index}", tokens, GREEDY, lambda chunk: None)
        request.slot = self.runner.kv.allocate()
        if index == 0:
            self.runner.prefill(request.slot, 0, tokens[:-1])
        else:
            self.runner.kv.copy(0, request.slot, CONTEXT_TOKENS - 1)
        return request


def write_random_head(target: DecoderConfig, directory: Path) -> Path:
    """Write a head of `train-draft`'s sizes with seeded weights of a sane size."""
    head = TrainedHead(target, num_features=READ_FEATURES)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
    layers = (max(1, target.num_layers // 2), max(1, target.num_layers - 3), POST_NORM)
    export_head(
        head, torch.arange(min(DRAFT_VOCABULARY, target.vocab_size)), layers, directory, "random weights"
    )
    return directory


@torch.inference_mode()
def measure(pair: Pair, batch_size: int, num_steps: int, seconds: float, clock: Callable[[], float]) -> Row:
    """Time one cell; raise RuntimeError where the two paths differ."""
    requests = pair.requests[:batch_size]
    draws = [[Draw.at(r, r.committed + step) for r in requests] for step in range(num_steps)]
    state = pair.states[num_steps]
    calls: dict[str, Callable[[], object]] = {}
    trees = {}
    for name, drafter in (("fast", pair.fast), ("slow", pair.slow)):
        drafter.apply_runtime_state(state)
        for request in requests:
            drafter.release(request.held_slot)
        logits = drafter.draft_extend(requests)
        calls[f"draft_forward {name}"] = partial(drafter.draft_forward, logits, draws)
        trees[name] = drafter.draft_forward(logits, draws)
    for field, ours, reference in zip(trees["fast"]._fields, trees["fast"], trees["slow"], strict=True):
        if ours.dtype != reference.dtype or not torch.equal(ours, reference):
            raise RuntimeError(
                f"batch size {batch_size}, depth {num_steps}: {field} differs between the paths"
            )
    drafted = trees["fast"].draft_tokens
    steps = ChainSteps(batch_size, num_steps, drafted.device)
    steps.tokens.copy_(drafted)
    for column in steps.columns:
        steps.append(torch.full_like(column.unsqueeze(-1), 0.5, dtype=torch.float32))
    calls["organise fast"] = _burst(lambda: pair.fast.organize(steps))
    calls["organise slow"] = _burst(lambda: steps.organize_slowly(state.num_draft_tokens))
    medians, count = _alternate(calls, seconds, clock)
    for name in ("organise fast", "organise slow"):
        medians[name] /= BURST
    return Row(
        batch_size,
        num_steps,
        medians["organise fast"],
        medians["organise slow"],
        medians["organise slow"] / medians["organise fast"],
        medians["draft_forward fast"],
        medians["draft_forward slow"],
        medians["draft_forward slow"] / medians["draft_forward fast"],
        count,
    )


def _burst(call: Callable[[], object]) -> Callable[[], object]:
    """A few microseconds are below what a clock tells, and behind a forward they would be those of cold caches."""

    def run() -> None:
        for _ in range(BURST):
            call()

    return run


def _alternate(
    calls: dict[str, Callable[[], object]], seconds: float, clock: Callable[[], float]
) -> tuple[dict[str, float], int]:
    """Call all in turn until the time is over; return the medians in microseconds and how often each was called."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    ends = time.perf_counter() + seconds
    count = -1  # the first turn warms up
    while count < LEAST_CALLS or time.perf_counter() < ends:
        for name, call in calls.items():
            began = clock()
            call()
            if count >= 0:
                times[name].append(clock() - began)
        count += 1
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}, count


def _wall_clock() -> float:
    """Wait for what a GPU was told to do: the calls before are over, and their time is theirs."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main(argv: list[str] | None = None) -> int:
    """Run the bench."""
    arguments = parse_arguments(argv)
    if arguments.cpu_time:
        torch.set_num_threads(1)
    clock = time.process_time if arguments.cpu_time else _wall_clock
    pair = Pair(arguments)
    title = "batch  depth   organise fast      slow  speed-up   draft_forward fast      slow  speed-up"
    print(title, flush=True)
    rows = []
    for batch_size in arguments.batch_sizes:
        for num_steps in arguments.depths:
            row = measure(pair, batch_size, num_steps, arguments.seconds_per_cell, clock)
            rows.append(row)
            print(
                f"{row.batch_size:5d} {row.num_steps:6d} {row.organise_fast_us:12.1f} µs {row.organise_slow_us:6.1f} µs"
                f" {row.organise_speedup:8.1f} × {row.draft_forward_fast_us:16.0f} µs"
                f" {row.draft_forward_slow_us:6.0f} µs {row.draft_forward_speedup:7.2f} ×",
                flush=True,
            )
    summary = {
        "bench": "fast-path",
        "organise_speedup_min": round(min(row.organise_speedup for row in rows), 2),
        "draft_forward_speedup_min": round(min(row.draft_forward_speedup for row in rows), 3),
        "rows": [
            {
                name: round(value, 3) if isinstance(value, float) else value
                for name, value in row._asdict().items()
            }
            for row in rows
        ],
    }
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
