"""`make bench-worker`: the default model end to end against itself and its peers, one JSON object in the last line.

    python -m bench.worker                         # every workload and depth, 5 repeats
    python -m bench.worker --quick                 # depths 0, 1, 3; two short prompts; a few minutes
    python -m bench.worker --workloads code chat
    python -m bench.worker --drafter ngram+eagle --draft-model configs/heads/smollm2-135m-instruct

In each repeat all arms answer the same prompts one after another, so that a neighbour's load hits all of them; ratios
are taken within a repeat. `depth 0 again` is a second run of the same arm: how far it is from 1 is the noise floor.
llama.cpp runs where `make bench-llamacpp` has put it, vLLM's CPU build where `make bench-vllm` has. With more than one
answer at once (`--concurrency 8`) vLLM is the only peer.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.worker.arms import Arm, Sample, adaptive_arm, fixed_arms
from bench.worker.host import Build, Host
from bench.worker.peer_processes import LlamaCpp, Vllm
from bench.worker.peers import transformers_arms
from bench.worker.report import FLOAT32, PLAIN, TWIN, summary
from bench.worker.workloads import SOURCES, load
from worker.cli import field_lines
from worker.config import WorkerConfig
from worker.device import available_cores, cpu_name
from worker.models.fetch import ensure_default_model
from worker.tokenization import Tokenizer

LLAMACPP = Path("build/llamacpp")
VLLM = Path("build/vllm")
VLLM_STEPS = {4: 3, 16: 1}
"""Depth of vLLM's lookup up to a number of answers at once: a fixed table is what it offers."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    names = [*SOURCES, "transition"]
    parser = argparse.ArgumentParser(prog="python -m bench.worker", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small run")
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--depths", type=int, nargs="+", help="fixed depths (default 0 1 2 3 5 7)")
    parser.add_argument("--repeats", type=int, help="default 5")
    parser.add_argument("--prompts", type=int, help="per workload (default 6)")
    parser.add_argument("--max-tokens", type=int, help="per answer (default 128)")
    parser.add_argument(
        "--concurrency", type=int, default=1, help="answers at once; above 1 the peer is vLLM"
    )
    parser.add_argument("--threads", type=int, default=available_cores(), help="CPU threads of every arm")
    parser.add_argument("--dtype", default="auto", help="model.dtype of our arms (default auto)")
    parser.add_argument("--drafter", default="ngram", help="spec.drafter of our arms (default ngram)")
    parser.add_argument("--draft-model", help="spec.draft_model_path of our arms")
    parser.add_argument(
        "--topk",
        type=int,
        default=1,
        help="spec.topk of our arms; above 1 (trees, --drafter eagle or model) nothing adapts",
    )
    parser.add_argument("--no-peers", action="store_true", help="only our own arms")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the CPU time of an arm's threads, not wall time: for busy machines; implies --threads 1",
    )
    options = parser.parse_args()
    try:
        WorkerConfig.model_validate({"model": {"dtype": options.dtype}, "spec": spec(options)})
    except ValidationError as error:
        parser.error("; ".join(field_lines(error)))
    if options.cpu_time:
        options.threads = 1
    usual = ([0, 1, 3], 2, 2, 48) if options.quick else ([0, 1, 2, 3, 5, 7], 5, 6, 128)
    for name, value in zip(("depths", "repeats", "prompts", "max_tokens"), usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def spec(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `[spec]` that the command line has."""
    return {"drafter": options.drafter, "draft_model_path": options.draft_model, "topk": options.topk}


@contextmanager
def contenders(options: argparse.Namespace, missing: list[str]) -> Iterator[list[Arm]]:
    """Build all arms; what cannot be had is noted in `missing`."""
    directory = ensure_default_model()
    depths = sorted({0, *options.depths})
    fixed = {PLAIN: 0, TWIN: 0} | {f"depth {depth}": depth for depth in depths if depth}

    def engine(dtype: str, tiers: list[int]) -> dict[str, Any]:
        return {
            "dtype": dtype,
            "depths": tiers,
            "threads": options.threads,
            "concurrency": options.concurrency,
            "drafter": spec(options),
        }

    with ExitStack() as stack:

        def host(build: Build, **settings: Any) -> Sequence[Arm]:
            hosted = Host(build, **settings, counts_cpu_time=options.cpu_time)
            stack.callback(hosted.close)
            return hosted.arms

        arms = [*host(fixed_arms, engine=engine(options.dtype, depths), names=fixed)]
        if options.topk == 1:
            arms += host(adaptive_arm, engine=engine(options.dtype, depths))
        else:
            missing.append("adaptive: depths of trees are not adapted")
        if options.no_peers:
            missing.append("peers, float32: not asked for")
        else:
            arms += _peers(options, directory, stack, missing)
            if options.concurrency == 1:
                arms += host(fixed_arms, engine=engine("float32", [0]), names={FLOAT32: 0})
                arms += host(transformers_arms, directory=directory, threads=options.threads)
        yield arms


def _peers(
    options: argparse.Namespace, directory: Path, stack: ExitStack, missing: list[str]
) -> Iterator[Arm]:
    """Start those that have a process of their own."""
    tokenizer = Tokenizer.load(directory)
    gguf = next(LLAMACPP.glob("*.gguf"), None)
    if options.concurrency > 1:
        missing.append("transformers, llama.cpp, float32: one answer at a time only")
    elif gguf is None:
        missing.append(f"llama.cpp: not in {LLAMACPP} (make bench-llamacpp)")
    else:
        try:
            llamacpp = LlamaCpp(LLAMACPP / "bin" / "python", gguf, tokenizer, threads=options.threads)
        except RuntimeError as error:
            missing.append(str(error))
        else:
            stack.callback(llamacpp.close)
            if options.cpu_time:
                llamacpp.count_cpu_time()
            yield llamacpp
    if options.cpu_time:
        missing.append("vllm: its threads' CPU time is spread over processes")
    elif not (VLLM / "bin" / "python").exists():
        missing.append(f"vllm: not in {VLLM} (make bench-vllm)")
    else:
        lookup = next((steps for most, steps in VLLM_STEPS.items() if options.concurrency <= most), 1)
        for num_steps in (0, lookup):
            try:
                vllm = Vllm(
                    VLLM / "bin" / "python", directory, tokenizer,
                    num_steps=num_steps, concurrency=options.concurrency, threads=options.threads,
                )  # fmt: skip
            except RuntimeError as error:
                missing.append(str(error))
                continue
            stack.callback(vllm.close)
            yield vllm


def main() -> int:
    """Run the command line; returns the exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options = parse()
    missing: list[str] = []
    samples: dict[tuple[str, str], list[Sample]] = {}
    try:
        workloads = load(options.workloads, prompts=options.prompts, max_tokens=options.max_tokens)
    except ValueError as error:
        sys.exit(str(error))
    with contenders(options, missing) as arms:
        for repeat in range(options.repeats):
            for workload in workloads:
                for arm in arms:
                    sample = arm.run(workload)
                    samples.setdefault((workload.name, arm.name), []).append(sample)
                    print(
                        f"repeat {repeat + 1}  {workload.name:<12} {arm.name:<20} {sample.tokens:>5} tokens "
                        f"{sample.seconds:>7.2f} s  {sample.tokens_per_second:>7.2f} tokens/s",
                        flush=True,
                    )
    found = summary(samples, missing)
    print(
        f"\n{'workload':<12} {'arm':<20} {'tokens/s':>8} {'range':>16} {'vs plain':>8} {'accept_length':>13}"
    )
    for row in found["rows"]:
        low, high = row["range"]
        versus = "-" if row["vs_plain"] is None else f"{row['vs_plain']:.2f}"
        length = "-" if row["accept_length"] is None else f"{row['accept_length']:.2f}"
        print(
            f"{row['workload']:<12} {row['arm']:<20} {row['tokens_per_second']:>8.2f} {low:>8.2f}…{high:<7.2f} "
            f"{versus:>8} {length:>13}"
        )
    for line in missing:
        print(f"left out: {line}")
    settings = {
        name: getattr(options, name)
        for name in (
            "dtype",
            "workloads",
            "depths",
            "threads",
            "concurrency",
            "repeats",
            "prompts",
            "max_tokens",
            "cpu_time",
            "drafter",
            "draft_model",
            "topk",
        )
    }
    print(json.dumps({**found, "settings": {**settings, "cpu": cpu_name()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
