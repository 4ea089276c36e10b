"""The nouns of the pure core: what was observed, what it says, what is proposed and decided.

Numbers only: no I/O, no clock, no framework, and nothing about HTTP or how a worker is reached. A *slot* is a
range of batch sizes that shares one depth; it is named by its upper edge `max_batch_size`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Mode = Literal["active", "advisory", "frozen", "released"]
MODES: tuple[Mode, ...] = ("active", "advisory", "frozen", "released")

Depths = Mapping[int, int]
"""Slot edge -> num_steps; the table of a plan."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Batch sizes above the previous slot's edge and up to this one's; the last slot has no upper end.

    Edges are powers of two, as the worker's statistics buckets are, so each bucket belongs to one slot.
    """

    max_batch_size: int
    candidate_steps: tuple[int, ...]
    """Depths that may be chosen here: rising, a subset of the worker's tiers."""


def slot_edge(edges: tuple[int, ...], batch_size: int) -> int:
    """Return the edge of the slot that `batch_size` belongs to (`edges` rise; beyond the last: the last)."""
    return next((edge for edge in edges if batch_size <= edge), edges[-1])


@dataclass(frozen=True, kw_only=True)
class CellDelta:
    """What happened in one statistics bucket during a window: differences of cumulative counters, never below 0.

    Position tuples have `num_steps` items; see `worker.protocol.StatsBucket` for what each sum counts.
    """

    num_steps: int
    """Executed depth, not the one that was wished for."""
    max_batch_size: int
    rounds: int
    request_rounds: int
    reached: tuple[int, ...]
    correct: tuple[int, ...]
    correct_squared: int
    accept_tokens: int
    emitted_tokens: int
    timed_rounds: int
    round_seconds: float
    """Of the timed rounds (those that shared no step with a prefill)."""
    round_seconds_squared: float = 0.0
    proposed: tuple[int, ...] = ()
    """Empty: every draft that could be was proposed."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One window of one worker, between two readings of its counters."""

    boot_id: str
    seconds: float
    """Monotonic time of the newer reading."""
    span_seconds: float
    """Length of the window; 0 for a baseline, which is no evidence."""
    cells: tuple[CellDelta, ...]
    """Buckets that had rounds in the window; empty while idle."""
    running: int
    waiting: int
    generated_tokens: int
    is_baseline: bool = False
    """First reading, another boot_id, or a counter that went backwards."""


@dataclass(frozen=True, kw_only=True)
class TierScore:
    """How a tier looks: for `threshold`, expected correct drafts per request-round at that depth."""

    num_steps: int
    score: float | None
    """None where nothing has been observed (deeper than what was executed)."""
    sd: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """Run `rounds` rounds at `num_steps`, only in batches of the statistics bucket `max_batch_size`."""

    slot: int
    num_steps: int
    rounds: int
    max_batch_size: int


@dataclass(frozen=True, kw_only=True)
class ProbeEvidence:
    """What a probe in flight has brought so far."""

    request: ProbeRequest
    rounds: int
    request_rounds: int
    waited_rounds: int
    """Rounds of the worker since the probe was asked for that were no probe."""
    mean_correct: float


@dataclass(frozen=True, kw_only=True)
class SlotEstimate:
    """What the evidence says about one slot, at the depth decided for it."""

    slot: Slot
    num_steps: int
    rounds: int
    """Rounds executed at `num_steps` since it was decided."""
    request_rounds: int
    mean_correct: float | None
    """Expected correct drafts per request-round at `num_steps`, censored rounds accounted for; None: unknown."""
    sd: float | None
    """Standard error of `mean_correct`."""
    position_acceptance: tuple[float | None, ...]
    scores: tuple[TierScore, ...]
    busiest_bucket: int | None
    """Statistics bucket with most of the slot's recent rounds; None before the first."""
    probe: ProbeEvidence | None = None


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """P(draft correct | drafts before it correct) at one position, and how sure that is."""

    probability: float
    variance: float


@dataclass(frozen=True, kw_only=True)
class AcceptanceEstimate:
    """What the text is like now, whatever the depth and batch size it was seen at."""

    hazards: tuple[Hazard, ...]
    """One per position up to the deepest tier; unseen positions follow from the ones before them."""
    proposed: tuple[float, ...]
    """Share of request-rounds in which the drafter has a draft for the position."""
    rounds: float
    request_rounds: float
    """Rounds behind it, decayed."""
    end_rate: float
    """P(a token is its request's last): what comes after it in a round is lost."""
    surprise: float
    """How far the newest drafts are from what was expected, in standard deviations; above 0: more were correct."""
    has_changed: bool
    """A change was noticed in this window: older evidence was dropped."""

    def expected_tokens(self) -> list[float]:
        """E(k) = 1 + Σ survival, by depth k: tokens of a request-round that are not lost behind an end."""
        survival, expected = 1.0, [1.0]
        for hazard in self.hazards:
            survival *= hazard.probability * (1 - self.end_rate)
            expected.append(expected[-1] + survival)
        return expected


