"""On a real GPU: `make gpu-check` holds, and a worker there gives the tokens of one on a CPU. Skipped without one."""

import pytest
import torch

from bench.gpu_check import __main__ as command
from worker.build import build_engine
from worker.config import WorkerConfig
from worker.request import Request, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
PROMPT = [5, 9, 7] * 8


def test_the_check_holds():
    assert command.main(["--models", "tiny", "--seconds", "0"]) == command.EXIT_OK


def generate(path, device: str, num_steps: int) -> tuple[list[list[int]], int]:
    """Serve three greedy requests in float64, drafting with the target itself; return tokens and eager rounds."""
    thread = build_engine(
        WorkerConfig(
            model={"path": str(path), "dtype": "float64", "device": device},
            spec={"drafter": "model", "draft_model_path": str(path), "num_steps": num_steps},
            engine={"max_running_requests": 3, "max_context_tokens": 256, "profile_seconds": 0},
        )
    )
    outputs: list[list[int]] = [[], [], []]
    for index, output in enumerate(outputs):
        sampling = SamplingParams(max_tokens=20 + 5 * index, temperature=0, ignore_eos=True)
        thread.submit(
            Request(
                f"{index}", [*PROMPT, index], sampling, lambda chunk, to=output: to.extend(chunk.token_ids)
            )
        )
    thread.run_until_idle()
    return outputs, thread.telemetry().eager_rounds


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_tokens_are_a_cpus_and_every_round_is_replayed(tiny_model_dir, num_steps):
    expected, _ = generate(tiny_model_dir(), "cpu", num_steps)
    assert generate(tiny_model_dir(), "cuda", num_steps) == (expected, 0)
