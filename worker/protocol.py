"""The wire contract between a controller and a worker: plans in, statistics out.

Everything that crosses the control port is defined here and nowhere else. This module knows neither torch
nor a web framework: it is the only part of `worker` that `controller` may import.

All counters are cumulative since `boot_id` was drawn (a restart draws a new one); none is a rate. Numbers are
strict: `true`, `3.0` and `"3"` are not integers, NaN and infinities are refused.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PROTOCOL_VERSION = 1

MAX_TTL_SECONDS = 7 * 24 * 3600.0
"""Upper bound of every time to live, for plans and pins alike: one week."""

PlanSource = Literal["plan", "pin", "fallback"]
NumSteps = Annotated[int, Field(ge=0, le=64)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TtlSeconds = Annotated[float, Field(gt=0, le=MAX_TTL_SECONDS, allow_inf_nan=False)]


class WireModel(BaseModel):
    """Base of all wire types: strict, closed, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def batch_size_bucket(batch_size: int) -> int:
    """Return the upper bound of the statistics bucket of `batch_size` (1, 2, 4, 8, …; ValueError below 1)."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    return 1 << (batch_size - 1).bit_length()


def check_draft_tokens(num_steps: int, num_draft_tokens: int | None) -> None:
    """Raise ValueError unless `num_draft_tokens` (if given) is `num_steps + 1`, the count that topk 1 implies."""
    if num_draft_tokens is not None and num_draft_tokens != num_steps + 1:
        raise ValueError(
            f"num_draft_tokens {num_draft_tokens} does not fit num_steps {num_steps}: "
            f"at topk 1 it is num_steps + 1 = {num_steps + 1}"
        )


# ---- plan: controller -> worker ----


class PlanEntry(WireModel):
    """One row of the plan: batches of up to `max_batch_size` decoding rows draft `num_steps` tokens."""

    max_batch_size: Annotated[int, Field(ge=1, le=65536)]
    num_steps: NumSteps
    num_draft_tokens: int | None = None
    """Optional cross-check for chains: must be `num_steps + 1`. A worker whose trees have another size refuses it."""

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        check_draft_tokens(self.num_steps, self.num_draft_tokens)
        return self


class Probe(WireModel):
    """Run `rounds` rounds at `num_steps` to measure it, then return to the table. A renewal does not repeat it."""

    num_steps: NumSteps
    rounds: Annotated[int, Field(ge=1, le=1024)]
    max_batch_size: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Only rounds whose statistics bucket (`batch_size_bucket`) is this one count and are probed; None: any."""


class Pin(WireModel):
    """An operator's depth, with its own remaining time: it outlives the plan and the controller."""

    num_steps: NumSteps
    ttl_seconds: TtlSeconds


class SpecPlan(WireModel):
    """A table *batch size -> num_steps* with a version and a time to live.

    `entries` are sorted by strictly rising `max_batch_size`; a batch larger than the last edge uses the last
    entry. (`controller_epoch`, `version`) is ordered lexicographically. A repeated plan (same epoch, version and
    content) renews the time to live. `pin` overrides the table until its own time is over; a plan without
    `pin` removes an earlier one.
    """

    controller_epoch: Count
    version: Count
    boot_id: Annotated[str, Field(min_length=1, max_length=64)]
    ttl_seconds: TtlSeconds
    entries: Annotated[list[PlanEntry], Field(min_length=1, max_length=64)]
    dead_band: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.15
    probe: Probe | None = None
    pin: Pin | None = None
    reason: Annotated[str, Field(max_length=256)] = ""

    @model_validator(mode="after")
    def _entries_rise(self) -> Self:
        edges = [entry.max_batch_size for entry in self.entries]
        if any(low >= high for low, high in zip(edges, edges[1:], strict=False)):
            raise ValueError(f"entries: max_batch_size must rise strictly, got {edges}")
        return self


class PlanStatus(WireModel):
    """What the worker follows right now (`GET /v1/spec/plan`, and the answer to an accepted `PUT`)."""

    source: PlanSource
    plan: SpecPlan | None
    """The newest plan received, also after it lapsed (its version still guards against older ones)."""
    age_seconds: Seconds | None
    """Seconds since the plan was last received or renewed; None without a plan."""
    remaining_seconds: Seconds
    """Seconds until the plan lapses; 0 when it has lapsed or there is none."""
    pin_remaining_seconds: Seconds
    fallback_num_steps: NumSteps
    num_steps: NumSteps
    """Depth of the latest round, or the one the next round of the present batch would run at when idle."""


# ---- info and statistics: worker -> controller ----


class LatencyCell(WireModel):
    """Median seconds of one round's stages at an exact batch size, every request drafting the whole depth."""

    batch_size: Annotated[int, Field(ge=1)]
    num_steps: NumSteps
    draft_seconds: Seconds
    verify_seconds: Seconds
    round_seconds: Seconds
    samples: Annotated[int, Field(ge=1)]


