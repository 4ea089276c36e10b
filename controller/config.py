"""The controller's configuration: one TOML file, every field overridable by an environment variable.

`SPEC_CONTROLLER_LOOP__POLL_INTERVAL_SECONDS=0.5` overrides `[loop] poll_interval_seconds`; lists and tables are
given as JSON (`SPEC_CONTROLLER_WORKERS='[{"id": "a", "url": "http://…"}]'`). Unknown keys and bad values are
refused with the field's name; nothing is read from the environment later on.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from controller.config_service import JournalConfig, LogConfig, Seconds, Section, ServerConfig
from controller.guards import GuardLimits
from controller.policies import PolicyKind, policy_kinds
from controller.types import Mode
from worker.protocol import NumSteps

ENV_PREFIX = "SPEC_CONTROLLER_"


class LoopConfig(Section):
    """`[loop]`: how often to look, how long to believe."""

    poll_interval_seconds: Seconds = 0.25
    plan_ttl_seconds: Seconds = 10.0
    """A plan lapses this long after its last renewal (renewed at a third of it): the controller's dead-man switch."""
    request_timeout_seconds: Seconds = 1.0
    """For each request to a worker."""
    confirm_timeout_seconds: Seconds = 1.0
    """How long `PUT …/depth` waits for the worker to follow before it answers 202."""
    hold_after_seconds: Seconds = 5.0
    """Data older than this change no depth; plans are still renewed."""
    default_after_seconds: Seconds = 30.0
    """Data older than this: nothing is sent any more, so that the worker falls back to its own depth."""
    late_after_seconds: Seconds = 5.0
    """`/readyz` turns false when a worker's turn is this late."""
    backoff_max_seconds: Seconds = 2.0
    """Longest pause between two attempts to reach a worker."""
    recent_window_seconds: Seconds = 5.0
    """Length of the window behind the figures of `GET /v1/workers`."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.default_after_seconds < self.hold_after_seconds:
            raise ValueError(
                f"loop.default_after_seconds {self.default_after_seconds:g} is below "
                f"loop.hold_after_seconds {self.hold_after_seconds:g}"
            )
        if self.plan_ttl_seconds < 3 * self.poll_interval_seconds:
            raise ValueError(
                f"loop.plan_ttl_seconds {self.plan_ttl_seconds:g} is below three poll intervals: plans would lapse"
            )
        for name in ("hold_after_seconds", "late_after_seconds", "default_after_seconds"):
            if self.poll_interval_seconds >= getattr(self, name):
                raise ValueError(
                    f"loop.poll_interval_seconds {self.poll_interval_seconds:g} must be below "
                    f"loop.{name} {getattr(self, name):g}: every reading would be too old"
                )
        return self


class SlotConfig(Section):
    """`[[policy.slots]]`: a range of batch sizes with one depth, up to `max_batch_size`; the last is open."""

    max_batch_size: Annotated[int, Field(ge=1, le=65536)]
    candidate_steps: Annotated[list[NumSteps], Field(min_length=1, max_length=16)]
    """Depths to choose from here, as far as the worker has them as tiers. Rising."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_batch_size & (self.max_batch_size - 1):
            raise ValueError(
                f"max_batch_size must be a power of two (the worker's statistics are), got {self.max_batch_size}"
            )
        if self.candidate_steps != sorted(set(self.candidate_steps)):
            raise ValueError(f"candidate_steps must rise strictly, got {self.candidate_steps}")
        return self


class PolicyConfig(Section):
    """`[policy]`: which rule decides, on which slots, with which parameters."""

    name: str = "goodput"
    mode: Mode = "active"
    """At start: active, advisory, frozen or released."""
    slots: Annotated[list[SlotConfig], Field(max_length=16)] = []
    """Empty: the policy's own (`goodput`: every power of two up to the worker's limit, with all its tiers)."""
    dead_band: Annotated[float, Field(ge=0, le=0.5)] = 0.15
    """Width of the band around a slot's edge within which the worker stays where it is."""
    ema_alpha: Annotated[float, Field(gt=0, le=1)] = 0.06
    """Weight of one request-round in the moving average of correct drafts."""
    parameters: dict[str, Any] = {}
    """`[policy.parameters]`: what the named policy understands; its defaults are in its module."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in policy_kinds():
            raise ValueError(f"no policy is called {name!r}; known: {sorted(policy_kinds())}")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        edges = [slot.max_batch_size for slot in self.slots]
        if edges != sorted(set(edges)):
            raise ValueError(f"policy.slots: max_batch_size must rise strictly, got {edges}")
        self.policy_parameters()
        return self

    def beside(self, active: "PolicyConfig") -> "PolicyConfig":
        """Return this policy on the active one's slots, to look on with."""
        shared = ("slots", "dead_band", "ema_alpha")
        return self.model_copy(update={name: getattr(active, name) for name in shared})

    @property
    def kind(self) -> PolicyKind:
        """The policy named."""
        return policy_kinds()[self.name]

    def policy_parameters(self) -> Any:
        """Return the parameters as the policy's own type; ValueError names an unknown or bad one."""
        known = {field.name for field in dataclasses.fields(self.kind.parameters)}
        unknown = sorted(set(self.parameters) - known)
        if unknown:
            raise ValueError(
                f"policy.parameters: {', '.join(unknown)} unknown to {self.name!r}; known: {sorted(known)}"
            )
        return TypeAdapter(self.kind.parameters).validate_python(self.parameters)


