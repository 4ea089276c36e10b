"""`spec-worker record`: what the drafter would have got right at every place of real texts.

Plain decoding emits one token a round while the drafter drafts the deepest tier at every place; nothing of it is
verified, but the text itself tells afterwards how many drafts were right. So the trace gives the exact outcome of a
round that starts anywhere, at every smaller depth. Knows nothing about policies.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from worker.batch import DecodeBatch
from worker.build import build_engine, model_directory
from worker.config import WorkerConfig
from worker.engine_thread import EngineThread
from worker.protocol import PlanEntry, SpecPlan
from worker.request import Request, SamplingParams, TokenChunk
from worker.spec.draft import Drafter, DraftOutput
from worker.spec.runtime_state import SpecRuntimeState
from worker.tokenization import Tokenizer


class Listener:
    """Stands before a drafter: lets it draft, notes what it proposed, and passes none of it on."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.proposals: dict[str, list[list[int]]] = {}
        """By request id: what was proposed at each place of its output, from the second token on."""

    @property
    def fast_path(self) -> Literal["on", "off", "not applicable"]:
        """The drafter's own."""
        return self._drafter.fast_path

    @property
    def max_context_tokens(self) -> int | None:
        """The drafter's own."""
        return self._drafter.max_context_tokens

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        """Pass on."""
        self._drafter.apply_runtime_state(state)

    def draft(self, batch: DecodeBatch) -> DraftOutput:
        """Draft, note, propose nothing."""
        output = self._drafter.draft(batch)
        tokens = output.draft_tokens.tolist()
        if any(min(row, default=0) < 0 for row in tokens):
            raise RuntimeError("the drafter's logits hold NaN")
        for request, row, count in zip(batch.requests, tokens, output.num_proposed, strict=True):
            self.proposals.setdefault(request.id, []).append(row[:count])
        return output._replace(num_proposed=[0] * batch.size)

    def commit(self, request: Request) -> None:
        """Pass on."""
        self._drafter.commit(request)

    def recover(self, slot: int) -> None:
        """Pass on."""
        self._drafter.recover(slot)

    def release(self, slot: int) -> None:
        """Pass on."""
        self._drafter.release(slot)


def outcomes(
    output_ids: Sequence[int], proposals: Sequence[Sequence[int]], num_steps: int
) -> list[list[int]]:
    """Return `[proposed, correct]` for every place, but the last `num_steps`: their outcome is cut off.

    `proposals[i]` was made when `i + 1` tokens were out.
    """
    places = []
    for index, drafts in enumerate(proposals):
        truth = output_ids[index + 1 : index + 1 + num_steps]
        if len(truth) < num_steps:
            break
        correct = next((i for i, token in enumerate(drafts) if token != truth[i]), len(drafts))
        places.append([len(drafts), correct])
    return places


def record(
    config: WorkerConfig,
    thread: EngineThread,
    tokenizer: Tokenizer,
    prompts: Iterable[str],
    *,
    max_tokens: int,
    temperature: float,
) -> dict[str, Any]:
    """Generate an answer to each prompt (a chat turn) and return the trace, ready for JSON.

    Raises:
        ValueError: there is nothing to record: no drafter, or only depth 0; or trees, which a trace has no place for.
        PromptTooLong: a prompt fills the context.
        RuntimeError: a text could not be generated to its end.
    """
    num_steps = config.spec.candidate_steps[-1]
    engine = thread.engine
    if engine.drafter is None or num_steps == 0:
        raise ValueError("spec.drafter and spec.candidate_steps leave nothing to record")
    if config.spec.topk > 1:
        raise ValueError(f"spec.topk {config.spec.topk}: a trace records chains, set spec.topk = 1")
    engine.drafter = listener = Listener(engine.drafter)
    entries = [PlanEntry(max_batch_size=config.engine.max_running_requests, num_steps=num_steps)]
    plan = SpecPlan(
        controller_epoch=0,
        version=0,
        boot_id=thread.info.boot_id,
        ttl_seconds=86400.0,
        entries=entries,
        reason="record",
    )
    thread.put_plan(plan)
    streams = []
    for seed, prompt in enumerate(prompts):
        prompt_ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        room = max(1, thread.info.max_context_tokens - len(prompt_ids))
        request = Request(
            f"record-{seed}",
            prompt_ids,
            SamplingParams(max_tokens=min(max_tokens, room), temperature=temperature, seed=seed),
            _ignore,
            eos_token_ids=tokenizer.eos_token_ids,
        )
        thread.submit(request)
        thread.run_until_idle()
        if request.finish_reason == "error":
            raise RuntimeError(f"text {seed + 1} could not be generated to its end; see the log")
        streams.append(outcomes(request.output_ids, listener.proposals.pop(request.id, []), num_steps))
    info = thread.info.model_dump(
        mode="json", include={"model", "drafter", "device", "dtype", "version", "profile"}
    )
    return {"num_steps": num_steps, "temperature": temperature, **info, "streams": [s for s in streams if s]}


def read_prompts(path: Path) -> list[str]:
    """Read a JSONL file of `{"text": …}` (ValueError naming the line otherwise)."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{path}:{number}: wants {{"text": "…"}}: {error!r}') from None
        prompts.append(str(text))
    return prompts


def record_file(config: WorkerConfig, texts: Path, *, max_tokens: int, temperature: float) -> dict[str, Any]:
    """Build an engine and record a file of prompts."""
    tokenizer = Tokenizer.load(model_directory(config.model.path))
    return record(
        config,
        build_engine(config),
        tokenizer,
        read_prompts(texts),
        max_tokens=max_tokens,
        temperature=temperature,
    )


def _ignore(chunk: TokenChunk) -> None:
    """Nobody reads along; the text is taken from the request at its end."""
