"""Our own arms: the real engine at a fixed depth, and the same steered by the real control loop in this process.

An arm answers a workload's prompts, `concurrency` at a time, and says how long that took.
"""

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from prometheus_client import CollectorRegistry

from bench.worker.clocks import Clock, of_threads
from bench.worker.workloads import Prompt, Workload
from controller.app.build import build_loop, open_journal
from controller.clock import SystemClock
from controller.config import ControllerConfig
from controller.metrics import ControllerMetrics
from worker.build import build_engine
from worker.config import WorkerConfig
from worker.engine_thread import EngineThread
from worker.models.fetch import ensure_default_model
from worker.protocol import PlanEntry, PlanStatus, SpecInfo, SpecPlan, SpecStats
from worker.request import Request, SamplingParams, TokenChunk
from worker.tokenization import Tokenizer


class Sample(NamedTuple):
    """One workload, once."""

    tokens: int
    seconds: float
    accept_length: float | None = None
    """Mean tokens of a round; None for peers."""
    first_drafts: tuple[int, int] = (0, 0)
    """First drafts of a round: correct, proposed."""

    @property
    def tokens_per_second(self) -> float:
        """What is compared; reading the prompts is included."""
        return self.tokens / self.seconds


class Arm(Protocol):
    """One contender."""

    name: str

    def run(self, workload: Workload) -> Sample:
        """Answer all prompts."""


class OwnEngine:
    """An engine that serves in its own thread, the only one of its process (`bench.worker.host`)."""

    def __init__(
        self,
        *,
        dtype: str,
        depths: Sequence[int],
        threads: int,
        concurrency: int,
        drafter: Mapping[str, Any],
    ) -> None:
        """Build and start it; `depths` are its tiers, rising from 0, `drafter` fields of `[spec]`."""
        config = WorkerConfig(
            model={"dtype": dtype, "device": "cpu", "threads": threads},
            spec={"candidate_steps": list(depths), "num_steps": 0, **drafter},
            engine={
                "max_context_tokens": 768,
                "max_running_requests": concurrency,
            },
        )
        self.thread: EngineThread = build_engine(config)
        self.thread.start()
        self.clock: Clock = time.perf_counter
        self.tokenizer = Tokenizer.load(ensure_default_model())
        self.concurrency = concurrency
        self._version = itertools.count(1)

    def count_cpu_time(self, *others: threading.Thread) -> None:
        """From now on count the CPU time of the engine's thread, and of others that work with it."""
        self.clock = of_threads(self.thread._thread, *others)

    def follow(self, num_steps: int) -> None:
        """Put a depth in force for a long time."""
        self.thread.put_plan(
            SpecPlan(
                controller_epoch=0,
                version=next(self._version),
                boot_id=self.thread.info.boot_id,
                ttl_seconds=86400.0,
                entries=[PlanEntry(max_batch_size=self.concurrency, num_steps=num_steps)],
                reason="bench",
            )
        )

    def answer(self, prompts: Sequence[Prompt]) -> list[Request]:
        """Answer all prompts, at most `concurrency` at a time."""
        ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def sink(chunk: TokenChunk) -> None:
            if chunk.finish_reason is not None:
                ended.put(chunk.error)

        requests = []
        for index, prompt in enumerate(prompts):
            if index >= self.concurrency:
                self._check(ended.get())
            request = Request(
                f"bench-{next(self._version)}",
                self.tokenizer.encode_chat([{"role": "user", "content": prompt.text}]),
                SamplingParams(
                    max_tokens=prompt.max_tokens, temperature=prompt.temperature, seed=prompt.seed
                ),
                sink,
                eos_token_ids=self.tokenizer.eos_token_ids,
            )
            self.thread.submit(request)
            requests.append(request)
        for _ in range(min(self.concurrency, len(prompts))):
            self._check(ended.get())
        return requests

    def measure(self, workload: Workload) -> Sample:
        """Answer a workload on the clock."""
        if workload.warm_up:
            self.answer([workload.warm_up] * self.concurrency)
        before = _first_drafts(self.thread.stats())
        began = self.clock()
        requests = self.answer(workload.prompts)
        seconds = self.clock() - began
        rounds = sum(request.spec.rounds for request in requests)
        tokens = sum(len(request.output_ids) for request in requests)
        after = _first_drafts(self.thread.stats())
        accept_length = (tokens - len(requests)) / rounds if rounds else None
        return Sample(tokens, seconds, accept_length, (after[0] - before[0], after[1] - before[1]))

    def _check(self, error: str | None) -> None:
        if error is not None:
            raise RuntimeError(error)


def _first_drafts(stats: SpecStats) -> tuple[int, int]:
    """Return how many first drafts of a round were correct, and how many were proposed."""
    buckets = [bucket for bucket in stats.buckets if bucket.num_steps > 0]
    return sum(bucket.correct[0] for bucket in buckets), sum(bucket.proposed[0] for bucket in buckets)


class Fixed:
    """One depth throughout."""

    def __init__(self, engine: OwnEngine, num_steps: int, name: str) -> None:
        self.name = name
        self._engine, self._num_steps = engine, num_steps

    def run(self, workload: Workload) -> Sample:
        """See `Arm`."""
        self._engine.follow(self._num_steps)
        return self._engine.measure(workload)


class _Client:
    """`controller.worker_client.WorkerClient` without the wire between."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    async def info(self) -> SpecInfo:
        return self._thread.info

    async def stats(self) -> SpecStats:
        return self._thread.stats()

    async def plan_status(self) -> PlanStatus:
        return self._thread.plan_status()

    async def put_plan(self, plan: SpecPlan) -> PlanStatus:
        return self._thread.put_plan(plan)


class Adaptive:
    """The engine under the real control loop with its default policy; the loop runs beside the engine, as ever."""

    name = "adaptive"

    def __init__(self, engine: OwnEngine) -> None:
        self._engine = engine
        config = ControllerConfig.model_validate(
            {"workers": [{"id": "local", "url": "http://local"}], "journal": {"path": ":memory:"}}
        )
        clock, metrics = SystemClock(), ControllerMetrics(CollectorRegistry())
        journal = open_journal(config, clock=clock, metrics=metrics)
        clients = {"local": _Client(engine.thread)}
        loop = build_loop(config, clients, clock=clock, metrics=metrics, journal=journal)
        self._events = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._events.run_until_complete, args=(loop.run(),), name="controller", daemon=True
        )
        self._thread.start()

    def run(self, workload: Workload) -> Sample:
        """See `Arm`."""
        return self._engine.measure(workload)

    def count_cpu_time(self) -> None:
        """The controller's own time counts, too."""
        self._engine.count_cpu_time(self._thread)


def fixed_arms(
    engine: Mapping[str, Any], names: Mapping[str, int], *, counts_cpu_time: bool
) -> Sequence[Arm]:
    """Return arms over one engine by name and depth."""
    own = OwnEngine(**engine)
    if counts_cpu_time:
        own.count_cpu_time()
    return [Fixed(own, num_steps, name) for name, num_steps in names.items()]


def adaptive_arm(engine: Mapping[str, Any], *, counts_cpu_time: bool) -> Sequence[Arm]:
    """Return the arm that a controller steers."""
    adaptive = Adaptive(OwnEngine(**engine))
    if counts_cpu_time:
        adaptive.count_cpu_time()
    return [adaptive]
