"""The HTTP routes: thin translations between requests and `Operator`, `Journal` and the views."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from controller.app.problems import Problem
from controller.app.views import (
    DecisionView,
    DepthView,
    ModeBody,
    PinBody,
    WorkerView,
    decision_view,
    depth_view,
    worker_view,
)
from controller.commands import Confirmation, NotConfirmed, Operator, Superseded
from controller.controlled import ControlledWorker
from controller.journal import Journal
from controller.loop import ControlLoop


def build_router(
    loop: ControlLoop, operator: Operator, journal: Journal, registry: CollectorRegistry
) -> APIRouter:
    """Return all routes of the controller."""
    router = APIRouter()
    _add_workers(router, loop, operator, journal)
    _add_modes(router, loop, operator)
    _add_journal(router, loop, journal)
    _add_health(router, loop, registry)
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


async def _order(loop: ControlLoop, worker: ControlledWorker, order: Any, response: Response) -> DepthView:
    """Carry an order out: 200 applied, 202 not confirmed in time, 409 superseded, 503 unreachable (kept)."""
    try:
        confirmation: Confirmation = await order
    except NotConfirmed as error:
        kept = depth_view(loop, worker).model_dump(mode="json")
        raise Problem(503, f"worker {worker.id}: {error}; the wish is kept", depth=kept) from error
    except Superseded as error:
        kept = depth_view(loop, worker).model_dump(mode="json")
        raise Problem(409, f"worker {worker.id}: {error}", depth=kept) from error
    response.status_code = 200 if confirmation.is_applied else 202
    return depth_view(loop, worker)


def _add_workers(router: APIRouter, loop: ControlLoop, operator: Operator, journal: Journal) -> None:
    @router.get("/v1/workers")
    async def workers() -> dict[str, list[WorkerView]]:
        return {"workers": [worker_view(loop, w, journal.latest(w.id)) for w in loop.workers.values()]}

    @router.get("/v1/workers/{worker_id}")
    async def worker(worker_id: str) -> WorkerView:
        found = _find(loop, worker_id)
        return worker_view(loop, found, journal.latest(found.id))

    @router.get("/v1/workers/{worker_id}/depth")
    async def depth(worker_id: str) -> DepthView:
        return depth_view(loop, _find(loop, worker_id))

    @router.put("/v1/workers/{worker_id}/depth")
    async def pin(worker_id: str, body: PinBody, response: Response) -> DepthView:
        found = _find(loop, worker_id)
        order = operator.pin(found, body.num_steps, ttl_seconds=body.ttl_seconds, reason=body.reason)
        return await _order(loop, found, order, response)

    @router.delete("/v1/workers/{worker_id}/depth")
    async def release(worker_id: str, response: Response) -> DepthView:
        found = _find(loop, worker_id)
        return await _order(loop, found, operator.release(found), response)


def _add_modes(router: APIRouter, loop: ControlLoop, operator: Operator) -> None:
    def modes() -> dict[str, Any]:
        return {"mode": loop.mode, "workers": {w.id: loop.mode_of(w) for w in loop.workers.values()}}

    @router.get("/v1/mode")
    async def mode() -> dict[str, Any]:
        return modes()

    @router.put("/v1/mode")
    async def set_mode(body: ModeBody) -> dict[str, Any]:
        await operator.set_mode(body.mode)
        return modes()

    @router.get("/v1/workers/{worker_id}/mode")
    async def worker_mode(worker_id: str) -> dict[str, Any]:
        found = _find(loop, worker_id)
        return {"worker": found.id, "mode": loop.mode_of(found), "own": found.mode_override is not None}

    @router.put("/v1/workers/{worker_id}/mode")
    async def set_worker_mode(worker_id: str, body: ModeBody) -> dict[str, Any]:
        await operator.set_worker_mode(_find(loop, worker_id), body.mode)
        return await worker_mode(worker_id)

    @router.delete("/v1/workers/{worker_id}/mode")
    async def end_worker_mode(worker_id: str) -> dict[str, Any]:
        await operator.set_worker_mode(_find(loop, worker_id), None)
        return await worker_mode(worker_id)


def _add_journal(router: APIRouter, loop: ControlLoop, journal: Journal) -> None:
    @router.get("/v1/decisions")
    async def decisions(
        after: Annotated[int, Query(ge=0, le=2**62)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        worker: str | None = None,
    ) -> dict[str, int | list[DecisionView]]:
        if worker is not None:
            _find(loop, worker)
        found = [decision_view(record) for record in journal.read(after, limit, worker)]
        return {"decisions": found, "next": found[-1].cursor if found else after}


def _add_health(router: APIRouter, loop: ControlLoop, registry: CollectorRegistry) -> None:
    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        late = loop.late()
        is_ready = loop.is_running and not late
        detail = "ok" if is_ready else f"late: {late}" if loop.is_running else "the loop does not run"
        down = sorted(w.id for w in loop.workers.values() if not w.is_reachable)
        return JSONResponse(
            {"ready": is_ready, "detail": detail, "unreachable_workers": down}, 200 if is_ready else 503
        )

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/")
    async def index(request: Request) -> dict[str, Any]:
        paths = ("v1/workers", "v1/decisions", "v1/mode", "metrics", "healthz", "readyz", "docs")
        return {"service": "slipstream controller", "links": {p: f"{request.base_url}{p}" for p in paths}}
