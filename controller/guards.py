"""Guard: what every policy's proposal must pass, `static` too.

Bounds, dwell time, a budget of changes, minimum samples, hold on stale data, and patience after a start. Each
refusal says which guard intervened. Pure: time comes in as a number; nothing is sent from here.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from controller.types import Delivery, Depths, Proposal, Slot, Verdict


@dataclass(frozen=True, kw_only=True)
class GuardLimits:
    """`[guards]`."""

    min_num_steps: int
    max_num_steps: int
    dwell_seconds: float
    """Least time between two changes of one slot; an urgent way down does not wait."""
    max_changes_per_minute: int
    """Changes of all slots of a worker; urgent ways down count but are not refused."""
    min_rounds: int
    min_request_rounds: int
    """Least evidence behind a proposal that rests on evidence."""
    window_seconds: float
    """A controller that has just met a worker watches this long before its first change."""
    hold_after_seconds: float
    """Data older than this changes nothing."""
    breaker_tolerance: float = 0.10
    """Relative difference of forecast and delivered tokens/s that counts against the forecasts; 0: no breaker."""
    breaker_seconds: float = 30.0
    """How long a worker stays at its safe depth when the forecasts have been wrong for several windows."""


BREAKER_WINDOWS = 4
"""Windows in a row that must be off, all to the same side."""
BREAKER_ROUNDS = 200
"""Request-rounds that such a window has at least."""
BREAKER_BUSY_SECONDS = 2.0
"""Time of its rounds: several half-lives of the estimates go into the windows that open the breaker."""


class Breaker:
    """Takes a worker to its safe depth while what is forecast for it and what it delivers are at odds.

    Estimates follow a change within a window or two. Forecasts that stay off, always to the same side, rest on
    something that is not so (a cost outside the round's time, counters that do not mean what they should): then no
    depth should be chosen by them.
    """

    def __init__(self, limits: GuardLimits) -> None:
        self._tolerance = limits.breaker_tolerance
        self._seconds = limits.breaker_seconds
        self._rounds = 0
        self._sums = [0.0, 0.0, 0.0, 0.0]
        self._side = 0
        self._off = 0
        self.open_until = float("-inf")
        self.trips_total = 0
        self.ratio = 1.0
        """Delivered over forecast tokens/s in the newest full window."""

    def is_open(self, seconds: float) -> bool:
        """Whether the worker must be at its safe depth."""
        return seconds < self.open_until

    def watch(self, delivery: Delivery | None, seconds: float) -> None:
        """Take a window's delivery in."""
        if delivery is None or self._tolerance <= 0:
            return
        new = (delivery.tokens, delivery.expected_tokens, delivery.seconds, delivery.expected_seconds)
        self._sums = [total + value for total, value in zip(self._sums, new, strict=True)]
        self._rounds += delivery.request_rounds
        tokens, expected_tokens, spent, expected = self._sums
        if self._rounds < BREAKER_ROUNDS or spent < BREAKER_BUSY_SECONDS or min(self._sums) <= 0:
            return
        self._rounds, self._sums = 0, [0.0, 0.0, 0.0, 0.0]
        self.ratio = (tokens / spent) / (expected_tokens / expected)
        side = 1 if self.ratio > 1 + self._tolerance else -1 if self.ratio < 1 - self._tolerance else 0
        self._off = self._off + 1 if side and side == self._side else abs(side)
        self._side = side
        if self._off >= BREAKER_WINDOWS:
            self.open_until, self._off = seconds + self._seconds, 0
            self.trips_total += 1


class Guards:
    """The guards of one worker. `judge` decides; `changed` must be told of every change that was made."""

    def __init__(self, limits: GuardLimits, slots: Sequence[Slot], met_seconds: float) -> None:
        self._limits = limits
        self.breaker = Breaker(limits)
        self._slots = {slot.max_batch_size: slot for slot in slots}
        self._met = met_seconds
        self._last_change: dict[int, float] = {}
        self._recent: deque[float] = deque()

    def judge(self, proposal: Proposal, *, now: float, age_seconds: float) -> Verdict:
        """Return what may happen now.

        Args:
            proposal: a policy's wish.
            now: monotonic seconds.
            age_seconds: age of the newest observation.
        """
        if not proposal.is_change and proposal.probe is None:
            return Verdict(proposal=proposal, num_steps=proposal.num_steps)
        slot = self._slots[proposal.slot]
        wanted = proposal.num_steps if proposal.probe is None else proposal.probe.num_steps
        target = self._nearest(slot, wanted)
        outside = f"{wanted} is not among {self._allowed(slot)}"
        # Bounds first: what they rule out stays ruled out, whatever the time and the evidence.
        if target != wanted and (proposal.probe is not None or target == proposal.num_steps_before):
            return self._refused(proposal, "bounds", outside)
        refusal = self._refusal(proposal, now, age_seconds)
        if refusal is not None:
            return self._refused(proposal, *refusal)
        if proposal.probe is not None or target == wanted:
            return Verdict(proposal=proposal, num_steps=proposal.num_steps)
        return Verdict(proposal=proposal, num_steps=target, guard="bounds", explanation=outside)

    def outside(self, depths: Depths) -> list[Proposal]:
        """Return a proposal for each slot whose depth (an adopted one, say) is not among what it may use."""
        proposals = []
        for edge, slot in self._slots.items():
            target = self._nearest(slot, depths[edge])
            if target != depths[edge]:
                proposals.append(
                    Proposal(
                        slot=edge,
                        num_steps_before=depths[edge],
                        num_steps=target,
                        reason="bounds",
                        message=f"{depths[edge]} is not among {self._allowed(slot)}, allowed up to batch {edge}",
                    )
                )
        return proposals

    def to_safety(self, depths: Depths, safe_num_steps: int) -> list[Proposal]:
        """Return a proposal for each slot that is not at the safe depth."""
        proposals = []
        for edge, slot in self._slots.items():
            target = self._nearest(slot, safe_num_steps)
            if target != depths[edge]:
                proposals.append(
                    Proposal(
                        slot=edge,
                        num_steps_before=depths[edge],
                        num_steps=target,
                        reason="breaker",
                        message=f"delivered tokens/s were {self.breaker.ratio:.2f} of the forecast, again and again",
                        inputs={"delivered_over_forecast": self.breaker.ratio},
                        ends_probe=True,
                    )
                )
        return proposals

    def changed(self, slot: int, now: float) -> None:
        """Note that the depth of a slot was changed. Changes at the same time are one plan, and count as one."""
        self._last_change[slot] = now
        if not self._recent or self._recent[-1] != now:
            self._recent.append(now)

    def _refusal(self, proposal: Proposal, now: float, age_seconds: float) -> tuple[str, str] | None:
        limits = self._limits
        if age_seconds > limits.hold_after_seconds:
            return "stale", f"the newest data are {age_seconds:.1f} s old"
        if now - self._met < limits.window_seconds:
            return "window", f"watching for {limits.window_seconds:g} s first"
        if proposal.probe is None and self._too_few(proposal):
            return (
                "samples",
                f"{proposal.rounds} rounds, {proposal.request_rounds} request-rounds are too few",
            )
        if proposal.probe is not None or (
            proposal.is_urgent and proposal.num_steps < proposal.num_steps_before
        ):
            return None
        since = now - self._last_change.get(proposal.slot, float("-inf"))
        if since < limits.dwell_seconds:
            return "dwell", f"the last change was {since:.2f} s ago, dwell is {limits.dwell_seconds:g} s"
        while self._recent and now - self._recent[0] >= 60:
            self._recent.popleft()
        if len(self._recent) >= limits.max_changes_per_minute:
            return "budget", f"{len(self._recent)} changes within a minute"
        return None

    def _too_few(self, proposal: Proposal) -> bool:
        if proposal.rounds is None or proposal.request_rounds is None:
            return False
        return proposal.rounds < self._limits.min_rounds or (
            proposal.request_rounds < self._limits.min_request_rounds
        )

    @staticmethod
    def _refused(proposal: Proposal, guard: str, explanation: str) -> Verdict:
        return Verdict(
            proposal=proposal,
            num_steps=proposal.num_steps_before,
            guard=guard,
            explanation=explanation,
            is_allowed=False,
        )

    def _allowed(self, slot: Slot) -> list[int]:
        low, high = self._limits.min_num_steps, self._limits.max_num_steps
        inside = [tier for tier in slot.candidate_steps if low <= tier <= high]
        # NOTE: with no tier inside the bounds the lowest one is allowed: slow and safe.
        return inside or [slot.candidate_steps[0]]

    def _nearest(self, slot: Slot, num_steps: int) -> int:
        allowed = self._allowed(slot)
        return max((tier for tier in allowed if tier <= num_steps), default=allowed[0])
