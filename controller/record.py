"""Record: decisions and events go to the journal, the metrics and one log line each; turns go to the journal.

A decision is recorded when something changes or would change, when a guard newly intervenes, when a mode or pin moves
or a worker comes and goes; never once per tick. A turn's inputs are recorded every time, for `replay`.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from controller.controlled import ControlledWorker
from controller.journal import Journal
from controller.metrics import ControllerMetrics
from controller.policies import PolicyKind
from controller.shadow import Shadow, estimated_gain
from controller.snapshot import NotASnapshot
from controller.tape import checkpoint
from controller.turn import Turn
from controller.types import Decision, Estimate, Kind, Outcome, Verdict, slot_edge

logger = logging.getLogger("controller.decisions")


class Recorder:
    """Writes down what was decided; the only caller of `Journal.append`."""

    def __init__(
        self,
        journal: Journal,
        metrics: ControllerMetrics,
        *,
        policy: PolicyKind,
        code_version: str,
        keeps_turns: bool = True,
        checkpoint_seconds: float = 600.0,
    ) -> None:
        self._journal = journal
        self._metrics = metrics
        self._policy = policy
        self._code_version = code_version
        self._keeps_turns = keeps_turns
        self._checkpoint_seconds = checkpoint_seconds
        self._said_no_checkpoint = False

    def event(
        self,
        worker: ControlledWorker,
        kind: Kind,
        reason: str,
        message: str,
        *,
        outcome: Outcome = "noted",
        guard: str | None = None,
        num_steps: int | None = None,
    ) -> None:
        """Record something that concerns the whole worker."""
        self._write(
            Decision(
                worker=worker.id,
                kind=kind,
                reason=reason,
                message=message,
                outcome=outcome,
                mode=worker.mode,
                guard=guard,
                num_steps=num_steps,
                policy=self._policy.name,
                policy_version=self._policy.version,
                code_version=self._code_version,
            )
        )

    def turn(
        self,
        worker: ControlledWorker,
        turn: Turn,
        estimate: Estimate,
        verdicts: Sequence[Verdict],
        outcome: Outcome,
    ) -> None:
        """Record a turn and its verdicts; `outcome` is what became of the plan that carries them."""
        if self._keeps_turns and worker.life_number:
            self._journal.turn(worker.life_number, turn, verdicts)
            if turn.now - worker.checkpoint_seconds >= self._checkpoint_seconds:
                self._checkpoint(worker, turn.now)
        for verdict in verdicts:
            became = _became(worker, verdict, outcome)
            if self._is_news(worker, f"{verdict.proposal.slot}", became, verdict):
                self._write(self._decision(worker, verdict, became, estimate))

    def step(self, worker: ControlledWorker, kind: str, body: Any = None) -> None:
        """Record what happened to a life between its turns."""
        if self._keeps_turns and worker.life_number:
            self._journal.step(worker.life_number, kind, body)

    def shadow(self, worker: ControlledWorker, shadow: Shadow, verdicts: Sequence[Verdict]) -> None:
        """Record what the policy that only looks on would newly do."""
        estimate, policy = shadow.estimate, shadow.kind
        for verdict in verdicts if estimate is not None else ():
            assert estimate is not None
            wanted = verdict.proposal
            if not self._is_news(worker, f"shadow {wanted.slot}", "advisory", verdict):
                continue
            found = self._decision(worker, verdict, "advisory", estimate)
            gain = estimated_gain(estimate, wanted.slot, wanted.num_steps_before, verdict.num_steps)
            decision = dataclasses.replace(
                found,
                kind="shadow",
                inputs={**found.inputs, **({} if gain is None else {"estimated_gain": gain})},
                policy=policy.name,
                policy_version=policy.version,
            )
            self._write(decision)

    def _is_news(self, worker: ControlledWorker, place: str, outcome: Outcome, verdict: Verdict) -> bool:
        """Whether this is not the very refusal or advice recorded last in its place."""
        if outcome not in ("held", "advisory"):
            worker.noted.pop(place, None)
            return True
        wanted = verdict.proposal
        key = (outcome, verdict.guard, verdict.num_steps, wanted.num_steps, wanted.reason)
        if worker.noted.get(place) == key:
            return False
        worker.noted[place] = key
        return True

    def _checkpoint(self, worker: ControlledWorker, now: float) -> None:
        worker.checkpoint_seconds = now
        if worker.life is None:
            return
        try:
            self._journal.step(worker.life_number, "checkpoint", checkpoint(worker.life))
        except NotASnapshot as error:
            if not self._said_no_checkpoint:
                logger.error("no checkpoints, so replay needs whole lives: %s", error)
            self._said_no_checkpoint = True

    def _decision(
        self, worker: ControlledWorker, verdict: Verdict, outcome: Outcome, estimate: Estimate
    ) -> Decision:
        proposal = verdict.proposal
        is_probe = proposal.probe is not None or proposal.ends_probe
        message = proposal.message
        if verdict.guard is not None:
            message = f"{message}; {verdict.guard}: {verdict.explanation}"
        return Decision(
            worker=worker.id,
            kind="depth" if proposal.is_change else "probe" if is_probe else "guard",
            reason=proposal.reason,
            message=message,
            outcome=outcome,
            mode=worker.mode,
            max_batch_size=proposal.slot,
            num_steps_before=proposal.num_steps_before,
            num_steps=verdict.num_steps,
            guard=verdict.guard,
            scores=proposal.scores,
            inputs=proposal.inputs,
            observed=observed(worker, proposal.slot, estimate),
            estimate=estimated(estimate, proposal.slot),
            policy=self._policy.name,
            policy_version=self._policy.version,
            code_version=self._code_version,
        )

    def _write(self, decision: Decision) -> None:
        self._metrics.decided(decision, self._journal.append(decision).wall_seconds)
        where = "" if decision.max_batch_size is None else f" batch<={decision.max_batch_size}"
        steps = ""
        if decision.num_steps is not None:
            before = "" if decision.num_steps_before is None else f"{decision.num_steps_before}->"
            steps = f" num_steps {before}{decision.num_steps}"
        fields = {
            name: value
            for name in ("worker", "kind", "reason", "outcome", "mode", "max_batch_size", "num_steps_before",
                         "num_steps", "guard", "policy")
            if (value := getattr(decision, name)) not in (None, "")
        }  # fmt: skip
        logger.info(
            "worker=%s%s %s %s%s (%s): %s",
            decision.worker,
            where,
            decision.kind,
            decision.reason,
            steps,
            decision.outcome,
            decision.message,
            extra={"fields": fields},
        )


def _became(worker: ControlledWorker, verdict: Verdict, sent: Outcome) -> Outcome:
    """Return what became of a verdict; `sent` is what became of the plan."""
    if not verdict.is_allowed:
        return "held"
    if worker.mode == "advisory":
        return "advisory"
    proposal = verdict.proposal
    return sent if proposal.is_change or proposal.probe is not None else "noted"


def observed(worker: ControlledWorker, slot: int, estimate: Estimate) -> dict[str, Any]:
    """Return the counts of the recent window that belong to a slot, for the record."""
    if worker.life is None:
        return {}
    edges = tuple(item.slot.max_batch_size for item in estimate.slots)
    span, cells = worker.life.recent.pooled()
    return {
        "seconds": span,
        "cells": [cell for cell in cells if slot_edge(edges, cell["max_batch_size"]) == slot],
    }


def estimated(estimate: Estimate, slot: int) -> dict[str, Any]:
    """Return what the evidence says about a slot, for the record."""
    for found in estimate.slots:
        if found.slot.max_batch_size == slot:
            known = {n: _plain(value) for n, value in vars(found).items() if n not in ("slot", "scores")}
            if slot in estimate.forecasts:
                known["forecast"] = _plain(estimate.forecasts[slot])
            if estimate.acceptance is not None:
                known["acceptance"] = _plain(estimate.acceptance)
            return known
    return {}


def _plain(value: Any) -> Any:
    """Return an estimate as dicts and tuples (`dataclasses.asdict` copies every number on the way)."""
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return {n: _plain(v) for n, v in vars(value).items()} if dataclasses.is_dataclass(value) else value
