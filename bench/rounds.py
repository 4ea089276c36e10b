"""`python -m bench.rounds`: where the time of a round goes on the default model, stage by stage.

*model* is the target's forward with its head, *sampling* is drawing and judging; *own* is all the rest of
`Engine.step`: schedule, look the plan up, draft by lookup, lay rows out, commit, hand out, record. CPU seconds of the
engine's thread with one torch thread, so that a busy machine does not count (wall time with more threads); medians
over rounds. Prints a table and one line of JSON; exits 1 if *own* is above `--most` of a round at batch size 1.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from worker.build import build_engine
from worker.config import WorkerConfig
from worker.engine_thread import EngineThread
from worker.protocol import PlanEntry, SpecPlan
from worker.request import Request, SamplingParams
from worker.spec import verify as verifying

PROMPT = [(7 * i) % 900 + 300 for i in range(8)] * 8
"""64 tokens with a period: lookup always finds something."""


class Timed:
    """Stands in for a function and sums the CPU seconds that its calls take."""

    def __init__(self, function: Callable[..., Any], clock: Callable[[], float]) -> None:
        self.function = function
        self._clock = clock
        self.seconds = 0.0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call through."""
        began = self._clock()
        try:
            return self.function(*arguments, **named)
        finally:
            self.seconds += self._clock() - began


def measure(
    thread: EngineThread,
    clock: Callable[[], float],
    batch_size: int,
    num_steps: int,
    rounds: int,
    version: int,
) -> dict[str, float]:
    """Return medians in seconds per round: whole, model, sampling, own."""
    engine: Any = thread.engine
    model, sampling = Timed(engine._runner.decode, clock), Timed(verifying.verify, clock)
    entries = [PlanEntry(max_batch_size=64, num_steps=num_steps)]
    thread.put_plan(
        SpecPlan(
            controller_epoch=0,
            version=version,
            boot_id=thread.info.boot_id,
            ttl_seconds=3600.0,
            entries=entries,
        )
    )
    sampled = SamplingParams(max_tokens=(num_steps + 1) * rounds + 8, temperature=0, ignore_eos=True)
    requests = [Request(f"{i}", [i + 5, *PROMPT], sampled, lambda chunk: None) for i in range(batch_size)]
    for request in requests:
        thread.submit(request)
    while any(len(request.output_ids) < 2 for request in requests):
        engine.step()
    engine._runner.decode, verifying.verify = model, sampling
    samples: list[tuple[float, float, float]] = []
    try:
        for _ in range(rounds):
            model.seconds = sampling.seconds = 0.0
            began = clock()
            engine.step()
            samples.append((clock() - began, model.seconds, sampling.seconds))
    finally:
        del engine._runner.decode
        verifying.verify = sampling.function
    for request in requests:
        thread.abort(request.id)
    engine.step()
    whole = statistics.median(sample[0] for sample in samples)
    own = statistics.median(sample[0] - sample[1] - sample[2] for sample in samples)
    return {
        "whole": whole,
        "model": statistics.median(sample[1] for sample in samples),
        "sampling": statistics.median(sample[2] for sample in samples),
        "own": own,
        "own_share": own / whole,
    }


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.rounds", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="per cell (default 40)")
    parser.add_argument("--dtype", default="auto", help="model.dtype (default auto)")
    parser.add_argument("--most", type=float, default=0.10, help="largest share of own time (default 0.10)")
    parser.add_argument("--threads", type=int, default=1, help="above 1 wall time is taken (default 1)")
    options = parser.parse_args()
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    config = WorkerConfig(
        model={"dtype": options.dtype, "device": "cpu", "threads": options.threads},
        engine={"max_context_tokens": 1024, "profile_seconds": 0},
        spec={"candidate_steps": [0, 1, 3], "num_steps": 0},
    )
    thread = build_engine(config)
    rows: list[dict[str, float]] = []
    print("batch depth  round ms  model ms  sampling ms  own ms  own share")
    cells = [(1, 0), (1, 1), (1, 3), (8, 0), (8, 3)]
    for version, (batch_size, num_steps) in enumerate(cells):
        rounds = options.rounds if batch_size == 1 else options.rounds // 4 + 1
        found = measure(thread, clock, batch_size, num_steps, rounds, version)
        print(
            f"{batch_size:>5} {num_steps:>5} {found['whole'] * 1e3:>9.2f} {found['model'] * 1e3:>9.2f} "
            f"{found['sampling'] * 1e3:>12.2f} {found['own'] * 1e3:>7.2f} {found['own_share']:>10.1%}",
            flush=True,
        )
        rows.append({"batch_size": batch_size, "num_steps": num_steps, **found})
    worst = max(row["own_share"] for row in rows if row["batch_size"] == 1)
    print(json.dumps({"bench": "rounds", "own_share_max": worst, "dtype": thread.info.dtype, "rows": rows}))
    return 0 if worst <= options.most else 1


if __name__ == "__main__":
    sys.exit(main())