class ShadowConfig(Section):
    """`[shadow]`: a second policy that looks on and is never followed; its parameters as in `[policy]`."""

    name: str | None = None
    parameters: dict[str, Any] = {}


class GuardConfig(Section):
    """`[guards]`: what no policy may overstep."""

    min_num_steps: NumSteps = 0
    max_num_steps: NumSteps = 64
    dwell_seconds: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """Least time between two changes of a slot; an urgent way down does not wait."""
    max_changes_per_minute: Annotated[int, Field(ge=1, le=10_000)] = 60
    min_rounds: Annotated[int, Field(ge=1, le=100_000)] = 6
    min_request_rounds: Annotated[int, Field(ge=1, le=100_000)] = 12
    window_seconds: Annotated[float, Field(ge=0, le=3600)] = 0.4
    """A controller that has just met a worker watches this long before its first change."""
    breaker_tolerance: Annotated[float, Field(ge=0, le=1)] = 0.10
    """Forecast and delivered tokens/s may differ by this much; more, window after window: the worker's own depth."""
    breaker_seconds: Annotated[float, Field(ge=1, le=3600)] = 30.0
    """For this long."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_num_steps > self.max_num_steps:
            raise ValueError(
                f"guards.min_num_steps {self.min_num_steps} is above guards.max_num_steps {self.max_num_steps}"
            )
        return self

    def limits(self, hold_after_seconds: float) -> GuardLimits:
        """Return the limits as the pure core takes them."""
        return GuardLimits(**self.model_dump(), hold_after_seconds=hold_after_seconds)


class WorkerConfig(Section):
    """`[[workers]]`: one worker to look after."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    url: str
    """Its control address, e.g. `http://127.0.0.1:8101`."""
    token_file: Path | None = None
    """File with the bearer token of its control port."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{error}, got {url!r}") from None
        if port == 0:
            raise ValueError(f"port must be within 1…65535, got {url!r}")
        if parts.username or parts.password:
            raise ValueError("must not carry a user or password; use token_file")
        return url.rstrip("/")


class ControllerConfig(BaseSettings):
    """Everything a controller is told at start."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    server: ServerConfig = ServerConfig()
    loop: LoopConfig = LoopConfig()
    policy: PolicyConfig = PolicyConfig()
    guards: GuardConfig = GuardConfig()
    shadow: ShadowConfig = ShadowConfig()
    journal: JournalConfig = JournalConfig()
    log: LogConfig = LogConfig()
    workers: list[WorkerConfig] = []
    """None is allowed: the controller then only answers, and says so."""

    @field_validator("workers")
    @classmethod
    def _unique(cls, workers: list[WorkerConfig]) -> list[WorkerConfig]:
        ids = [worker.id for worker in workers]
        twice = sorted({id for id in ids if ids.count(id) > 1})
        if twice:
            raise ValueError(f"ids must be unique, given twice: {twice}")
        return workers

    @model_validator(mode="after")
    def _shadow_is_a_policy(self) -> Self:
        try:
            self.shadow_policy()
        except ValueError as error:
            message = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise ValueError(f"shadow: {message}") from None
        return self

    def shadow_policy(self) -> PolicyConfig | None:
        """Return the shadow as a policy on the active one's slots; None without a shadow."""
        if self.shadow.name is None:
            return None
        return PolicyConfig(name=self.shadow.name, parameters=self.shadow.parameters).beside(self.policy)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment over arguments (the file's content)."""
        return (env_settings, init_settings)


def load_config(path: Path | None, environ: Mapping[str, str] = os.environ) -> ControllerConfig:
    """Read the file (None: defaults only), apply the environment, validate.

    Raises:
        OSError, tomllib.TOMLDecodeError: the file cannot be read.
        pydantic.ValidationError: a key or value is refused; every error names its field.
        ValueError: an environment variable with our prefix names no field.
    """
    _check_environment(environ)
    if path is not None and not path.is_file():  # The source below takes a missing file for an empty one.
        raise FileNotFoundError("not there, or no file")
    values = {} if path is None else TomlConfigSettingsSource(ControllerConfig, path)()
    return ControllerConfig(**values)


def _check_environment(environ: Mapping[str, str]) -> None:
    """Raise ValueError for a variable with our prefix that names no field (deeper parts are checked as values)."""
    known = {f"{ENV_PREFIX}WORKERS"}
    for section, info in ControllerConfig.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            known |= {f"{ENV_PREFIX}{section}__{name}".upper() for name in info.annotation.model_fields}
    inside = (f"{ENV_PREFIX}POLICY__PARAMETERS__", f"{ENV_PREFIX}SHADOW__PARAMETERS__")
    unknown = sorted(
        name
        for name in environ
        if name.startswith(ENV_PREFIX) and name.upper() not in known and not name.upper().startswith(inside)
    )
    if unknown:
        raise ValueError(
            f"environment: {', '.join(unknown)} name no configuration field; known: {sorted(known)}"
        )
