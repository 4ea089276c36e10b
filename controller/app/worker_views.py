"""What the API shows of a worker: its state of this moment, alone or with its newest decision. Changes nothing."""

from pydantic import BaseModel

from controller.app.views import DecisionView, DepthView, decision_view, depth_view
from controller.controlled import ControlledWorker
from controller.journal import Record
from controller.loop import ControlLoop
from controller.types import Mode
from worker.protocol import QueueStats


class WorkerState(BaseModel):
    """A worker at this moment; the figures are those of the last `window_seconds`."""

    id: str
    url: str
    reachable: bool
    last_error: str | None
    boot_id: str | None
    model: str | None
    device: str | None
    drafter: str | None
    adaptation: bool | None
    adaptation_off_reason: str | None
    mode: Mode
    own_mode: bool
    """The mode was set for this worker alone."""
    depth: DepthView
    queue: QueueStats | None
    running_batch: int | None
    accept_length: float | None
    position_acceptance: list[float | None]
    tokens_per_second: float | None
    rounds_by_num_steps: dict[int, int]
    window_seconds: float
    observation_age_seconds: float | None
    probing: bool


class WorkerView(WorkerState):
    """A worker at a glance."""

    last_decision: DecisionView | None


class WorkersView(BaseModel):
    """All workers."""

    workers: list[WorkerView]


def worker_state(loop: ControlLoop, worker: ControlledWorker) -> WorkerState:
    """Show a worker's state."""
    life = worker.life
    info = life.info if life else None
    recent = life.recent.figures() if life else None
    return WorkerState(
        id=worker.id,
        url=worker.url,
        reachable=worker.is_reachable,
        last_error=worker.last_error,
        boot_id=info.boot_id if info else None,
        model=info.model if info else None,
        device=info.device if info else None,
        drafter=info.drafter if info else None,
        adaptation=info.adaptation if info else None,
        adaptation_off_reason=info.adaptation_off_reason if info else None,
        mode=worker.mode,
        own_mode=worker.mode_override is not None,
        depth=depth_view(loop, worker),
        queue=worker.stats.queue if worker.stats else None,
        running_batch=worker.stats.queue.running if worker.stats else None,
        accept_length=recent.accept_length if recent else None,
        position_acceptance=list(recent.position_acceptance) if recent else [],
        tokens_per_second=recent.tokens_per_second if recent else None,
        rounds_by_num_steps=recent.rounds_by_num_steps if recent else {},
        window_seconds=recent.span_seconds if recent else 0.0,
        observation_age_seconds=worker.age_seconds(loop.clock.monotonic()),
        probing=life is not None and life.probe is not None,
    )


def worker_view(loop: ControlLoop, worker: ControlledWorker, last: Record | None) -> WorkerView:
    """Show a worker and its newest decision."""
    state = worker_state(loop, worker)
    return WorkerView(**dict(state), last_decision=decision_view(last) if last else None)
