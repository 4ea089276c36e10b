"""One run: a scenario, a seed, and whoever decides, on virtual time.

The controller's side is the real thing: `Observer`, estimators, policy and guards of a `Life`, fed with the wire's
types; only HTTP is left out, replaced by a lag and by readings that get lost.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from controller.config import ControllerConfig
from controller.life import Life
from controller.simulate.profile import profile_of
from controller.simulate.scenario import Scenario
from controller.simulate.surface import Surface
from controller.simulate.work import phase_tokens
from controller.simulate.worker import EngineRule, Round, SimulatedWorker
from controller.types import ProbeRequest
from controller.worker_client import WorkerClient
from worker.protocol import LatencyProfile, PlanEntry, Probe, SpecPlan

CONTROLLER_STARTS_AT = 0.0


@dataclass
class Stretch:
    """Rounds in a row at one depth within a phase (probes apart)."""

    phase: int
    started: float
    num_steps: int
    is_probe: bool
    rounds: int = 0
    seconds: float = 0.0
    tokens: int = 0


@dataclass
class RunResult:
    """What a run came to."""

    phase_seconds: list[float] = field(default_factory=list)
    """Busy seconds of each phase: the sum of its rounds."""
    phase_started: list[float] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    rounds: int = 0
    changes: int = 0
    """Plans whose table differs from the one before; for a rule in the engine, changes at an unchanged batch size."""
    probe_seconds: float = 0.0
    reasons: list[tuple[float, str]] = field(default_factory=list)
    """(time, what was decided) for people who look into a run."""
    counts_depths: bool = False
    _batch_size: int = 0

    @property
    def seconds(self) -> float:
        """Busy seconds altogether."""
        return sum(self.phase_seconds)

    def add(self, played: Round, phase: int) -> None:
        """Take a round in."""
        self.rounds += 1
        if played.is_probe:
            self.probe_seconds += played.seconds
        last = self.stretches[-1] if self.stretches else None
        if self.counts_depths and last is not None and played.batch_size == self._batch_size:
            self.changes += played.num_steps != last.num_steps
        self._batch_size = played.batch_size
        key = phase, played.num_steps, played.is_probe
        if last is None or (last.phase, last.num_steps, last.is_probe) != key:
            last = Stretch(phase, played.started, played.num_steps, played.is_probe)
            self.stretches.append(last)
        last.rounds += 1
        last.seconds += played.seconds
        last.tokens += played.tokens


class Steering:
    """The controller's side of a run: reads, decides, sends; everything at its time."""

    def __init__(
        self, worker: SimulatedWorker, config: ControllerConfig, profile: LatencyProfile | None, seed: str
    ) -> None:
        scenario = worker.scenario
        self._worker = worker
        self._config = config
        self._interval = scenario.poll_interval_seconds
        self._lag = scenario.lag_seconds
        self._lost = scenario.lost_polls
        self._rng = random.Random(f"{seed} polls")
        self._failures = 0
        self._next_poll = CONTROLLER_STARTS_AT + self._interval * self._rng.random()
        self._in_flight: list[tuple[float, SpecPlan]] = []
        self._version = 0
        self._sent: tuple[object, ...] = ()
        self._sent_at = float("-inf")
        self._seen_at = self._next_poll
        self._life: Life | None = None
        self._profile = profile
        self.result = RunResult()

    def advance(self, until: float) -> None:
        """Let everything happen that happens before a time, in order."""
        while True:
            arrival = self._in_flight[0][0] if self._in_flight else float("inf")
            if min(arrival, self._next_poll) >= until:
                return
            if arrival <= self._next_poll:
                _, plan = self._in_flight.pop(0)
                self._worker.plan.put(plan, arrival)
            else:
                self._next_poll += self._look(self._next_poll)

    def _look(self, now: float) -> float:
        """Take a turn if the reading is not lost; return how long to pause, as `ControlLoop` does."""
        is_lost = self._lost > 0 and self._rng.random() < self._lost
        self._failures = self._failures + 1 if is_lost else 0
        if not is_lost:
            self._poll(now)
        if self._life is None or self._failures > 1:
            return self._interval
        return self._life.pause_seconds(self._interval, has_missed=is_lost)

    def _poll(self, now: float) -> None:
        worker = self._worker
        stats = worker.stats(now)
        if self._life is None:
            self._life = Life(
                "simulated",
                cast(WorkerClient, None),  # plans are sent from here
                self._config,
                epoch=1,
                info=worker.info(self._profile),
                status=stats.plan,
                now=now,
            )
        life = self._life
        before = dict(life.depths)
        estimate = life.estimate(life.observer.observe(stats, now))
        verdicts = life.guard(life.decide(estimate), now=now, age_seconds=0.0)
        life.accept(verdicts, now)
        self.result.reasons += [
            (now, f"{v.proposal.slot}: {v.proposal.num_steps_before}->{v.proposal.num_steps} "
             f"{v.proposal.reason} {v.proposal.message} {v.guard or ''}")
            for v in verdicts
        ]  # fmt: skip
        if life.depths != before:
            self.result.changes += 1
        self._send(life.depths, life.probe, now)

    def _send(self, depths: dict[int, int], probe: ProbeRequest | None, now: float) -> None:
        content = (tuple(sorted(depths.items())), probe)
        ttl = self._config.loop.plan_ttl_seconds
        if content == self._sent and now - self._sent_at < ttl / 3:
            return
        if content != self._sent:
            self._version += 1
        self._sent, self._sent_at = content, now
        plan = SpecPlan.model_construct(
            controller_epoch=1,
            version=self._version,
            boot_id="simulated",
            ttl_seconds=ttl,
            entries=[
                PlanEntry.model_construct(max_batch_size=edge, num_steps=depth)
                for edge, depth in sorted(depths.items())
            ],
            dead_band=self._config.policy.dead_band,
            probe=None
            if probe is None
            else Probe(num_steps=probe.num_steps, rounds=probe.rounds, max_batch_size=probe.max_batch_size),
            pin=None,
            reason="",
        )
        self._in_flight.append((now + self._lag, plan))


def simulate(
    scenario: Scenario,
    seed: int,
    *,
    config: ControllerConfig | None = None,
    rule: Callable[[Scenario, LatencyProfile | None], EngineRule] | None = None,
) -> RunResult:
    """Play a scenario (one variant) with a controller of this configuration, or with a rule inside the engine.

    Equal arguments give equal results on any machine.
    """
    name = f"{scenario.name} {seed}"
    surface = Surface(scenario.latency, scenario.directory)
    profile = profile_of(scenario, surface, name)
    worker = SimulatedWorker(scenario, surface, name, rule(scenario, profile) if rule else None)
    steering = Steering(worker, config, profile, name) if config is not None else None
    result = steering.result if steering else RunResult(counts_depths=True)
    for number, phase in enumerate(list(scenario.phases) * scenario.repeat):
        if phase.idle_seconds:
            worker.pause()
            worker.now += phase.idle_seconds
            if steering is not None:
                steering.advance(worker.now)
        worker.begin(phase, number, phase_tokens(phase, scenario, surface))
        result.phase_started.append(worker.now)
        busy = 0.0
        while not worker.is_done:
            played, counted = worker.play()
            if steering is not None:
                steering.advance(worker.now)
            worker.count(counted)
            result.add(played, number)
            busy += played.seconds
        result.phase_seconds.append(busy)
    return result
