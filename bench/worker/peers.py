"""Peers on the same weights: transformers, and llama.cpp in its own environment where there is one."""

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.worker.arms import Arm, Sample
from bench.worker.clocks import Clock, of_process
from bench.worker.workloads import Prompt, Workload
from worker.tokenization import Tokenizer

LLAMACPP_SERVER = """
import json, sys, xllamacpp
model, threads = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = model
params.n_ctx, params.n_parallel = 1024, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
server = xllamacpp.Server(params)
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    answer = server.handle_completions(json.loads(line))
    print(json.dumps(answer["usage"]["completion_tokens"]), flush=True)
"""


class Transformers:
    """`generate` in float32, plain or with its prompt lookup; one prompt at a time."""

    def __init__(self, tokenizer: Tokenizer, model: Any, *, lookup: bool) -> None:
        self.name = "transformers lookup" if lookup else "transformers"
        self.clock: Clock = time.perf_counter
        self._model = model
        self._tokenizer = tokenizer
        self._extra: dict[str, Any] = {"prompt_lookup_num_tokens": 3} if lookup else {}

    def run(self, workload: Workload) -> Sample:
        """See `Arm`."""
        tokens, began = 0, self.clock()
        for prompt in workload.prompts:
            tokens += self._answer(prompt)
        return Sample(tokens, self.clock() - began)

    def count_cpu_time(self) -> None:
        """From now on count the calling thread's CPU time."""
        self.clock = time.thread_time

    def _answer(self, prompt: Prompt) -> int:
        ids = torch.tensor([self._tokenizer.encode_chat([{"role": "user", "content": prompt.text}])])
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if prompt.temperature:
            torch.manual_seed(prompt.seed)
            sampling = {"do_sample": True, "temperature": prompt.temperature, "top_p": 1.0, "top_k": 0}
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=prompt.max_tokens,
            eos_token_id=sorted(self._tokenizer.eos_token_ids),
            pad_token_id=0,
            **sampling,
            **self._extra,
        )
        return int(output.shape[1] - ids.shape[1])


def transformers_arms(directory: Path, *, threads: int, counts_cpu_time: bool) -> Sequence[Arm]:
    """Return both over one model; they run in the thread that asks."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    tokenizer = Tokenizer.load(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    arms = [Transformers(tokenizer, model, lookup=lookup) for lookup in (False, True)]
    if counts_cpu_time:
        for arm in arms:
            arm.count_cpu_time()
    return arms


class LlamaCpp:
    """llama.cpp plain on the GGUF that the default model was made from."""

    name = "llama.cpp"

    def __init__(self, python: Path, gguf: Path, tokenizer: Tokenizer, *, threads: int) -> None:
        self._tokenizer = tokenizer
        self.clock: Clock = time.perf_counter
        self._process = subprocess.Popen(
            [str(python), "-c", LLAMACPP_SERVER, str(gguf), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._read()

    def run(self, workload: Workload) -> Sample:
        """See `Arm`."""
        tokens, began = 0, self.clock()
        for prompt in workload.prompts:
            tokens += int(self._answer(prompt))
        return Sample(tokens, self.clock() - began)

    def count_cpu_time(self) -> None:
        """From now on count the process's CPU time."""
        self.clock = of_process(self._process.pid)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self, prompt: Prompt) -> Any:
        assert self._process.stdin is not None
        question = {
            "prompt": self._tokenizer.encode_chat([{"role": "user", "content": prompt.text}]),
            "n_predict": prompt.max_tokens,
            "temperature": prompt.temperature,
            "seed": prompt.seed,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "cache_prompt": False,
        }
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with status {self._process.wait()}")
        return json.loads(line)
