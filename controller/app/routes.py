"""The HTTP routes: thin translations between requests and `Operator`, `Journal` and the views."""

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import Field

from controller.app.problems import Problem, refusals
from controller.app.views import (
    DecisionsView,
    DepthView,
    ExplanationView,
    HealthView,
    ModeBody,
    ModesView,
    PinBody,
    ReadyView,
    RollbackBody,
    WorkerModeView,
    decision_view,
    depth_view,
)
from controller.app.worker_views import WorkersView, WorkerView, worker_view
from controller.commands import Confirmation, NotConfirmed, Operator, Superseded
from controller.controlled import ControlledWorker
from controller.explain import explanation, unix_seconds
from controller.journal import Journal
from controller.loop import ControlLoop


def build_router(
    loop: ControlLoop, operator: Operator, journal: Journal, registry: CollectorRegistry
) -> APIRouter:
    """Return all routes of the controller."""
    router = APIRouter(responses=refusals(401, 403))
    _add_workers(router, loop, journal)
    _add_depth(router, loop, operator, journal)
    _add_modes(router, loop, operator, journal)
    _add_journal(router, loop, journal)
    _add_health(router, loop, journal, registry)
    return router


def _find(loop: ControlLoop, worker_id: str) -> ControlledWorker:
    try:
        return loop.workers[worker_id]
    except KeyError:
        raise Problem(
            404,
            f"no worker is called {worker_id!r}; known: {sorted(loop.workers)}",
            workers=sorted(loop.workers),
        ) from None


async def _order(
    loop: ControlLoop, journal: Journal, worker: ControlledWorker, order: Any, response: Response
) -> DepthView:
    """Carry an order out: 200 applied, 202 not confirmed in time, 409 superseded, 503 unreachable (kept)."""
    try:
        confirmation: Confirmation = await order
    except NotConfirmed as error:
        kept = depth_view(loop, worker).model_dump(mode="json")
        raise Problem(503, f"worker {worker.id}: {error}; the wish is kept", depth=kept) from error
    except Superseded as error:
        kept = depth_view(loop, worker).model_dump(mode="json")
        raise Problem(409, f"worker {worker.id}: {error}", depth=kept) from error
    finally:
        await asyncio.to_thread(journal.flush)  # an order that was answered outlives a crash
    response.status_code = 200 if confirmation.is_applied else 202
    return depth_view(loop, worker)


def _add_workers(router: APIRouter, loop: ControlLoop, journal: Journal) -> None:
    @router.get("/v1/workers")
    async def workers() -> WorkersView:
        """All workers at a glance."""
        return WorkersView(
            workers=[worker_view(loop, w, journal.latest(w.id)) for w in loop.workers.values()]
        )

    @router.get("/v1/workers/{worker_id}", responses=refusals(404))
    async def worker(worker_id: str) -> WorkerView:
        """One worker at a glance."""
        found = _find(loop, worker_id)
        return worker_view(loop, found, journal.latest(found.id))

    @router.get("/v1/workers/{worker_id}/explain", responses=refusals(404, 422, 503))
    def explain(
        worker_id: str,
        at: Annotated[
            Annotated[float, Field(allow_inf_nan=False)] | datetime | None,
            Query(description="An earlier time: Unix seconds or ISO 8601 (UTC without a zone)."),
        ] = None,
    ) -> ExplanationView:
        """Why a worker runs at its depth, in words."""
        found = _find(loop, worker_id)
        wall = loop.clock.wall() if at is None else unix_seconds(at)
        records = journal.standing(found.id, wall)
        return ExplanationView(
            worker=found.id,
            at=datetime.fromtimestamp(wall, UTC),
            lines=explanation(found.id, records, wall),
            decisions=[decision_view(record) for record in records],
        )


