"""Check and time what needs a GPU: captured graphs, one read per round, the fast path under replay.

    python -m bench.gpu_check [--device cpu] [--models 135M 1B] [--seconds 15]

Models of real sizes with seeded random weights are made in the GPU's memory; no network, no files. Under 6 minutes on
one GPU. `--device cpu` rehearses all of it with tiny models and a stand-in for CUDA graphs. The last line is one JSON
object. Exit status 0: everything holds; 1: a check failed; 2: no GPU here, nothing was checked.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.gpu_check import checks, times
from bench.gpu_check.models import SIZES, random_decoder
from bench.gpu_check.rig import Limits, Rig

EXIT_OK, EXIT_FAILED, EXIT_NOT_CHECKED = 0, 1, 2
LEAST_TORCH = (2, 11)
GPU_LIMITS = Limits(tiers=(0, 1, 2, 3, 5, 7), max_batch_size=32, max_tokens=1024, seconds=15.0)
REHEARSAL_LIMITS = Limits(tiers=(0, 1, 3), max_batch_size=3, max_tokens=576, seconds=0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--models", nargs="+", choices=sorted(SIZES), help="default: 135M and 1B; cpu: tiny")
    parser.add_argument("--seconds", type=float, help="for each table of times (default: 15; cpu: the least)")
    options = parser.parse_args(argv)
    problem = None if options.device == "cpu" else gpu_problem()
    if problem:
        print(f"Nothing was checked: {problem}. (--device cpu rehearses on tiny models.)", file=sys.stderr)
        return EXIT_NOT_CHECKED
    device = torch.device(options.device)
    limits = GPU_LIMITS if device.type == "cuda" else REHEARSAL_LIMITS
    if options.seconds is not None:
        limits = limits._replace(seconds=options.seconds)
    names = options.models or (["135M", "1B"] if device.type == "cuda" else ["tiny"])
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    failure = None
    try:
        for name in names:
            # The 1B model with a draft model of its own size would prove nothing that the small one does not.
            for drafter in ("eagle", "model") if name != "1B" else ("eagle",):
                rows.append(check(name, drafter, limits, device))
    except checks.CheckFailed as error:
        failure = str(error)
        print(f"FAILED  {failure}", file=sys.stderr)
    summary = {
        "bench": "gpu-check",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (rehearsal)",
        "torch": torch.__version__,
        "seconds": time.perf_counter() - began,
        "failure": failure,
        "rows": rows,
    }
    print(json.dumps(summary))
    return EXIT_FAILED if failure else EXIT_OK


def gpu_problem() -> str | None:
    """Return why nothing can be checked here."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < LEAST_TORCH:
        return f"torch {torch.__version__} is older than {'.'.join(map(str, LEAST_TORCH))}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return None


def check(name: str, drafter: str, limits: Limits, device: torch.device) -> dict[str, Any]:
    """Make one target and its drafter, and go through everything."""
    began = time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = random_decoder(SIZES[name], seed=0, dtype=dtype, device=device)
    draft = random_decoder(SIZES[name], seed=1, dtype=dtype, device=device) if drafter == "model" else None
    rig = Rig(SIZES[name], target, draft, limits, device)
    batch_sizes = sorted({shape.bucket for graphs in rig.graphs().values() for shape in graphs.captured})
    few = sorted({batch_sizes[0], batch_sizes[-1]})
    row: dict[str, Any] = {
        "model": name,
        "drafter": drafter,
        "graphs": rig.num_graphs,
        "start_seconds": time.perf_counter() - began,
    }
    row["graph_vs_eager"] = checks.graphs_equal_eager(rig)
    row["graph_vs_ragged"] = checks.rounds_equal_ragged(rig, batch_sizes)
    row["fast_vs_slow"] = checks.fast_equals_slow(rig, batch_sizes)
    row["reads"] = checks.reads_per_round(rig)
    row["draft_kernels"] = times.draft_kernels(rig, few[-1], limits.tiers[-1])
    row["swap_us"] = times.swap_microseconds(rig)
    row["depth_0_tax"] = times.depth_0_tax(rig, few[0])
    row["rounds"] = times.round_times(rig, few)
    for title, value in row.items():
        if title != "rounds":
            print(f"{name} {drafter:6s} {title}: {value}", flush=True)
    for cell in row["rounds"]:
        print(
            f"{name} {drafter:6s} batch {cell['batch_size']:3d} depth {cell['num_steps']:2d} "
            f"graphs {cell['graphs_us']:9.0f} µs, eager {cell['eager_us']:9.0f} µs",
            flush=True,
        )
    return row


if __name__ == "__main__":
    sys.exit(main())
