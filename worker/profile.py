"""The start-up profile: seconds of a round by batch size and depth, measured within a time budget, kept on disk.

The curve has steps (kernels change at some row counts) and need not be monotone, so it is measured, never assumed;
depth 0 is measured like the others. Knows nothing about acceptance: every draft is verified, right or wrong.
"""

import hashlib
import json
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import ValidationError

from worker.batch import DecodeBatch
from worker.model_runner import ModelRunner
from worker.protocol import LatencyCell, LatencyProfile
from worker.request import Request, SamplingParams
from worker.spec.composite import model_part
from worker.spec.draft import Drafter, DraftOutput
from worker.spec.runtime_state import SpecRuntimeState
from worker.spec.verify import run_verify

logger = logging.getLogger(__name__)

Stages = tuple[float, float]
"""Seconds of one round's draft and verify stage."""
PROFILE_TOKENS = 256
"""A profiled request's committed tokens and its deepest drafts together. The exact grade attends to multiples of 64
tokens, and a round whose rows lie on both sides of one costs a kernel call more per layer: one in nine does at depth 7,
so all of them lie before it here."""

PRECISE = 0.02
"""Standard deviation of the logarithm of a cell's seconds that is good enough: the ratio of two is then known to
3 %, the least gain that a policy acts on."""
MEDIAN = 1.25
"""A median scatters more than a mean by this factor (√(π/2))."""


def load_or_measure(path: Path, measure: Callable[[], LatencyProfile]) -> LatencyProfile:
    """Return the profile kept at `path`, or measure and keep it. An unreadable file is measured anew."""
    try:
        return LatencyProfile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        pass
    profile = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(profile.model_dump_json())
        Path(file.name).replace(path)
    except OSError as error:  # a read-only home: the next start measures again
        logger.warning("the latency profile cannot be kept at %s: %s", path, error)
    return profile


def sources_digest() -> str:
    """Return a digest of the worker's code: another version of it may take another time."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def profile_path(directory: Path, key: Mapping[str, object]) -> Path:
    """Return where the profile of a configuration is kept: anything that changes a round's time is in `key`."""
    text = json.dumps(key, sort_keys=True, default=str)
    return directory.expanduser() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


class Profiler:
    """Runs real draft and verify stages over made-up requests. Uses the engine's own parts, before it serves."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        states: Mapping[int, SpecRuntimeState],
        *,
        context_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        # Only a drafter that runs a model costs time worth measuring; lookup is counted online.
        self._drafter = model_part(drafter)
        self._states = states
        self._context = context_tokens
        self._clock = clock

    def measure(self, batch_sizes: Sequence[int], budget_seconds: float) -> LatencyProfile:
        """Visit all cells in turn until they are known well enough or the time is over.

        The first visit warms up and does not count; two that count follow whatever the budget.
        """
        requests = [self._request(index) for index in range(max(batch_sizes))]
        samples: dict[tuple[int, int], list[Stages]] = {}
        try:
            ends = self._clock() + budget_seconds
            visits = 0
            while visits < 3 or (error(samples) > PRECISE and self._clock() < ends):
                for batch_size in batch_sizes:
                    for num_steps in self._states:
                        times = self._round(requests[:batch_size], num_steps)
                        if visits:
                            samples.setdefault((batch_size, num_steps), []).append(times)
                visits += 1
        finally:
            for request in requests:
                self._runner.kv.free(request.held_slot)
                if self._drafter:
                    self._drafter.release(request.held_slot)
        return LatencyProfile(
            context_tokens=self._context,
            cells=[_cell(*key, times) for key, times in samples.items()],
            error=min(1.0, error(samples)),
        )

    def _request(self, index: int) -> Request:
        tokens = [(7 * i + index) % self._runner.vocab_size for i in range(self._context)]
        params = SamplingParams(max_tokens=1, temperature=0)
        request = Request(f"profile-{index}", tokens, params, lambda chunk: None)
        request.slot = self._runner.kv.allocate()
        self._runner.prefill(request.slot, 0, tokens[:-1])
        return request

    @torch.inference_mode()
    def _round(self, requests: Sequence[Request], num_steps: int) -> Stages:
        """Return (draft, verify) seconds of one round; what it stores is overwritten by the next one."""
        state, device = self._states[num_steps], self._runner.device
        began = self._clock()
        budgets = [num_steps] * len(requests)
        draft = DraftOutput(
            torch.zeros(len(requests), num_steps, dtype=torch.long, device=device), num_proposed=budgets
        )
        if self._drafter and num_steps:
            self._drafter.apply_runtime_state(state)
            draft = self._drafter.draft(DecodeBatch(requests, num_steps, budgets))
            for request in requests:
                # As after a round that committed one token: the next one has it to store.
                self._drafter.rewind(request.held_slot, request.committed - 2)
        drafted = self._clock()
        run_verify(self._runner, state, requests, draft)
        return drafted - began, self._clock() - drafted


def error(samples: Mapping[tuple[int, int], Sequence[Stages]]) -> float:
    """Return the standard deviation of the logarithm of a cell's median; two samples per cell at least.

    Single cells have too few samples to tell how they scatter, so all are taken together. Stalls count in full: on a
    machine that others use, visits are alike for seconds, and medians scatter more than single rounds suggest.
    """
    rounds = [[math.log(draft + verify) for draft, verify in times] for times in samples.values()]
    spread = math.sqrt(statistics.fmean(statistics.variance(logs) for logs in rounds))
    return MEDIAN * spread / math.sqrt(min(len(logs) for logs in rounds))


def _cell(batch_size: int, num_steps: int, times: Sequence[Stages]) -> LatencyCell:
    drafts, verifies = zip(*times, strict=True)
    return LatencyCell(
        batch_size=batch_size,
        num_steps=num_steps,
        draft_seconds=statistics.median(drafts),
        verify_seconds=statistics.median(verifies),
        round_seconds=statistics.median(draft + check for draft, check in times),
        samples=len(times),
    )
