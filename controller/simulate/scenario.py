"""A scenario: what traffic comes, what a round of it costs, and how well the controller can see it.

Read from TOML (documented in docs/policy.md); unknown keys and bad values are refused with the field's name. Work
is counted in tokens, never in rounds or seconds: with a fixed number of rounds a depth that is too deep would look
good in slow phases. Knows nothing about policies.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]
Curve = Annotated[list[Probability], Field(min_length=1, max_length=64)]
BatchSize = Annotated[int, Field(ge=1, le=1024)]
MAX_NUM_STEPS = 64


class Section(BaseModel):
    """Base of the sections: closed and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LatencyConfig(Section):
    """`[latency]`: seconds of a round.

    host + [k > 0] draft_base + k (draft_step + draft_row bs) + max(weights, rows row) + Σ_{rows > edge} extra
    + context_row × (tokens in the batch's contexts) / 1000, times the noise.
    """

    host_seconds: Seconds = 0.0
    draft_base_seconds: Seconds = 0.0
    draft_step_seconds: Seconds = 0.0
    draft_row_seconds: Seconds = 0.0
    weights_seconds: Seconds = 0.0
    """Reading the weights once: a floor under the time of the rows (memory-bound below the knee)."""
    row_seconds: Seconds = 0.0
    row_steps: list[tuple[int, float]] = []
    """[[rows, extra seconds], …]: jumps of the curve, added above that many rows."""
    context_row_seconds: Seconds = 0.0
    table_file: str | None = None
    """A worker's latency profile as JSON (or a recorded trace that holds one), in place of the formula; relative to
    the scenario's file."""
    noise: Annotated[float, Field(ge=0, le=1)] = 0.03
    """Standard deviation of the logarithm of a round's seconds."""
    spike_probability: Probability = 0.0
    spike_factor: Annotated[float, Field(ge=1, le=100)] = 3.0
    drift: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Amplitude of a slow common change of all times (other load on the machine)."""
    drift_period_phases: Annotated[float, Field(gt=0)] = 1.3
    """Its period, in phases of work rather than seconds: every policy meets the same speed at the same text."""


class ProfileConfig(Section):
    """`[profile]`: the start-up profile that the controller is given; without the section there is none."""

    error: Annotated[float, Field(ge=0, le=1)] = 0.03
    """Standard deviation of the logarithm of each cell's error."""
    context_tokens: Annotated[int, Field(ge=0)] = 256


class WalkConfig(Section):
    """A batch size drawn anew, uniformly, every so many tokens."""

    low: BatchSize
    high: BatchSize
    every_tokens: Annotated[int, Field(ge=1)] = 200

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class KindConfig(Section):
    """One kind of request within a phase."""

    acceptance: Curve = [0.5]
    """P(draft i correct | drafts before it correct); the last value goes on."""
    propose: Probability = 1.0
    """How often the drafter has something to propose at all (n-gram lookup)."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0


class PhaseConfig(KindConfig):
    """`[[phases]]`: a stretch of work of one nature."""

    name: str = ""
    tokens: Annotated[int, Field(ge=1)] | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    """In place of `tokens`: what the best fixed depth brings in this time, computed beforehand."""
    mix: list[KindConfig] = []
    """Several kinds of requests at once, by share, in place of `acceptance` and `propose`."""
    recorded: str | None = None
    """A file of recorded rounds, in place of `acceptance`; relative to the scenario's file."""
    dispersion: Annotated[float, Field(ge=0, le=4)] = 0.0
    """Over-dispersion: standard deviation of the shift (in log-odds) of a stretch of a request's text."""
    dispersion_tokens: Annotated[int, Field(ge=1)] = 48
    """Length of such a stretch."""
    batch_size: BatchSize | Annotated[list[BatchSize], Field(min_length=1)] | WalkConfig = 1
    """A number, a list run through in equal shares of the work, or a walk."""
    context_tokens: Annotated[int, Field(ge=1)] = 256
    request_tokens: tuple[int, int] | None = None
    """Shortest and longest answer; without it requests outlast the phase."""
    ends: Literal["eos", "length"] = "eos"
    prefill_seconds: Seconds = 0.0
    """Added to a round for each request that joins; such rounds are no latency evidence."""
    idle_seconds: Seconds = 0.0
    """Silence before the phase."""

    @property
    def kinds(self) -> Sequence[KindConfig]:
        """The kinds of requests, one at least."""
        return self.mix or [self]

    @property
    def mean_batch_size(self) -> float:
        """Typical batch size, for the amount of work."""
        size = self.batch_size
        if isinstance(size, WalkConfig):
            return (size.low + size.high) / 2
        return float(size) if isinstance(size, int) else sum(size) / len(size)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens is not None and self.seconds is not None:
            raise ValueError("give tokens or seconds, not both")
        if self.request_tokens and not 1 <= self.request_tokens[0] <= self.request_tokens[1]:
            raise ValueError(f"request_tokens must rise from 1 on, got {list(self.request_tokens)}")
        if self.recorded and self.mix:
            raise ValueError("give recorded or mix, not both")
        return self


