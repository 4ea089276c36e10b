"""A turn: everything that one turn's decisions depend on, and the three pure stages that make them.

The loop runs a turn on live data and puts the `Turn` into the journal; `replay` runs the same stages on the
recorded ones. So whatever a decision depends on beside the life's own state must be a field of `Turn`. Reads no
clock and sends nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.life import Life
from controller.types import Estimate, Mode, Observation, Proposal, Verdict

ROLLBACK_GUARD = "rollback"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The inputs of one turn."""

    observation: Observation
    now: float
    """Monotonic seconds at which proposals are judged."""
    age_seconds: float
    """Age of the observation by then."""
    mode: Mode
    is_pinned: bool = False
    hold_seconds: float = 0.0
    """Seconds for which an operator's rollback still holds the policy; 0: it is free."""
    adopted: Mapping[int, int] | None = None
    """Table that the worker follows by itself and that is taken over first (nothing is sent in advisory and
    released mode); None: the life's own table stands."""


def estimate(life: Life, turn: Turn) -> Estimate:
    """Take the observation in; return what the evidence says."""
    if turn.adopted is not None:
        life.adopt(turn.adopted)
    return life.estimate(turn.observation)


def may_decide(life: Life, turn: Turn) -> bool:
    """Whether the policy is asked at all in this turn."""
    return turn.mode in ("active", "advisory") and not turn.is_pinned and life.info.adaptation


def decide(life: Life, turn: Turn, estimate: Estimate) -> list[Proposal]:
    """Ask the policy; nothing while a pin or a mode forbids it to decide."""
    return life.decide(estimate) if may_decide(life, turn) else []


def guard(life: Life, turn: Turn, proposals: Sequence[Proposal]) -> list[Verdict]:
    """Put the proposals before the guards; in active mode the allowed ones become the life's table."""
    held = [p for p in proposals if turn.hold_seconds > 0 and (p.is_change or p.probe is not None)]
    free = [p for p in proposals if p not in held]
    verdicts = [_held(proposal, turn.hold_seconds) for proposal in held]
    verdicts += life.guard(free, now=turn.now, age_seconds=turn.age_seconds)
    if turn.mode == "active":
        life.accept(verdicts, turn.now)
    return verdicts


def _held(proposal: Proposal, seconds: float) -> Verdict:
    return Verdict(
        proposal=proposal,
        num_steps=proposal.num_steps_before,
        guard=ROLLBACK_GUARD,
        explanation=f"an operator rolled back; the policy is held for another {seconds:.0f} s",
        is_allowed=False,
    )