@dataclass(frozen=True, kw_only=True)
class TierForecast:
    """What a depth would bring in a slot."""

    num_steps: int
    tokens: float
    """Expected tokens of a request-round."""
    round_seconds: float
    round_variance: float
    """Variance of ln(round_seconds), but for what all tiers share."""
    spread: float
    """Standard deviation of ln(seconds) between single rounds."""
    goodput: float
    """Expected tokens per second of the whole batch."""


@dataclass(frozen=True, kw_only=True)
class SlotForecast:
    """The tiers of one slot, at the batch size it has been having."""

    batch_size: float
    tiers: tuple[TierForecast, ...]
    share: float
    """The slot's share of the recent rounds."""

    def tier(self, num_steps: int) -> TierForecast | None:
        """Return the forecast of a depth; None if it is no candidate."""
        return next((tier for tier in self.tiers if tier.num_steps == num_steps), None)


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What a window brought beside what had been forecast for the rounds that it had."""

    request_rounds: int
    tokens: int
    expected_tokens: float
    seconds: float
    expected_seconds: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """All slots of a worker, by rising edge."""

    slots: tuple[SlotEstimate, ...]
    seconds: float = 0.0
    """Monotonic time of the newest reading."""
    span_seconds: float = 0.0
    """Length of the window before it."""
    is_busy: bool = False
    """Whether a round ran within that window."""
    acceptance: AcceptanceEstimate | None = None
    forecasts: Mapping[int, SlotForecast] = field(default_factory=dict)
    """By slot edge; empty before the first rounds."""
    delivery: Delivery | None = None
    """None where nothing was forecast, or nothing ran."""

    @property
    def probe(self) -> ProbeEvidence | None:
        """The probe in flight, if any: a plan carries one at most."""
        return next((slot.probe for slot in self.slots if slot.probe), None)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What a policy wants for one slot, and why; guards have not seen it yet."""

    slot: int
    num_steps_before: int
    num_steps: int
    reason: str
    """A short stable code, e.g. `climb`."""
    message: str
    scores: tuple[TierScore, ...] = ()
    inputs: Mapping[str, float] = field(default_factory=dict)
    """The numbers and thresholds that the proposal follows from."""
    rounds: int | None = None
    request_rounds: int | None = None
    """Evidence behind it; None for a proposal that needs none."""
    is_urgent: bool = False
    """A way down that need not wait for the dwell time."""
    probe: ProbeRequest | None = None
    ends_probe: bool = False

    @property
    def is_change(self) -> bool:
        """Whether the depth would move."""
        return self.num_steps != self.num_steps_before


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A proposal after the guards: what may really happen, and who intervened."""

    proposal: Proposal
    num_steps: int
    guard: str | None = None
    """Code of the guard that changed or refused the proposal."""
    explanation: str = ""
    is_allowed: bool = True


Kind = Literal["depth", "probe", "guard", "mode", "pin", "rollback", "worker", "plan", "shadow"]
Outcome = Literal["applied", "unconfirmed", "advisory", "held", "noted"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One line of the record: something changed, would have changed, or was held back, and why.

    `outcome`: `applied` (the worker confirmed), `unconfirmed` (wanted, not confirmed yet; it is sent again),
    `advisory` (recorded only), `held` (a guard refused), `noted` (an event that changes no depth).
    """

    worker: str
    kind: Kind
    reason: str
    message: str
    outcome: Outcome
    mode: Mode
    max_batch_size: int | None = None
    """The slot; None for what concerns the whole worker."""
    num_steps_before: int | None = None
    num_steps: int | None = None
    guard: str | None = None
    scores: tuple[TierScore, ...] = ()
    inputs: Mapping[str, float] = field(default_factory=dict)
    observed: Mapping[str, Any] = field(default_factory=dict)
    """Windowed counts behind a depth decision: length of the window, and its cells that belong to the slot."""
    estimate: Mapping[str, Any] = field(default_factory=dict)
    """What the evidence said about the slot (`SlotEstimate`, without the slot)."""
    policy: str = ""
    policy_version: str = ""
    code_version: str = ""
