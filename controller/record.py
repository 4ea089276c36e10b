"""Record: decisions and events go to the journal, the metrics and one log line each.

Something is recorded when it changes or would change, when a guard newly intervenes, when a mode or pin moves or
a worker comes and goes; never once per tick.
"""

import logging
from collections.abc import Sequence

from controller.controlled import ControlledWorker
from controller.journal import Journal
from controller.metrics import ControllerMetrics
from controller.policies import PolicyKind
from controller.types import Decision, Kind, Mode, Outcome, Verdict

logger = logging.getLogger("controller.decisions")


class Recorder:
    """Writes down what was decided; the only caller of `Journal.append`."""

    def __init__(
        self, journal: Journal, metrics: ControllerMetrics, *, policy: PolicyKind, code_version: str
    ) -> None:
        self._journal = journal
        self._metrics = metrics
        self._policy = policy
        self._code_version = code_version

    def event(
        self,
        worker: ControlledWorker,
        mode: Mode,
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
                mode=mode,
                guard=guard,
                num_steps=num_steps,
                policy=self._policy.name,
                policy_version=self._policy.version,
                code_version=self._code_version,
            )
        )

    def verdicts(
        self, worker: ControlledWorker, mode: Mode, verdicts: Sequence[Verdict], outcome: Outcome
    ) -> None:
        """Record the verdicts of a turn; `outcome` is what became of the plan that carries them."""
        for verdict in verdicts:
            decision = self._decision(worker, mode, verdict, outcome)
            wanted = verdict.proposal
            key = (decision.outcome, decision.guard, decision.num_steps, wanted.num_steps, wanted.reason)
            if decision.outcome in ("held", "advisory"):
                if worker.noted.get(verdict.proposal.slot) == key:
                    continue
                worker.noted[verdict.proposal.slot] = key
            else:
                worker.noted.pop(verdict.proposal.slot, None)
            self._write(decision)

    def _decision(self, worker: ControlledWorker, mode: Mode, verdict: Verdict, outcome: Outcome) -> Decision:
        proposal = verdict.proposal
        is_probe = proposal.probe is not None or proposal.ends_probe
        if not verdict.is_allowed:
            outcome = "held"
        elif mode == "advisory":
            outcome = "advisory"
        elif not proposal.is_change and proposal.probe is None:
            outcome = "noted"
        message = proposal.message
        if verdict.guard is not None:
            message = f"{message}; {verdict.guard}: {verdict.explanation}"
        return Decision(
            worker=worker.id,
            kind="depth" if proposal.is_change else "probe" if is_probe else "guard",
            reason=proposal.reason,
            message=message,
            outcome=outcome,
            mode=mode,
            max_batch_size=proposal.slot,
            num_steps_before=proposal.num_steps_before,
            num_steps=verdict.num_steps,
            guard=verdict.guard,
            scores=proposal.scores,
            inputs=proposal.inputs,
            policy=self._policy.name,
            policy_version=self._policy.version,
            code_version=self._code_version,
        )

    def _write(self, decision: Decision) -> None:
        self._journal.append(decision)
        self._metrics.decided(decision)
        where = "" if decision.max_batch_size is None else f" batch<={decision.max_batch_size}"
        steps = ""
        if decision.num_steps is not None:
            before = "" if decision.num_steps_before is None else f"{decision.num_steps_before}->"
            steps = f" num_steps {before}{decision.num_steps}"
        logger.info(
            "worker=%s%s %s %s%s (%s): %s",
            decision.worker,
            where,
            decision.kind,
            decision.reason,
            steps,
            decision.outcome,
            decision.message,
        )
