"""A simulated worker: rounds on virtual time, counted and timed as the real one counts and times them.

It follows plans (or a rule that decides inside the engine, for rivals and fixed depths), and answers with the
wire's `SpecStats`. Knows nothing about the controller.
"""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from controller.simulate.counters import Bucket, Counted
from controller.simulate.plan import SimulatedPlan
from controller.simulate.scenario import PhaseConfig, Scenario
from controller.simulate.surface import Noise, Surface
from controller.simulate.traffic import Row, Traffic
from worker.protocol import LatencyProfile, PlanStatus, QueueStats, SpecInfo, SpecStats, batch_size_bucket

BOOT_ID = "simulated"


class EngineRule(Protocol):
    """Decides inside the engine, round by round: fixed depths and the rivals' rules."""

    def depth(self, batch_size: int) -> int:
        """Return the depth of the next round."""
        ...

    def verified(self, batch_size: int, num_steps: int, correct: Sequence[int]) -> None:
        """Take in how many drafts of each row were correct."""
        ...


class Round(NamedTuple):
    """What one round came to."""

    started: float
    seconds: float
    num_steps: int
    batch_size: int
    is_probe: bool
    tokens: int


class SimulatedWorker:
    """Plays phases; `now` is its clock."""

    def __init__(
        self, scenario: Scenario, surface: Surface, seed: str, rule: EngineRule | None = None
    ) -> None:
        self.scenario = scenario
        self.surface = surface
        self.now = 0.0
        self.plan = SimulatedPlan(scenario.fallback)
        self._rule = rule
        self._noise = Noise(scenario.latency, random.Random(f"{seed} noise"))
        self._seed = seed
        self._buckets: dict[tuple[int, int], Bucket] = {}
        self._generated = 0
        self._first_tokens = 0
        self._finished = 0
        self._running = 0
        self._depth = scenario.fallback
        self._phase: PhaseConfig | None = None
        self._traffic: Traffic | None = None
        self._done = self._work = self._number = 0

    def begin(self, phase: PhaseConfig, number: int, tokens: int) -> None:
        """Start a phase of so many tokens."""
        self._phase = phase
        self._traffic = Traffic(phase, self.scenario, f"{self._seed} phase {number}")
        self._done, self._work, self._number = 0, tokens, number

    @property
    def is_done(self) -> bool:
        """Whether the phase's work is done."""
        return self._done >= self._work

    def pause(self) -> None:
        """No request runs."""
        self._running = 0
        self._traffic = None

    def depth(self) -> tuple[int, int, int, bool]:
        """Settle what the next round will be: batch size, requests that join, depth, whether it is a probe."""
        traffic = self._traffic
        assert traffic is not None
        size = traffic.size_at(self._done / self._work, self._done)
        joined = traffic.fill(size)
        self._running = size
        if self._rule is not None:
            return size, joined, self._rule.depth(size), False
        num_steps, is_probe = self.plan.depth_for_round(size, self.now)
        return size, joined, num_steps, is_probe

    def play(self) -> tuple[Round, Counted]:
        """Play one round; the clock moves on. Its counts enter only with `count`, as it ends."""
        traffic, phase = self._traffic, self._phase
        assert traffic is not None and phase is not None
        size, joined, num_steps, is_probe = self.depth()
        counted = Counted(num_steps, size)
        for index, row in enumerate(traffic.rows):
            self._play_row(row, num_steps, counted)
            if row.remaining <= 0:
                traffic.rows[index] = traffic.next_request()
                counted.finished += 1
            elif row.mood_left <= 0:
                traffic.settle_mood(row)
        verify_rows = counted.verify_rows
        seconds = self.surface.seconds(size, num_steps, verify_rows, phase.context_tokens)
        draft = self.surface.draft_seconds(size, num_steps)
        factor = self._noise.factor() * self._drift()
        counted.seconds, counted.draft = seconds * factor, draft * factor
        counted.joined = joined if phase.prefill_seconds else 0
        started = self.now
        self.now += counted.seconds + joined * phase.prefill_seconds
        self._depth = num_steps
        self._done += counted.emitted
        if self._rule is not None:
            self._rule.verified(size, num_steps, counted.per_row)
        played = Round(started, self.now - started, num_steps, size, is_probe, counted.emitted)
        return played, counted

    def count(self, counted: Counted) -> None:
        """Add a round to the counters."""
        key = counted.num_steps, batch_size_bucket(counted.size)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(*key)
        assert self._phase is not None
        counted.add_to(bucket, self._phase.context_tokens)
        self._generated += counted.emitted + counted.joined
        self._first_tokens += counted.joined
        self._finished += counted.finished

    def _play_row(self, row: Row, num_steps: int, counted: Counted) -> None:
        remaining = row.remaining
        is_cut_before = self._phase is not None and self._phase.ends == "length" and num_steps >= remaining
        budget = remaining - 1 if is_cut_before else num_steps
        if row.recorded is not None:
            proposed, correct = row.recorded.next_round(budget)
        else:
            row.look_ahead(budget)
            proposed = budget if budget and row.proposes() else 0
            hazards, draws, place, correct = row.hazards, row.draws, row.place, 0
            while correct < proposed and draws[place + correct] < hazards[correct]:
                correct += 1
            row.place = place + correct + 1
        accept = correct + 1
        emitted = min(accept, remaining)
        was_cut = emitted < accept
        kept = min(correct, emitted)
        counted.proposed.append(proposed)
        counted.per_row.append(kept)
        counted.reached.append(kept if was_cut or kept >= budget else kept + 1)
        counted.accept += accept
        counted.emitted += emitted
        row.remaining = remaining - emitted
        row.mood_left -= emitted

    def _drift(self) -> float:
        latency = self.scenario.latency
        if not latency.drift:
            return 1.0
        place = self._number + self._done / self._work
        return 1 + latency.drift * math.sin(2 * math.pi * place / latency.drift_period_phases)

    # ---- answers ----

    def info(self, profile: LatencyProfile | None) -> SpecInfo:
        """Return what the worker is."""
        return SpecInfo(
            boot_id=BOOT_ID,
            version="simulated",
            model="simulated",
            drafter="model",
            topk=1,
            device="none",
            dtype="none",
            candidate_steps=list(self.scenario.candidate_steps),
            fallback_num_steps=self.scenario.fallback,
            fast_path="not applicable",
            max_running_requests=self.scenario.largest_batch,
            max_context_tokens=1 << 20,
            max_num_batched_tokens=1 << 20,
            adaptation=True,
            profile=profile,
        )

    def stats(self, seconds: float) -> SpecStats:
        """Return the counters as they stand at a time (rounds that have ended)."""
        return SpecStats.model_construct(
            protocol_version=1,
            boot_id=BOOT_ID,
            uptime_seconds=seconds,
            plan=self.plan_status(seconds),
            queue=QueueStats.model_construct(
                running=self._running, waiting=0, kv_tokens_free=0, kv_tokens_total=0
            ),
            buckets=[self._buckets[key].to_wire() for key in sorted(self._buckets)],
            requests_finished={"stop": self._finished},
            prompt_tokens=0,
            generated_tokens=self._generated,
            first_tokens=self._first_tokens,
            draft_failures=0,
        )

    def plan_status(self, now: float) -> PlanStatus:
        """Return what is followed."""
        held = self.plan.plan
        return PlanStatus.model_construct(
            source="plan" if held is not None and now < self.plan.expires else "fallback",
            plan=held,
            age_seconds=0.0 if held else None,
            remaining_seconds=max(0.0, self.plan.expires - now),
            pin_remaining_seconds=0.0,
            fallback_num_steps=self.scenario.fallback,
            num_steps=self._depth,
        )
