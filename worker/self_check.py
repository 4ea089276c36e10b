"""The check before serving: every tier gives the tokens of plain decoding, and the fast path equals the slow one.

A broken build (a wrong kernel, a bad pairing) is found here and not by users. It is the warm-up as well: every shape
is run once. Knows nothing about traffic.
"""

import logging
from collections.abc import Callable, Mapping

import torch

from worker.engine_thread import EngineThread
from worker.model_runner import ModelRunner
from worker.models.attention import Segment
from worker.request import QueueFull, Request, SamplingParams, TokenChunk
from worker.sampling import Draw, filter_logits, noise_of
from worker.spec.composite import model_part
from worker.spec.draft import ChainDrafter, ChainSteps, Drafter
from worker.spec.runtime_state import SpecRuntimeState

logger = logging.getLogger(__name__)

NEW_TOKENS = 10
TWINS = (
    SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, seed=11, ignore_eos=True),
)
NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 6e-2}
"""Largest gap of two logits, relative to the largest magnitude, that counts as a tie in a dtype (DESIGN §7)."""


class SelfCheckFailed(RuntimeError):
    """A tier is broken; the worker must not serve."""


def check_every_tier(
    assemble: Callable[[int], EngineThread],
    states: Mapping[int, SpecRuntimeState],
    runner: ModelRunner,
    drafter: Drafter | None,
) -> None:
    """Run a short text at every depth, alone and in a batch of two, and compare with depth 0.

    Args:
        assemble: builds a fresh engine whose fallback depth is the argument.
        states: the tiers.
        runner: the target, for the near-tie test.
        drafter: compared on both paths if it drafts chains by `draft_forward`.

    Raises:
        SelfCheckFailed: naming the tier and the first differing token.
    """
    # A period makes lookup drafters propose; the seeds of the sampled twin make drafts fail now and then.
    prompt = [(7 * i + 3) % min(runner.vocab_size, 200) for i in (0, 1, 2, 3) * 6]
    first = assemble(0)
    prompt = prompt[: first.info.max_context_tokens - NEW_TOKENS]
    plain = _generate(first, prompt)
    for num_steps in states:
        for outcome, expected, params in zip(
            _generate(assemble(num_steps), prompt), plain, TWINS, strict=True
        ):
            _compare(outcome, expected, prompt, num_steps, Draw(params, params.seed or 0, 0), runner)
    if (part := model_part(drafter)) is not None and part.topk == 1:
        _check_fast_path(part, states)
    logger.info("self-check passed for tiers %s", list(states))


def _generate(thread: EngineThread, prompt: list[int]) -> list[list[int]]:
    """Generate greedily and sampled, both in one batch where the engine has room for two."""
    outputs: list[list[int]] = [[], []]
    errors: list[str] = []

    def sink(index: int) -> Callable[[TokenChunk], None]:
        def take(chunk: TokenChunk) -> None:
            outputs[index] += chunk.token_ids
            errors.extend([chunk.error] if chunk.error else [])

        return take

    for index, sampling in enumerate(TWINS):
        request = Request(f"self-check-{index}", list(prompt), sampling, sink(index))
        try:
            thread.submit(request)
        except QueueFull:
            thread.run_until_idle()
            thread.submit(request)
    thread.run_until_idle()
    if errors:
        raise SelfCheckFailed(f"self-check: {errors[0]}")
    return outputs


def _compare(
    outcome: list[int],
    expected: list[int],
    prompt: list[int],
    num_steps: int,
    draw: Draw,
    runner: ModelRunner,
) -> None:
    if outcome == expected:
        return
    first = next(i for i, (a, b) in enumerate(zip(outcome, expected, strict=True)) if a != b)
    kind = "greedy" if draw.params.is_greedy else "sampled"
    text = f"num_steps {num_steps}, {kind}: token {first} is {outcome[first]}, plain decoding gives {expected[first]}"
    forced = prompt + expected[:first]
    if not _is_near_tie(runner, forced, draw._replace(position=len(forced)), outcome[first], expected[first]):
        raise SelfCheckFailed(f"self-check: {text}")
    logger.warning("self-check: %s (a near-tie in this arithmetic)", text)


def _is_near_tie(runner: ModelRunner, text: list[int], draw: Draw, one: int, other: int) -> bool:
    """Whether plain decoding, forced along `text`, sees the two next tokens as (almost) equally good."""
    slot = runner.kv.allocate()
    try:
        runner.prefill(slot, 0, text[:-1])
        logits = runner.decode(
            torch.tensor(text[-1:], device=runner.device), [Segment(slot, len(text) - 1, 1)]
        )
    finally:
        runner.kv.free(slot)
    scores = logits[0]
    if not draw.params.is_greedy:
        filtered = filter_logits(logits, [draw.params])
        scores = (filtered + noise_of([draw], filtered))[0]
    gap = (scores[one] - scores[other]).abs() / logits.abs().max()
    return bool(gap <= NEAR_TIE[runner.decoder.dtype])


def _check_fast_path(drafter: ChainDrafter, states: Mapping[int, SpecRuntimeState]) -> None:
    """Compare the fast path with organising, on made-up steps of one row (the smallest engine has no more)."""
    for num_steps, state in states.items():
        if num_steps == 0:
            continue
        drafter.apply_runtime_state(state)
        steps = ChainSteps(1, num_steps, drafter.device)
        for step, column in enumerate(steps.columns):
            column.fill_(10 * step)
            steps.append(torch.full((1, 1), 0.5, device=drafter.device))
        fast, slow = drafter.organize(steps), steps.organize_slowly(state.num_draft_tokens)
        for name, ours, reference in zip(fast._fields, fast, slow, strict=True):
            if ours.dtype != reference.dtype or not torch.equal(ours, reference):
                raise SelfCheckFailed(
                    f"self-check: num_steps {num_steps}: {name} differs between fast and slow path"
                )
