"""One life of a worker (one boot_id): its tiers and slots, and the stages that steer it.

A restarted worker gets a new `Life`: nothing learned about the old process is carried over. Knows nothing about
modes, pins or how requests travel.
"""

from collections.abc import Sequence

from controller.actuate import Actuator
from controller.config import ControllerConfig, SlotConfig
from controller.estimate import Estimator, Profile, ProfileCell
from controller.guards import Guards
from controller.observe import Observer
from controller.recent import RecentWindow
from controller.types import Depths, Estimate, Observation, ProbeRequest, Proposal, Slot, Verdict
from controller.worker_client import WorkerClient
from worker.protocol import PlanStatus, SpecInfo

SOON = 0.4
"""Share of the interval between two looks that must pass even when something is under way or a look has failed."""
SURPRISING = 1.5
"""Standard deviations between expected and seen drafts that are worth another look."""


def slots_for(
    configured: Sequence[SlotConfig] | Sequence[Slot], tiers: Sequence[int], max_batch_size: int
) -> tuple[Slot, ...]:
    """Return the slots of a worker: the configured ones, with the candidates that the worker has as tiers.

    A slot that shares none with the worker gets the worker's tiers up to its deepest candidate (0 is one always).
    Without configured slots every power of two up to the worker's largest batch is one, with all tiers.
    """
    if not configured:
        edges = [1 << i for i in range((max_batch_size - 1).bit_length() + 1)]
        return tuple(Slot(max_batch_size=edge, candidate_steps=tuple(tiers)) for edge in edges)
    slots = []
    for slot in configured:
        shared = [tier for tier in tiers if tier in slot.candidate_steps]
        shared = shared or [tier for tier in tiers if tier <= slot.candidate_steps[-1]] or [tiers[0]]
        slots.append(Slot(max_batch_size=slot.max_batch_size, candidate_steps=tuple(shared)))
    return tuple(slots)


def depths_in_force(slots: Sequence[Slot], status: PlanStatus) -> dict[int, int]:
    """Return the table a worker follows by itself right now: its live plan's, else its fallback (a pin aside)."""
    plan = status.plan
    if plan is None or status.remaining_seconds <= 0:
        return {slot.max_batch_size: status.fallback_num_steps for slot in slots}
    found = {}
    for slot in slots:
        entry = next((e for e in plan.entries if slot.max_batch_size <= e.max_batch_size), plan.entries[-1])
        found[slot.max_batch_size] = entry.num_steps
    return found


def profile_of(info: SpecInfo) -> Profile | None:
    """Return the worker's start-up profile as the pure core takes it, if it has one."""
    if info.profile is None or not info.profile.cells:
        return None
    cells = [
        ProfileCell(c.batch_size, c.num_steps, c.verify_seconds, c.round_seconds) for c in info.profile.cells
    ]
    return Profile(cells, info.profile.error)


class Life:
    """The stages of one worker process. Starts from the depths that the worker follows already."""

    def __init__(
        self,
        worker_id: str,
        client: WorkerClient,
        config: ControllerConfig,
        *,
        epoch: int,
        info: SpecInfo,
        status: PlanStatus,
        now: float,
    ) -> None:
        policy = config.policy
        self.info = info
        wanted = policy.slots or policy.kind.default_slots
        self.slots = slots_for(wanted, info.candidate_steps, info.max_running_requests)
        self.newest: Estimate | None = None
        """What the evidence said in the newest turn."""
        self.depths = depths_in_force(self.slots, status)
        """The table decided: slot edge -> num_steps."""
        self.probe: ProbeRequest | None = None
        self.recent = RecentWindow(config.loop.recent_window_seconds)
        self.observer = Observer()
        self.estimator = Estimator(self.slots, self.depths, policy.ema_alpha, profile_of(info))
        self.policy = policy.kind.build(policy.policy_parameters(), self.slots, worker_id)
        self.guards = Guards(config.guards.limits(config.loop.hold_after_seconds), self.slots, now)
        held = status.plan
        is_newer = held is not None and held.controller_epoch >= epoch
        self.actuator = Actuator(
            client,
            boot_id=info.boot_id,
            epoch=held.controller_epoch if held is not None and is_newer else epoch,
            version=held.version if held is not None and is_newer else 0,
            ttl_seconds=config.loop.plan_ttl_seconds,
        )

    def estimate(self, observation: Observation) -> Estimate:
        """Take an observation in; return what the evidence says."""
        self.newest = self.estimator.estimate(observation)
        return self.newest

    def pause_seconds(self, interval: float, *, has_missed: bool) -> float:
        """Return when to look again: at the latest after `interval`, sooner while something is under way.

        What a probe found is worth most at once, and so is a second look at drafts that surprise, or after one that
        failed (`has_missed`); at all other times looking oftener tells nothing.
        """
        if has_missed:
            return SOON * interval
        newest = self.newest
        if newest is None or newest.acceptance is None:
            return interval
        if self.probe is not None:
            forecast = newest.forecasts.get(self.probe.slot)
            tier = forecast.tier(self.probe.num_steps) if forecast else None
            expected = (self.probe.rounds + 1) * tier.round_seconds if tier else interval
            return min(interval, max(expected, SOON * interval))
        return SOON * interval if abs(newest.acceptance.surprise) >= SURPRISING else interval

    def decide(self, estimate: Estimate) -> list[Proposal]:
        """Return the policy's wishes, and the guards' own for slots that are out of bounds.

        While the breaker is open the policy looks on, and every slot goes to the worker's own depth.
        """
        proposals = self.policy.decide(estimate)
        self.guards.breaker.watch(estimate.delivery, estimate.seconds)
        if self.guards.breaker.is_open(estimate.seconds):
            return self.guards.to_safety(self.depths, self.info.fallback_num_steps)
        decided = {proposal.slot for proposal in proposals if proposal.is_change}
        outside = [p for p in self.guards.outside(self.depths) if p.slot not in decided]
        named = {proposal.slot for proposal in outside}
        return [p for p in proposals if p.slot not in named] + outside

    def guard(self, proposals: Sequence[Proposal], *, now: float, age_seconds: float) -> list[Verdict]:
        """Put every proposal before the guards."""
        return [self.guards.judge(proposal, now=now, age_seconds=age_seconds) for proposal in proposals]

    def accept(self, verdicts: Sequence[Verdict], now: float) -> None:
        """Make what the guards allowed the decided table; ended probes end even if a change was refused."""
        for verdict in verdicts:
            proposal = verdict.proposal
            if proposal.ends_probe:
                self.probe = None
            if verdict.is_allowed and proposal.probe is not None:
                self.probe = proposal.probe
            if verdict.is_allowed and verdict.num_steps != self.depths[proposal.slot]:
                self.depths = {**self.depths, proposal.slot: verdict.num_steps}
                self.guards.changed(proposal.slot, now)
        self.estimator.follow(self.depths, self.probe)

    def adopt(self, depths: Depths) -> None:
        """Take over a table that was not decided here: the worker's own, or one that an operator went back to."""
        self.depths = dict(depths)
        self.probe = None
        self.estimator.follow(self.depths, None)

    def end_probe(self) -> None:
        """Drop a probe in flight (a pin or a mode came in between)."""
        self.probe = None
        self.estimator.follow(self.depths, None)
