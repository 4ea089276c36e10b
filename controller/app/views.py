"""What the API shows: wire types of the answers, and how they come out of the loop's state. Changes nothing."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from controller.controlled import ControlledWorker
from controller.journal import Record
from controller.loop import ControlLoop
from controller.types import Mode, slot_edge
from worker.protocol import NumSteps, TtlSeconds, WireModel, check_draft_tokens

Source = Literal["policy", "pin", "fallback", "frozen"]


class PinBody(WireModel):
    """Body of `PUT /v1/workers/{id}/depth`."""

    num_steps: NumSteps
    num_draft_tokens: int | None = None
    """Optional cross-check; must be `num_steps + 1`."""
    ttl_seconds: TtlSeconds = 3600.0
    reason: Annotated[str, Field(max_length=200)] = ""

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        check_draft_tokens(self.num_steps, self.num_draft_tokens)
        return self


class RollbackBody(WireModel):
    """Body of `POST …/depth/rollback`; may be left out."""

    ttl_seconds: TtlSeconds = 300.0
    """How long the policy is held at the restored depth."""
    reason: Annotated[str, Field(max_length=200)] = ""


class ModeBody(WireModel):
    """Body of `PUT …/mode`."""

    mode: Mode


class SlotDepth(BaseModel):
    """One row of the table: the depth for batches up to `max_batch_size` (the last row: and beyond)."""

    max_batch_size: int
    num_steps: int
    candidate_steps: list[int]


class DepthView(BaseModel):
    """A worker's depth: wished, and what it really follows."""

    worker: str
    desired: int | None
    """The pin's depth, else the decided one for the batch that runs; None before the worker was met."""
    effective: int | None
    """What the worker said last; None while it does not answer."""
    source: Source | None
    plan_version: int | None
    expires_at: datetime | None
    """When the pin ends, else when the worker's plan lapses unless renewed; None without either."""
    tiers: list[int]
    slots: list[SlotDepth]
    reason: str = ""
    """The pin's, else the hold's, as its operator gave it."""
    held_until: datetime | None = None
    """When the policy is free again after a rollback."""


class DecisionView(BaseModel):
    """One record of the journal."""

    cursor: int
    time: datetime
    worker: str
    kind: str
    reason: str
    message: str
    outcome: str
    mode: Mode
    max_batch_size: int | None
    num_steps_before: int | None
    num_steps: int | None
    guard: str | None
    scores: list[dict[str, float | int | None]]
    inputs: dict[str, float]
    observed: dict[str, Any]
    """Windowed counts behind a depth decision: `seconds`, and `cells` per executed (num_steps, max_batch_size)."""
    estimate: dict[str, Any]
    """What the evidence said about the slot."""
    policy: str
    policy_version: str
    code_version: str


class DecisionsView(BaseModel):
    """A page of the journal."""

    decisions: list[DecisionView]
    next: int
    """Give it as `after` to go on."""
    newest: int
    """Cursor of the newest record of all workers."""


class ExplanationView(BaseModel):
    """Why a worker runs at its depth."""

    worker: str
    at: datetime
    lines: list[str]
    decisions: list[DecisionView]
    """The records that the lines rest on."""


class ModesView(BaseModel):
    """The controller's mode, and what holds for each worker."""

    mode: Mode
    workers: dict[str, Mode]


class WorkerModeView(BaseModel):
    """A worker's mode."""

    worker: str
    mode: Mode
    own: bool


class HealthView(BaseModel):
    """Answer of `/healthz`."""

    status: str


class ReadyView(BaseModel):
    """Answer of `/readyz`."""

    ready: bool
    detail: str
    unreachable_workers: list[str]
    journal: str
    """`ok`, or why it cannot be written; the controller goes on without it."""


def depth_view(loop: ControlLoop, worker: ControlledWorker) -> DepthView:
    """Show a worker's depth."""
    life, status, pin = worker.life, worker.status, worker.pin
    running = worker.stats.queue.running if worker.stats else 0
    desired = pin.num_steps if pin else None
    slots: list[SlotDepth] = []
    if life is not None:
        edges = tuple(slot.max_batch_size for slot in life.slots)
        desired = pin.num_steps if pin else life.depths[slot_edge(edges, max(1, running))]
        slots = [
            SlotDepth(
                max_batch_size=slot.max_batch_size,
                num_steps=life.depths[slot.max_batch_size],
                candidate_steps=list(slot.candidate_steps),
            )
            for slot in life.slots
        ]
    is_known = status is not None and worker.is_reachable
    return DepthView(
        worker=worker.id,
        desired=desired,
        effective=status.num_steps if status is not None and is_known else None,
        source=_source(loop, worker) if is_known else None,
        plan_version=status.plan.version if status is not None and status.plan else None,
        expires_at=_expires_at(loop, worker),
        tiers=list(life.info.candidate_steps) if life else [],
        slots=slots,
        reason=pin.reason if pin else worker.hold.reason if worker.hold else "",
        held_until=_in(loop, worker.hold.remaining(loop.clock.monotonic())) if worker.hold else None,
    )


def _source(loop: ControlLoop, worker: ControlledWorker) -> Source | None:
    if worker.status is None:
        return None
    if worker.status.source == "plan":
        return "frozen" if worker.mode == "frozen" else "policy"
    return worker.status.source


def _expires_at(loop: ControlLoop, worker: ControlledWorker) -> datetime | None:
    now = loop.clock.monotonic()
    if worker.pin is not None:
        remaining = worker.pin.remaining(now)
    elif worker.status is not None:
        remaining = worker.status.remaining_seconds - (now - worker.status_seconds)
    else:
        return None
    return _in(loop, remaining) if remaining > 0 else None


def _in(loop: ControlLoop, seconds: float) -> datetime:
    return datetime.fromtimestamp(loop.clock.wall() + seconds, UTC)


def decision_view(record: Record) -> DecisionView:
    """Show a record."""
    decision = record.decision
    return DecisionView(
        cursor=record.cursor,
        time=datetime.fromtimestamp(record.wall_seconds, UTC),
        worker=decision.worker,
        kind=decision.kind,
        reason=decision.reason,
        message=decision.message,
        outcome=decision.outcome,
        mode=decision.mode,
        max_batch_size=decision.max_batch_size,
        num_steps_before=decision.num_steps_before,
        num_steps=decision.num_steps,
        guard=decision.guard,
        scores=[{"num_steps": s.num_steps, "score": s.score, "sd": s.sd} for s in decision.scores],
        inputs=dict(decision.inputs),
        observed=dict(decision.observed),
        estimate=dict(decision.estimate),
        policy=decision.policy,
        policy_version=decision.policy_version,
        code_version=decision.code_version,
    )
