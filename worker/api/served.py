"""What the listeners serve: nothing while the model loads, then an engine and its tokenizer.

So that `/healthz` answers from the first second. Knows nothing about HTTP, and of the engine only its door.
"""

from typing import NamedTuple, Protocol

from worker.protocol import PlanStatus, SpecInfo, SpecPlan, SpecStats
from worker.request import Request
from worker.telemetry import Telemetry
from worker.tokenization import Tokenizer


class NotReady(Exception):
    """There is no engine yet (503); the message says why."""


class EngineHealth(Protocol):
    """Whether the engine thread lives, whether it can serve, and why not."""

    @property
    def alive(self) -> bool:
        """The thread runs."""

    @property
    def ready(self) -> bool:
        """The loop ticks and takes requests."""

    @property
    def detail(self) -> str:
        """One sentence for a person."""


class ServingEngine(Protocol):
    """The engine as its edge sees it (`worker.engine_thread.EngineThread`). Every method is thread-safe."""

    @property
    def info(self) -> SpecInfo:
        """What this worker is; constant."""

    def submit(self, request: Request) -> None:
        """Queue a request; raises a RequestRejected."""

    def abort(self, request_id: str) -> bool:
        """End a request by its exact id; False if there is none."""

    def put_plan(self, plan: SpecPlan) -> PlanStatus:
        """Take or renew a plan; raises PlanConflict, UnknownTier."""

    def plan_status(self) -> PlanStatus:
        """Return what is followed right now."""

    def stats(self) -> SpecStats:
        """Return all counters, as one consistent snapshot."""

    def telemetry(self) -> Telemetry:
        """Return all counters, and what only metrics show."""

    def health(self) -> EngineHealth:
        """Tell whether the loop lives and ticks."""

    def shutdown(self, grace_seconds: float) -> None:
        """Refuse new requests, let running ones finish, end the rest, stop."""


class Readiness(NamedTuple):
    """Whether the process lives, whether it can serve, and why not."""

    alive: bool
    ready: bool
    detail: str


class ServedModel:
    """The engine and tokenizer, once they are there. Attached once; read from any thread."""

    def __init__(self, engine: ServingEngine | None = None, tokenizer: Tokenizer | None = None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    def attach(self, engine: ServingEngine, tokenizer: Tokenizer) -> None:
        """Begin to serve."""
        self._tokenizer = tokenizer
        self._engine = engine

    @property
    def engine(self) -> ServingEngine:
        """The engine (NotReady while loading)."""
        if self._engine is None:
            raise NotReady("the model is still loading")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer (NotReady while loading)."""
        if self._tokenizer is None:
            raise NotReady("the model is still loading")
        return self._tokenizer

    @property
    def is_attached(self) -> bool:
        """Whether there is an engine."""
        return self._engine is not None

    def readiness(self) -> Readiness:
        """Return the engine's health, or "loading"."""
        if self._engine is None:
            return Readiness(alive=True, ready=False, detail="loading")
        health = self._engine.health()
        return Readiness(health.alive, health.ready, health.detail)
