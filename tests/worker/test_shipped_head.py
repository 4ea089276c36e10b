"""The head that comes with the default model: it fits, its drafts are often right, and they change no text."""

import json
from pathlib import Path

import pytest

from worker.build import build_engine
from worker.config import WorkerConfig
from worker.models.fetch import ensure_default_model
from worker.protocol import PlanEntry, SpecPlan
from worker.request import Request, SamplingParams
from worker.tokenization import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
HEAD = ROOT / "configs/heads/smollm2-135m-instruct"
TEXTS = ROOT / "bench/texts/eval"
TOKENS = 40

pytestmark = pytest.mark.model


def test_it_is_right_often_enough_and_the_text_stays_plain_decodings():
    config = WorkerConfig(
        model={"device": "cpu", "threads": 1, "dtype": "int8"},
        spec={"drafter": "eagle", "draft_model_path": str(HEAD), "candidate_steps": [0, 2], "num_steps": 0},
        engine={"max_context_tokens": 256, "max_running_requests": 2, "profile_seconds": 0},
    )
    thread = build_engine(config)
    tokenizer = Tokenizer.load(ensure_default_model())
    prompts = [
        json.loads((TEXTS / f"{kind}.jsonl").read_text().splitlines()[0])["text"] for kind in ("chat", "code")
    ]

    def answers(num_steps: int) -> list[Request]:
        plan = {
            "controller_epoch": 0,
            "version": num_steps,
            "boot_id": thread.info.boot_id,
            "ttl_seconds": 60.0,
        }
        thread.put_plan(SpecPlan(**plan, entries=[PlanEntry(max_batch_size=2, num_steps=num_steps)]))
        requests = [
            Request(
                f"{num_steps}-{number}",
                tokenizer.encode_chat([{"role": "user", "content": prompt}]),
                SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=number),
                lambda chunk: None,
                eos_token_ids=tokenizer.eos_token_ids,
            )
            for number, (prompt, temperature) in enumerate(zip(prompts, (0.7, 0.0), strict=True))
        ]
        for request in requests:
            thread.submit(request)
        thread.run_until_idle()
        return requests

    plain, drafted = answers(0), answers(2)
    assert [r.output_ids for r in drafted] == [r.output_ids for r in plain]
    (bucket,) = [b for b in thread.stats().buckets if b.num_steps == 2 and b.max_batch_size == 2]
    assert bucket.correct[0] / bucket.reached[0] > 0.2, "an untrained head is right about never"