class Scenario(Section):
    """One file."""

    name: str = ""
    description: str = ""
    candidate_steps: Annotated[list[Annotated[int, Field(ge=0, le=MAX_NUM_STEPS)]], Field(min_length=1)] = [
        0, 1, 2, 3, 5, 7,
    ]  # fmt: skip
    fallback_num_steps: int | None = None
    """Depth of the worker until a plan arrives; None: the deepest tier up to 2."""
    max_running_requests: BatchSize | None = None
    """None: the largest batch size that occurs."""
    poll_interval_seconds: Annotated[float, Field(gt=0, le=60)] = 0.25
    lag_seconds: Seconds = 0.005
    """From reading the counters to the plan's arrival."""
    lost_polls: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of readings that never arrive."""
    repeat: Annotated[int, Field(ge=1, le=100)] = 1
    """How often the phases are run through."""
    phase_seconds: list[Annotated[float, Field(gt=0)]] = []
    """Lengths for phases that name none; each value makes a variant of the scenario, called name@3s."""
    latency: LatencyConfig
    profile: ProfileConfig | None = None
    phases: Annotated[list[PhaseConfig], Field(min_length=1, max_length=256)]
    directory: Path = Field(default=Path(), exclude=True)
    """Where relative files are looked for; set by `load_scenario`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        steps = self.candidate_steps
        if steps != sorted(set(steps)) or steps[0] != 0:
            raise ValueError(f"candidate_steps must rise strictly and start with 0, got {steps}")
        if self.fallback_num_steps is not None and self.fallback_num_steps not in steps:
            raise ValueError(f"fallback_num_steps {self.fallback_num_steps} is not among {steps}")
        for index, phase in enumerate(self.phases):
            if phase.tokens is None and phase.seconds is None and not self.phase_seconds:
                raise ValueError(f"phases.{index}: give tokens or seconds, or phase_seconds for the scenario")
        return self

    @property
    def fallback(self) -> int:
        """The worker's own depth."""
        if self.fallback_num_steps is not None:
            return self.fallback_num_steps
        return max(steps for steps in self.candidate_steps if steps <= 2)

    @property
    def largest_batch(self) -> int:
        """Most requests that can run at once."""
        if self.max_running_requests is not None:
            return self.max_running_requests
        return max(_largest(phase.batch_size) for phase in self.phases)

    def variants(self) -> "list[Scenario]":
        """Return the scenario once per `phase_seconds`, each complete; itself if there is none."""
        if not self.phase_seconds:
            return [self]
        return [
            self.model_copy(
                update={
                    "name": f"{self.name}@{seconds:g}s",
                    "phase_seconds": [],
                    "phases": [
                        phase
                        if phase.tokens or phase.seconds
                        else phase.model_copy(update={"seconds": seconds})
                        for phase in self.phases
                    ],
                }
            )
            for seconds in self.phase_seconds
        ]


def _largest(size: int | list[int] | WalkConfig) -> int:
    if isinstance(size, WalkConfig):
        return size.high
    return size if isinstance(size, int) else max(size)


def load_scenario(path: Path) -> Scenario:
    """Read a scenario.

    Raises:
        OSError, tomllib.TOMLDecodeError: the file cannot be read.
        pydantic.ValidationError: a key or value is refused; every error names its field.
    """
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    scenario = Scenario.model_validate({"name": path.stem, **values})
    return scenario.model_copy(update={"directory": path.parent})