def _add_depth(router: APIRouter, loop: ControlLoop, operator: Operator, journal: Journal) -> None:
    path = "/v1/workers/{worker_id}/depth"
    unconfirmed: dict[int | str, dict[str, Any]] = {
        202: {"model": DepthView, "description": "Taken, but the worker was not yet seen to follow"}
    }

    @router.get(path, responses=refusals(404))
    async def depth(worker_id: str) -> DepthView:
        """A worker's depth: wished, and what it really follows."""
        return depth_view(loop, _find(loop, worker_id))

    @router.put(path, responses=unconfirmed | refusals(400, 404, 409, 413, 422, 503))
    async def pin(worker_id: str, body: PinBody, response: Response) -> DepthView:
        """Pin a worker's depth for a time."""
        found = _find(loop, worker_id)
        order = operator.pin(found, body.num_steps, ttl_seconds=body.ttl_seconds, reason=body.reason)
        return await _order(loop, journal, found, order, response)

    @router.delete(path, responses=unconfirmed | refusals(404, 409, 503))
    async def release(worker_id: str, response: Response) -> DepthView:
        """Give a worker back to the policy: end its pin, and the hold after a rollback."""
        found = _find(loop, worker_id)
        return await _order(loop, journal, found, operator.release(found), response)

    @router.post(f"{path}/rollback", responses=unconfirmed | refusals(400, 404, 409, 413, 422, 503))
    async def roll_back(worker_id: str, response: Response, body: RollbackBody | None = None) -> DepthView:
        """Undo the newest change of a worker's depth (the policy's or an operator's); hold the policy for a time."""
        found, body = _find(loop, worker_id), body or RollbackBody()
        order = operator.roll_back(found, ttl_seconds=body.ttl_seconds, reason=body.reason)
        return await _order(loop, journal, found, order, response)


def _add_modes(router: APIRouter, loop: ControlLoop, operator: Operator, journal: Journal) -> None:
    path = "/v1/workers/{worker_id}/mode"

    def modes() -> ModesView:
        return ModesView(mode=loop.mode, workers={w.id: w.mode for w in loop.workers.values()})

    @router.get("/v1/mode")
    async def mode() -> ModesView:
        """The controller's mode, and what holds for each worker."""
        return modes()

    @router.put("/v1/mode", responses=refusals(400, 413, 422))
    async def set_mode(body: ModeBody) -> ModesView:
        """Set the mode of all workers; modes of single workers end."""
        await operator.set_mode(body.mode)
        await asyncio.to_thread(journal.flush)
        return modes()

    @router.get(path, responses=refusals(404))
    async def worker_mode(worker_id: str) -> WorkerModeView:
        """A worker's mode; `own`: set for it alone."""
        found = _find(loop, worker_id)
        return WorkerModeView(worker=found.id, mode=found.mode, own=found.mode_override is not None)

    @router.put(path, responses=refusals(400, 404, 413, 422))
    async def set_worker_mode(worker_id: str, body: ModeBody) -> WorkerModeView:
        """Set a worker's own mode."""
        await operator.set_worker_mode(_find(loop, worker_id), body.mode)
        await asyncio.to_thread(journal.flush)
        return await worker_mode(worker_id)

    @router.delete(path, responses=refusals(404))
    async def end_worker_mode(worker_id: str) -> WorkerModeView:
        """End a worker's own mode: the controller's holds again."""
        await operator.set_worker_mode(_find(loop, worker_id), None)
        await asyncio.to_thread(journal.flush)
        return await worker_mode(worker_id)


def _add_journal(router: APIRouter, loop: ControlLoop, journal: Journal) -> None:
    @router.get("/v1/decisions", responses=refusals(404, 422, 503))
    def decisions(
        after: Annotated[int, Query(ge=0, le=2**62)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        worker: str | None = None,
    ) -> DecisionsView:
        """Decisions and events with a cursor above `after`, oldest first; go on with `next`, also after a restart."""
        if worker is not None:
            _find(loop, worker)
        found = [decision_view(record) for record in journal.read(after, limit, worker)]
        return DecisionsView(
            decisions=found, next=found[-1].cursor if found else after, newest=journal.newest
        )


def _add_health(router: APIRouter, loop: ControlLoop, journal: Journal, registry: CollectorRegistry) -> None:
    @router.get("/healthz")
    async def healthz() -> HealthView:
        """The process answers."""
        return HealthView(status="ok")

    @router.get("/readyz", responses={503: {"model": ReadyView, "description": "Turns are late"}})
    async def readyz(response: Response) -> ReadyView:
        """The loop runs and its turns are not late."""
        late = loop.late()
        is_ready = loop.is_running and not late
        response.status_code = 200 if is_ready else 503
        return ReadyView(
            ready=is_ready,
            detail="ok" if is_ready else f"late: {late}" if loop.is_running else "the loop does not run",
            unreachable_workers=sorted(w.id for w in loop.workers.values() if not w.is_reachable),
            journal=journal.failure or "ok",
        )

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1")
    async def index(request: Request) -> dict[str, Any]:
        """Where to go from here."""
        paths = (
            "",
            "v1/workers",
            "v1/decisions",
            "v1/events",
            "v1/mode",
            "metrics",
            "healthz",
            "readyz",
            "openapi.json",
        )
        return {
            "service": "slipstream controller",
            "links": {p or "page": f"{request.base_url}{p}" for p in paths},
        }
