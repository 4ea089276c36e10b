"""The controller's side of a worker's control port: three reads and one write, with typed errors.

Nothing is retried here: sending a plan again is safe (same version and content is a renewal), but when to do so
is the caller's business. Knows nothing about depths or policies.
"""

import asyncio
import json
from typing import Protocol, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from worker.protocol import PROTOCOL_VERSION, PlanStatus, SpecInfo, SpecPlan, SpecStats

Wire = TypeVar("Wire", bound=BaseModel)


class WorkerError(Exception):
    """A worker's answer, or the lack of one; `reason` is a short code for metrics."""

    reason = "error"


class Unreachable(WorkerError):
    """No answer: connection refused, time-out, or the connection broke. A plan may have arrived all the same."""

    reason = "unreachable"


class BadAnswer(WorkerError):
    """An answer that is not the wire contract (5xx, another protocol version, malformed)."""

    reason = "bad_answer"


class NotReady(WorkerError):
    """503: the worker is up but not serving yet (its model is loading)."""

    reason = "not_ready"


class Forbidden(WorkerError):
    """401 or 403: the bearer token is missing or wrong."""

    reason = "forbidden"


class Conflict(WorkerError):
    """409: the worker holds a newer plan, or has another boot_id; `current` says what it follows."""

    reason = "conflict"

    def __init__(self, message: str, current: PlanStatus | None) -> None:
        super().__init__(message)
        self.current = current


class Refused(WorkerError):
    """Another 4xx: the plan names an unknown tier (`candidate_steps` are the known ones) or is malformed."""

    reason = "refused"

    def __init__(self, message: str, candidate_steps: list[int] | None = None) -> None:
        super().__init__(message)
        self.candidate_steps = candidate_steps


class WorkerClient(Protocol):
    """What the controller asks of a worker. Every method raises `WorkerError`."""

    async def info(self) -> SpecInfo:
        """`GET /v1/spec/info`."""
        ...

    async def stats(self) -> SpecStats:
        """`GET /v1/spec/stats`."""
        ...

    async def plan_status(self) -> PlanStatus:
        """`GET /v1/spec/plan`."""
        ...

    async def put_plan(self, plan: SpecPlan) -> PlanStatus:
        """`PUT /v1/spec/plan`."""
        ...


class HttpWorkerClient:
    """`WorkerClient` over HTTP. The `httpx.AsyncClient` carries address and token; its owner closes it."""

    def __init__(self, http: httpx.AsyncClient, *, timeout_seconds: float) -> None:
        self._http = http
        self._timeout = timeout_seconds

    async def info(self) -> SpecInfo:
        """See `WorkerClient.info`."""
        return await self._call("GET", "/v1/spec/info", SpecInfo)

    async def stats(self) -> SpecStats:
        """See `WorkerClient.stats`."""
        return await self._call("GET", "/v1/spec/stats", SpecStats)

    async def plan_status(self) -> PlanStatus:
        """See `WorkerClient.plan_status`."""
        return await self._call("GET", "/v1/spec/plan", PlanStatus)

    async def put_plan(self, plan: SpecPlan) -> PlanStatus:
        """See `WorkerClient.put_plan`."""
        return await self._call("PUT", "/v1/spec/plan", PlanStatus, plan.model_dump_json())

    async def _call(self, method: str, path: str, answer: type[Wire], content: str | None = None) -> Wire:
        headers = {"content-type": "application/json"} if content is not None else None
        try:
            async with asyncio.timeout(self._timeout):  # the whole answer: a worker that drips is no worker
                response = await self._http.request(method, path, content=content, headers=headers)
        except TimeoutError as error:
            raise Unreachable(f"no answer within {self._timeout:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, OverflowError) as error:
            raise Unreachable(
                f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            ) from error
        if response.status_code != 200:
            raise _error(response)
        try:
            found = answer.model_validate_json(response.content)
        except ValidationError as error:
            _check_version(_version_of(response))  # a worker of another version may well have other fields
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise BadAnswer(f"{method} {path}: {where}: {first['msg']}") from error
        _check_version(getattr(found, "protocol_version", PROTOCOL_VERSION))
        return found


def _check_version(spoken: object) -> None:
    if spoken != PROTOCOL_VERSION:
        raise BadAnswer(f"the worker speaks protocol {spoken}, this controller {PROTOCOL_VERSION}")


def _version_of(response: httpx.Response) -> object:
    """Return the protocol version that an answer names; ours where it names none."""
    try:
        body = response.json()
    except ValueError:
        return PROTOCOL_VERSION
    return body.get("protocol_version", PROTOCOL_VERSION) if isinstance(body, dict) else PROTOCOL_VERSION


def _error(response: httpx.Response) -> WorkerError:
    """Read a problem+json answer, tolerating one that is none."""
    try:
        problem = response.json()
    except ValueError:
        problem = {}
    if not isinstance(problem, dict):
        problem = {}
    message = f"{response.status_code}: {problem.get('detail') or problem.get('title') or 'no detail'}"
    if response.status_code in (401, 403):
        return Forbidden(message)
    if response.status_code == 409:
        try:
            return Conflict(message, PlanStatus.model_validate_json(json.dumps(problem.get("current"))))
        except ValidationError:
            return Conflict(message, None)
    if response.status_code == 503:
        return NotReady(message)
    if 400 <= response.status_code < 500:
        tiers = problem.get("candidate_steps")
        return Refused(message, tiers if isinstance(tiers, list) else None)
    return BadAnswer(message)
