"""A worker without a model: real plan table and real counters, scripted acceptance, virtual time.

It implements the controller's `WorkerClient`; everything a plan or a statistic means is the worker's own code.
"""

import random
from collections.abc import Sequence

from controller.worker_client import BadAnswer, Conflict, Refused, Unreachable, WorkerError
from worker.protocol import PlanStatus, QueueStats, SpecInfo, SpecPlan, SpecStats
from worker.spec.plan import PlanConflict, PlanTable, UnknownTier
from worker.spec.stats import RoundTimes, RowOutcome, StatsRecorder


class VirtualClock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_790_000_000.0 + self.now


class SimulatedWorker:
    """`rounds(n)` runs n rounds of `batch_size` rows; draft i is correct with probability `acceptance[i]`."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        tiers: Sequence[int] = (0, 1, 2, 3, 5, 7),
        fallback: int = 2,
        boot_id: str = "boot-1",
        seed: int = 0,
        adaptation: bool = True,
    ) -> None:
        self.clock = clock
        self.tiers = list(tiers)
        self.fallback = fallback
        self.adaptation = adaptation
        self.acceptance: Sequence[float] = [0.0] * 64
        self.batch_size = 1
        self.failure: WorkerError | None = None
        """Raised by every call while set."""
        self.plan_failure: WorkerError | None = None
        """Raised by `put_plan` alone, after the plan has arrived: a lost answer."""
        self.plans: list[SpecPlan] = []
        """Every plan accepted, renewals included."""
        self.depths: list[int] = []
        """Depth of every round run."""
        self._rng = random.Random(seed)
        self.restart(boot_id)

    def restart(self, boot_id: str) -> None:
        """Become another process."""
        self.boot_id = boot_id
        self._started = self.clock.now
        self._table = PlanTable(boot_id=boot_id, candidate_steps=self.tiers, fallback_num_steps=self.fallback)
        self._counters = StatsRecorder()

    def rounds(self, count: int) -> None:
        """Run rounds at the depth that the plan table says."""
        for _ in range(count):
            depth = self._table.depth_for_round(self.batch_size, self.clock.now).num_steps
            rows = [self._row(depth) for _ in range(self.batch_size)]
            self._counters.record_round(
                num_steps=depth,
                rows=rows,
                verify_rows=self.batch_size * (depth + 1),
                times=RoundTimes(0.001, 0.01, 0.012, 0.0),
                is_timed=True,
            )
            self.depths.append(depth)

    def _row(self, depth: int) -> RowOutcome:
        correct = 0
        while correct < depth and self._rng.random() < self.acceptance[correct]:
            correct += 1
        return RowOutcome(depth, correct, correct + 1, correct + 1, depth, 100)

    # ---- WorkerClient ----

    async def info(self) -> SpecInfo:
        self._check()
        return SpecInfo(
            boot_id=self.boot_id,
            version="0",
            model="simulated",
            drafter="ngram",
            topk=1,
            device="none",
            dtype="float64",
            candidate_steps=self.tiers,
            fallback_num_steps=self.fallback,
            fast_path="not applicable",
            max_running_requests=8,
            max_context_tokens=2048,
            max_num_batched_tokens=1024,
            adaptation=self.adaptation,
            adaptation_off_reason=None if self.adaptation else "topk is 2",
        )

    async def stats(self) -> SpecStats:
        self._check()
        snapshot = self._counters.snapshot()
        return SpecStats(
            boot_id=self.boot_id,
            uptime_seconds=self.clock.now - self._started,
            plan=self._table.status(self.clock.now),
            queue=QueueStats(running=self.batch_size, waiting=0, kv_tokens_free=1, kv_tokens_total=1),
            buckets=snapshot.buckets,
            requests_finished={},
            prompt_tokens=0,
            generated_tokens=sum(bucket.emitted_tokens for bucket in snapshot.buckets),
            first_tokens=0,
            draft_failures=0,
        )

    async def plan_status(self) -> PlanStatus:
        self._check()
        return self._table.status(self.clock.now)

    async def put_plan(self, plan: SpecPlan) -> PlanStatus:
        self._check()
        try:
            status = self._table.put(plan, self.clock.now)
        except PlanConflict as error:
            raise Conflict(f"409: {error}", error.current) from error
        except UnknownTier as error:
            raise Refused(f"422: {error}", error.candidate_steps) from error
        self.plans.append(plan)
        if self.plan_failure is not None:
            raise self.plan_failure
        return status

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure


UNREACHABLE = Unreachable("connection refused")
__all__ = ["UNREACHABLE", "BadAnswer", "SimulatedWorker", "VirtualClock"]
