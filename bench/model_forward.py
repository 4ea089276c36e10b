"""Times one forward of the default model: transformers (DynamicCache) and our decoder, side by side in one run.

    python bench/model_forward.py [--model DIR] [--dtype int4] [--threads N] [--repeats N] [--cpu-time]

A verify of depth k computes k + 1 rows per request behind `--context` tokens; logits of every row are included. The
two alternate within each repeat, so that a neighbour's load hits both. On a shared machine trust best-of and ratios.
Prints a table and one line of JSON; exits 1 when the two disagree by more than rounding
(in float32 only: packed weights are others).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from worker.device import choose_precision
from worker.models.attention import Segment
from worker.models.decoder import Decoder
from worker.models.fetch import ensure_default_model
from worker.models.loader import load_decoder


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="model directory (default: the default model)")
    parser.add_argument("--dtype", choices=["float32", "int8", "int4"], default="float32", help="our own")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's choice)")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 1, 2, 3, 5, 7], help="depths k to time")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the calling thread's CPU time, not wall time: for busy machines; implies --threads 1",
    )
    return parser.parse_args()


def transformers_round(model_dir: Path, context: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function `[batch, rows] -> [batch, rows, vocab_size]` that leaves the cache as it found it."""
    from transformers import DynamicCache, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    cache = DynamicCache(config=model.config)
    model(context, past_key_values=cache, use_cache=True)

    def run(rows: Tensor) -> Tensor:
        logits: Tensor = model(rows, past_key_values=cache, use_cache=True).logits
        cache.crop(-rows.shape[1])
        return logits

    return run


def own_round(decoder: Decoder, context: Tensor) -> Callable[[Tensor], Tensor]:
    """The same with our decoder; rollback is free."""
    batch, start = context.shape
    kv = decoder.new_kv_cache(batch, start + 64)
    for slot in range(batch):
        decoder.forward(context[slot], [Segment(slot, 0, start)], kv, phase="prefill")

    def run(rows: Tensor) -> Tensor:
        segments = [Segment(slot, start, rows.shape[1]) for slot in range(batch)]
        hidden = decoder.forward(rows.flatten(), segments, kv, phase="decode")
        return decoder.logits(hidden).view(batch, rows.shape[1], -1)

    return run


def timed(run: Callable[[Tensor], Tensor], rows: Tensor, clock: Callable[[], float]) -> float:
    started = clock()
    run(rows)
    return (clock() - started) * 1000


def main() -> int:
    arguments = parse_arguments()
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    threads = 1 if arguments.cpu_time else arguments.threads
    if threads:
        torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    generator = torch.Generator().manual_seed(0)
    directory = arguments.model or ensure_default_model()
    precision = choose_precision(arguments.dtype, torch.device("cpu"))
    decoder = load_decoder(
        directory, dtype=precision.dtype, device=torch.device("cpu"), packing=precision.packing
    )
    vocab_size = decoder.config.vocab_size
    unit = "CPU" if arguments.cpu_time else "wall"
    results = []
    worst = 0.0
    print(
        f"own in {arguments.dtype}, context {arguments.context}, {torch.get_num_threads()} threads; "
        f"{unit} ms: best (median)"
    )
    print(f"{'batch':>5} {'k':>2} {'transformers':>18} {'own':>18} {'ratio':>6} {'own t(k)/t(0)':>14}")
    for batch in arguments.batch_sizes:
        context = torch.randint(0, vocab_size, (batch, arguments.context), generator=generator)
        runs = {"transformers": transformers_round(directory, context), "own": own_round(decoder, context)}
        base = 0.0
        for k in arguments.steps:
            rows = torch.randint(0, vocab_size, (batch, k + 1), generator=generator)
            outputs = [run(rows) for run in runs.values()]  # warm-up and comparison
            worst = max(worst, float((outputs[0] - outputs[1]).abs().max()))
            times: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(arguments.repeats):
                for name, run in runs.items():
                    times[name].append(timed(run, rows, clock))
            best = {name: min(values) for name, values in times.items()}
            median = {name: statistics.median(values) for name, values in times.items()}
            base = base or best["own"]
            columns = [f"{best[name]:9.1f} ({median[name]:6.1f})" for name in runs]
            ratio, growth = best["transformers"] / best["own"], best["own"] / base
            print(
                f"{batch:>5} {k:>2} {columns[0]:>18} {columns[1]:>18} {ratio:6.2f} {growth:14.2f}", flush=True
            )
            results.append({"batch_size": batch, "num_steps": k, "best_ms": best, "median_ms": median})
    settings = {
        "dtype": arguments.dtype,
        "context": arguments.context,
        "threads": torch.get_num_threads(),
        "repeats": arguments.repeats,
    }
    print(
        json.dumps(
            {"benchmark": "model_forward", **settings, "max_logit_difference": worst, "results": results}
        )
    )
    return 0 if precision.packing or worst < 1e-2 else 1


if __name__ == "__main__":
    sys.exit(main())
