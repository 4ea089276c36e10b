"""Start here: the engine. One thread owns the device and runs `Engine.step` over and over.

    schedule ▶ draft ▶ verify ▶ commit ▶ record

A *round* is one draft + verify + commit of the decoding batch. Its depth is looked up once, before drafting, and
cannot change within it. Knows nothing about HTTP, text or who makes the plans.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from worker.batch import DecodeBatch, row_budget
from worker.model_runner import ModelRunner
from worker.protocol import SpecInfo
from worker.request import FinishReason, Phase, Request, TokenChunk
from worker.sampling import Draw, draw_tokens
from worker.scheduler import PrefillChunk, Scheduler
from worker.spec.draft import Drafter, DraftOutput
from worker.spec.plan import PlanTable
from worker.spec.runtime_state import SpecRuntimeState
from worker.spec.stats import RoundTimes, RowOutcome, StatsRecorder
from worker.spec.verify import Verdict, run_verify

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests speculatively. Owned by one thread (see `engine_thread.py`); `step` is all it does."""

    def __init__(
        self,
        *,
        info: SpecInfo,
        runner: ModelRunner,
        drafter: Drafter | None,
        states: Mapping[int, SpecRuntimeState],
        scheduler: Scheduler,
        plans: PlanTable,
        recorder: StatsRecorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Put the parts together (`build.py` makes them)."""
        self.info = info
        self._runner = runner
        self.drafter = drafter
        self._states = states
        self._scheduler = scheduler
        self._plans = plans
        self._recorder = recorder
        self._clock = clock
        self.state = states[0]
        self.apply_runtime_state(states[0])

    @property
    def eager_rounds(self) -> int:
        """Rounds so far with a forward that replayed no captured graph."""
        return self._runner.launches.eager_rounds

    # ---- the loop ----

    def step(self) -> None:
        """Do one step: a prefill where one is due, then one round of the decoding batch."""
        self._end_aborted()
        plan = self._scheduler.schedule()
        for slot in plan.preempted_slots:
            self._release_draft(slot)
        for chunk in plan.prefill:
            self._prefill(chunk)
        if not plan.decode:
            return
        began = self._clock()
        batch = self._begin_round(plan.decode)
        try:
            batch, draft = self._draft(batch)
            drafted = self._clock()
            verdicts, verify_rows = run_verify(self._runner, self.state, batch.requests, draft)
            verified = self._clock()
            if any(verdict.is_draft_broken for verdict in verdicts):
                batch, draft = self._recover_drafter(batch, draft)
                verify_rows = batch.size
        except Exception as error:
            logger.exception("round of %d requests failed", batch.size)
            self.fail(batch.requests, f"internal error: {error}")
            return
        rows = zip(batch.requests, verdicts, batch.row_budgets, draft.num_levels, strict=True)
        outcomes = [self._commit(*row) for row in rows]
        self._runner.launches.end_round()
        self._recorder.record_round(
            num_steps=batch.num_steps,
            rows=outcomes,
            verify_rows=verify_rows,
            times=RoundTimes(
                draft_seconds=drafted - began - draft.catch_up_seconds,
                verify_seconds=verified - drafted,
                round_seconds=self._clock() - began - draft.catch_up_seconds,
                catch_up_seconds=draft.catch_up_seconds,
            ),
            # The time of a round whose drafter failed is that of no depth.
            is_timed=not plan.prefill and not draft.has_failed,
        )

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        """Make `state` the depth of the coming rounds: the one way to change it, between rounds only."""
        if self.drafter is not None:
            self.drafter.apply_runtime_state(state)
        self.state = state

    def _begin_round(self, requests: Sequence[Request]) -> DecodeBatch:
        """Look the depth up, fix every request's budget, and put the tier that covers them in force."""
        depth = self._plans.depth_for_round(len(requests), self._clock())
        budgets = [
            row_budget(
                request,
                num_steps=depth.num_steps,
                max_context_tokens=self.info.max_context_tokens,
                drafter_context_tokens=self.drafter.max_context_tokens if self.drafter else None,
            )
            for request in requests
        ]
        # Where nobody can use the whole depth (all near their end), the smallest tier that suffices is run.
        num_steps = min(tier for tier in self._states if tier >= max(budgets))
        if num_steps != self.state.num_steps:
            self.apply_runtime_state(self._states[num_steps])
        return DecodeBatch(requests, num_steps, budgets)

    def _draft(self, batch: DecodeBatch) -> tuple[DecodeBatch, DraftOutput]:
        """Draft; a drafter that fails makes this a round at depth 0, and is counted."""
        if self.drafter is not None and batch.num_steps > 0:
            try:
                return batch, self.drafter.draft(batch)
            except Exception as error:
                return self._without_drafts(batch, self._no_drafts(batch), f"{error}")
        return batch, self._no_drafts(batch)

    def _no_drafts(self, batch: DecodeBatch) -> DraftOutput:
        nothing = torch.zeros(batch.size, 0, dtype=torch.long, device=self._runner.device)
        return DraftOutput(nothing, [0] * batch.size)

    def _without_drafts(
        self, batch: DecodeBatch, draft: DraftOutput, reason: str
    ) -> tuple[DecodeBatch, DraftOutput]:
        """Make a round one at depth 0, and count it: its drafter failed."""
        logger.warning("drafter failed, the round counts as one at depth 0: %s", reason)
        self._recorder.record_draft_failure()
        self.apply_runtime_state(self._states[0])
        batch = DecodeBatch(batch.requests, 0, [0] * batch.size)
        draft = self._no_drafts(batch)._replace(catch_up_seconds=draft.catch_up_seconds, has_failed=True)
        return batch, draft

    def _recover_drafter(self, batch: DecodeBatch, draft: DraftOutput) -> tuple[DecodeBatch, DraftOutput]:
        if self.drafter is not None:
            for request in batch.requests:
                self.drafter.recover(request.held_slot)
        return self._without_drafts(batch, draft, "its logits held NaN")

    def _commit(self, request: Request, verdict: Verdict, budget: int, num_levels: int) -> RowOutcome:
        """Append what was accepted, up to EOS or a limit; roll the KV back to the committed tokens; hand out."""
        context_tokens = request.committed
        if not verdict.accept_tokens:
            self.fail([request], "internal error: the model's logits hold NaN")
            return RowOutcome(0, 0, 0, 0, 0, context_tokens)
        emitted, reason, matched_stop = _cut(request, verdict.accept_tokens)
        correct = min(verdict.num_correct_drafts, len(emitted))
        request.output_ids += emitted
        request.kv_length = request.committed - 1
        request.spec.record(num_proposed=num_levels, num_correct=correct)
        if reason is None and self.drafter is not None:
            self.drafter.commit(request)
        outcome = RowOutcome(
            num_proposed_drafts=num_levels,
            num_correct_drafts=correct,
            num_accept_tokens=len(verdict.accept_tokens),
            num_emitted_tokens=len(emitted),
            row_budget=budget,
            context_tokens=context_tokens,
        )
        self._hand_out(request, TokenChunk(tuple(emitted), reason, matched_stop=matched_stop))
        return outcome

    @torch.inference_mode()
    def _prefill(self, chunk: PrefillChunk) -> None:
        """Store a chunk of a prompt; after the last one draw the first token, which belongs to no round."""
        request = chunk.request
        try:
            logits = self._runner.prefill(
                request.held_slot, chunk.start, request.prompt_ids[chunk.start : chunk.stop]
            )
            request.kv_length = chunk.stop
            self._scheduler.stored(request)
            if not chunk.is_last:
                return
            token = int(draw_tokens(logits, [Draw.at(request, request.committed)]))
        except Exception as error:
            logger.exception("prefill of request %s failed", request.id)
            self.fail([request], f"internal error: {error}")
            return
        if token < 0:
            self.fail([request], "internal error: the model's logits hold NaN")
            return
        emitted, reason, matched_stop = _cut(request, [token])
        request.output_ids += emitted
        request.phase = Phase.RUNNING
        request.first_token_seconds = self._clock()
        self._recorder.record_first_token(len(request.prompt_ids))
        self._hand_out(request, TokenChunk(tuple(emitted), reason, matched_stop=matched_stop))

    # ---- the ends of a request: every one goes through _finish ----

    def _hand_out(self, request: Request, chunk: TokenChunk) -> None:
        if chunk.finish_reason is not None:
            self._finish(request, chunk)
        else:
            self._send(request, chunk)

    def fail(self, requests: Sequence[Request], message: str) -> None:
        """End requests with an error; the others and the server live on."""
        for request in requests:
            if request.slot is not None:
                try:
                    self._scheduler.clear_slot(request)
                except Exception:  # a device that is gone: the client must hear of its request all the same
                    logger.exception("the slot of request %s could not be wiped", request.id)
            self._finish(request, TokenChunk((), "error", error=message))

    def _end_aborted(self) -> None:
        now = self._clock()
        for request in self._scheduler.requests():
            if request.aborted.is_set():
                self._finish(request, TokenChunk((), "abort"))
            elif request.is_overdue(now):
                message = f"timeout: the request took longer than {request.timeout_seconds:g} s"
                self._finish(request, TokenChunk((), "abort", error=message))

    def _finish(self, request: Request, chunk: TokenChunk) -> None:
        slot = request.slot
        self._scheduler.remove(request)
        if slot is not None:
            self._release_draft(slot)
        request.phase = Phase.FINISHED
        request.finish_reason = chunk.finish_reason
        request.finish_seconds = self._clock()
        self._recorder.record_finish(chunk.finish_reason or "error")
        self._send(request, chunk)

    def _release_draft(self, slot: int) -> None:
        if self.drafter is not None:
            self.drafter.release(slot)

    def _send(self, request: Request, chunk: TokenChunk) -> None:
        try:
            request.sink(chunk)
        except Exception:
            logger.exception("sink of request %s failed", request.id)
            request.aborted.set()


def _cut(
    request: Request, accept_tokens: Sequence[int]
) -> tuple[list[int], FinishReason | None, int | str | None]:
    """Return the tokens to hand out, cut at the first that ends the request, the reason and what it matched."""
    accept_tokens = accept_tokens[: request.tokens_left]
    ends = request.end_token_ids
    for index, token in enumerate(accept_tokens):
        emitted = list(accept_tokens[: index + 1])
        if token in ends:
            return emitted, "stop", token
        stop = request.stop_strings.push(token) if request.stop_strings else None
        if stop is not None:
            return emitted, "stop", stop
    return list(accept_tokens), "length" if len(accept_tokens) == request.tokens_left else None, None
