"""Peers with an environment and a process of their own: llama.cpp and vLLM's CPU build, on the same weights.

Each runs a short program that reads questions as JSON lines and answers each with its number of tokens. What those
libraries print goes to a file, so that nothing comes between the answers; its end is shown when a program dies.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.worker.arms import Sample
from bench.worker.clocks import Clock, of_process
from bench.worker.workloads import Prompt, Workload
from worker.tokenization import Tokenizer

_WIRE = """
import json, os, sys
wire = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
def say(answer):
    print(json.dumps(answer), file=wire, flush=True)
"""

_LLAMACPP = """
import xllamacpp
model, threads = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = model
params.n_ctx, params.n_parallel = 1024, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
server = xllamacpp.Server(params)
say("ready")
for line in sys.stdin:
    say(server.handle_completions(json.loads(line))["usage"]["completion_tokens"])
"""

_VLLM = """
from vllm import LLM, SamplingParams
model, concurrency, num_steps = sys.argv[1:]
lookup = {"method": "ngram", "num_speculative_tokens": int(num_steps), "prompt_lookup_max": 3, "prompt_lookup_min": 2}
llm = LLM(
    model, dtype="float32", max_model_len=1024, max_num_seqs=int(concurrency), enable_prefix_caching=False,
    speculative_config=lookup if int(num_steps) else None, disable_log_stats=True,
)
say("ready")
for line in sys.stdin:
    questions = json.loads(line)
    prompts = [{"prompt_token_ids": question.pop("prompt")} for question in questions]
    answers = llm.generate(prompts, [SamplingParams(**question) for question in questions], use_tqdm=False)
    say(sum(len(answer.outputs[0].token_ids) for answer in answers))
"""

LAST_LINES = 3
"""Of what a program printed, these are shown when it has died."""


class LineProcess:
    """A program that answers each line of JSON with one."""

    def __init__(self, name: str, python: Path, program: str, *arguments: str, **environment: str) -> None:
        """Start it and wait for its first line."""
        self.name = name
        self.clock: Clock = time.perf_counter
        self._printed = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), "-c", _WIRE + program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
            env={**os.environ, **environment},
        )
        self._read()

    def close(self) -> None:
        """End the process; it ends when nothing more can be asked."""
        self._end()
        self._printed.close()

    def _end(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        status = self._process.wait()
        self._process.stdout.close()
        return status

    def ask(self, question: Any) -> Any:
        """Return the answer to one line.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading says how it ended
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._read()

    def count_cpu_time(self) -> None:
        """From now on count the process's CPU time."""
        self.clock = of_process(self._process.pid)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._end()
            self._printed.seek(0)
            last = " / ".join(self._printed.read().strip().splitlines()[-LAST_LINES:])
            self._printed.close()
            raise RuntimeError(f"{self.name}: ended with status {status}: {last}")
        return json.loads(line)


class LlamaCpp(LineProcess):
    """llama.cpp plain on the GGUF that the default model was made from; one prompt at a time."""

    def __init__(self, python: Path, gguf: Path, tokenizer: Tokenizer, *, threads: int) -> None:
        super().__init__("llama.cpp", python, _LLAMACPP, str(gguf), str(threads))
        self._tokenizer = tokenizer

    def run(self, workload: Workload) -> Sample:
        """See `Arm`."""
        tokens, began = 0, self.clock()
        for prompt in workload.prompts:
            tokens += int(self.ask(self._question(prompt)))
        return Sample(tokens, self.clock() - began)

    def _question(self, prompt: Prompt) -> Mapping[str, Any]:
        return {
            "prompt": _encoded(self._tokenizer, prompt),
            "n_predict": prompt.max_tokens,
            "temperature": prompt.temperature,
            "seed": prompt.seed,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "cache_prompt": False,
        }


class Vllm(LineProcess):
    """vLLM on the CPU in float32, plain or with its n-gram speculation at a fixed depth."""

    def __init__(
        self,
        python: Path,
        model: Path,
        tokenizer: Tokenizer,
        *,
        num_steps: int,
        concurrency: int,
        threads: int,
    ) -> None:
        """Start it, which takes minutes; `num_steps` 0 is plain, `concurrency` the prompts that it answers at once."""
        name = f"vllm ngram {num_steps}" if num_steps else "vllm"
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        intel_openmp = python.parents[1] / "lib" / "libiomp5.so"
        super().__init__(
            name, python, _VLLM, str(model), str(concurrency), str(num_steps),
            VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND=cores, HF_HUB_OFFLINE="1",
            LD_PRELOAD=str(intel_openmp) if intel_openmp.exists() else "",
        )  # fmt: skip
        self._tokenizer = tokenizer

    def run(self, workload: Workload) -> Sample:
        """See `Arm`."""
        questions = [self._question(prompt) for prompt in workload.prompts]
        began = self.clock()
        return Sample(int(self.ask(questions)), self.clock() - began)

    def _question(self, prompt: Prompt) -> Mapping[str, Any]:
        return {
            "prompt": _encoded(self._tokenizer, prompt),
            "max_tokens": prompt.max_tokens,
            "temperature": prompt.temperature,
            "seed": prompt.seed,
        }


def _encoded(tokenizer: Tokenizer, prompt: Prompt) -> Sequence[int]:
    return tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