class LatencyProfile(WireModel):
    """What rounds cost on this machine, measured before serving (and kept on disk for the next start)."""

    context_tokens: Count
    """Committed tokens per request while measuring."""
    cells: list[LatencyCell]
    error: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How far off a cell's `round_seconds` may be: standard deviation of its logarithm, from how samples scatter."""


class SpecInfo(WireModel):
    """What a worker is and can do; constant since `boot_id` (`GET /v1/spec/info`)."""

    protocol_version: int = PROTOCOL_VERSION
    boot_id: str
    version: str
    model: str
    drafter: str
    """`model`, `eagle`, `ngram`, `ngram+eagle` or `none`."""
    topk: int
    """Candidates per drafting step; above 1 the drafts of a round are a tree, and num_steps is its depth."""
    device: str
    dtype: str
    candidate_steps: list[NumSteps]
    """The tiers: depths that have a prebuilt runtime state, rising; 0 is always among them."""
    num_draft_tokens: list[Annotated[int, Field(ge=1)]] | None = None
    """Of each tier, tokens per request that the target verifies at most, the root among them; None: num_steps + 1."""
    fallback_num_steps: NumSteps
    fast_path: Literal["on", "off", "not applicable"]
    max_running_requests: int
    max_context_tokens: int
    max_num_batched_tokens: int
    adaptation: bool
    adaptation_off_reason: str | None = None
    profile: LatencyProfile | None = None
    """None where profiling is off."""

    def draft_tokens_at(self, num_steps: int) -> int:
        """Return num_draft_tokens of a tier."""
        if self.num_draft_tokens is None:
            return num_steps + 1
        return self.num_draft_tokens[self.candidate_steps.index(num_steps)]


class QueueStats(WireModel):
    """Load of the engine at the moment of the request."""

    running: Count
    waiting: Count
    kv_tokens_free: Count
    kv_tokens_total: Count


class StatsBucket(WireModel):
    """Sums over the rounds that *executed* `num_steps` with a batch in the bucket (DESIGN §5).

    Position lists have `num_steps` items; index 0 is the first draft. For one request-round and position i
    (0-based): `proposed` counts drafts that verify looked at; `reached` counts those where every earlier draft
    was correct and the position was not censored (cut by budget, EOS, stop or context); "the drafter had
    nothing to propose" is reached and not correct. `correct` counts drafts accepted *and kept*. So
    `correct[i] <= reached[i]`, and position acceptance is `correct[i] / reached[i]`. In a tree a position is a level,
    reached along the accepted path, and `proposed` counts a level once, however many drafts it has.
    """

    num_steps: NumSteps
    max_batch_size: Annotated[int, Field(ge=1)]
    """Upper bound of the batch-size bucket, see `batch_size_bucket`."""
    rounds: Count
    request_rounds: Count
    proposed: list[Count]
    reached: list[Count]
    correct: list[Count]
    correct_squared: Count
    """Σ over request-rounds of (number of correct drafts)²: for the variance of accepted tokens."""
    accept_tokens: Count
    """Σ num_accept_tokens: correct + 1 per request-round, before EOS or a limit cuts it."""
    emitted_tokens: Count
    verify_rows: Count
    """Rows the target really computed, Σ over rounds."""
    context_tokens: Count
    """Σ over request-rounds of the committed length: for the KV-read part of a latency model."""
    prefill_rounds: Count
    """Rounds that shared their step with a prefill, or whose drafter failed. They count everywhere above but in no time
    sum below."""
    draft_seconds: Seconds
    draft_seconds_squared: Seconds
    verify_seconds: Seconds
    verify_seconds_squared: Seconds
    round_seconds: Seconds
    round_seconds_squared: Seconds
    catch_up_seconds: Seconds
    catch_up_seconds_squared: Seconds

    @property
    def timed_rounds(self) -> int:
        """Rounds behind the time sums."""
        return self.rounds - self.prefill_rounds


class SpecStats(WireModel):
    """Cumulative statistics since `boot_id` (`GET /v1/spec/stats`)."""

    protocol_version: int = PROTOCOL_VERSION
    boot_id: str
    uptime_seconds: Seconds
    plan: PlanStatus
    queue: QueueStats
    buckets: list[StatsBucket]
    requests_finished: dict[str, Count]
    """By finish reason: stop, length, abort, error."""
    prompt_tokens: Count
    generated_tokens: Count
    """All tokens handed out, the first ones after a prefill included."""
    first_tokens: Count
    """Tokens drawn straight after a prefill: they belong to no round."""
    draft_failures: Count
    """Rounds that fell back to depth 0 because the drafter failed (NaN, exception)."""
