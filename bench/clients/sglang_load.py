"""The load of SGLang's adaptive benchmark: concurrent POSTs to /generate in phases of low and high acceptance.

Acceptance is read as its clients read it: completion_tokens / spec_verify_ct, summed over a phase's requests. The
prompts are our own (`bench/texts`).
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

TEXTS = Path(__file__).resolve().parents[1] / "texts"
PHASES = (("low_1", "prose"), ("high_1", "predictable"), ("low_2", "prose"), ("high_2", "predictable"))
REQUEST_SECONDS = 300.0


@dataclass
class Phase:
    """Sums over one phase."""

    name: str
    seconds: float = 0.0
    tokens: int = 0
    verify_rounds: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def accept_length(self) -> float:
        """Tokens per verify round; NaN without rounds."""
        return self.tokens / self.verify_rounds if self.verify_rounds else float("nan")

    def __str__(self) -> str:
        return (
            f"{self.name:<8} {self.tokens} tokens in {self.seconds:.1f} s ({self.tokens / self.seconds:.1f} tokens/s), "
            f"accept_length {self.accept_length:.2f}, errors {len(self.errors)}"
        )


def run(url: str, *, requests: int, max_new_tokens: int, concurrency: int) -> list[Phase]:
    """Run every phase; errors are counted, not raised."""
    with httpx.Client(base_url=url, timeout=REQUEST_SECONDS) as client:
        return [
            _run_phase(client, name, _prompts(file, requests), max_new_tokens, concurrency)
            for name, file in PHASES
        ]


def _prompts(file: str, count: int) -> list[str]:
    lines = (TEXTS / f"{file}.jsonl").read_text().splitlines()
    return [json.loads(lines[index % len(lines)])["text"] for index in range(count)]


def _run_phase(
    client: httpx.Client, name: str, prompts: list[str], max_new_tokens: int, concurrency: int
) -> Phase:
    phase = Phase(name)
    began = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda prompt: _ask(client, prompt, max_new_tokens), prompts))
    phase.seconds = time.monotonic() - began
    for answer in answers:
        if isinstance(answer, str):
            phase.errors.append(answer)
        else:
            phase.tokens += answer[0]
            phase.verify_rounds += answer[1]
    return phase


def _ask(client: httpx.Client, prompt: str, max_new_tokens: int) -> tuple[int, int] | str:
    """Return (completion_tokens, spec_verify_ct), or what went wrong."""
    body = {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
        "return_logprob": False,
    }
    try:
        meta = client.post("/generate", json=body).raise_for_status().json()["meta_info"]
        return meta["completion_tokens"], meta["spec_verify_ct"]
    except (httpx.HTTPError, KeyError, ValueError) as error:
        return repr(error)
