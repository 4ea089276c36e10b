"""Peers on the same weights in a process of ours: transformers, plain and with its prompt lookup."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.worker.arms import Arm, Sample
from bench.worker.clocks import Clock
from bench.worker.workloads import Prompt, Workload
from worker.tokenization import Tokenizer


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
