"""Sections of the configuration about the service itself: `[server]`, `[journal]`, `[log]`."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from worker.protocol import MAX_TTL_SECONDS

Seconds = Annotated[float, Field(gt=0, le=MAX_TTL_SECONDS, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of the sections: closed and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerConfig(Section):
    """`[server]`: the controller's own listener, and who may use it."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8200
    token: SecretStr | None = None
    """Bearer token for reading and changing; better given by environment than in the file."""
    token_file: Path | None = None
    """File that holds it."""
    read_token: SecretStr | None = None
    """Bearer token for reading only."""
    read_token_file: Path | None = None
    allow_open: bool = False
    """Without tokens everybody who reaches the listener may change depths; off loopback that must be said here."""
    open_metrics: bool = False
    """`/metrics` needs no token."""
    grace_seconds: Seconds = 5.0
    """How long running requests may take after SIGTERM; a second signal ends at once."""

    @model_validator(mode="after")
    def _one_source_each(self) -> Self:
        for name in ("token", "read_token"):
            if getattr(self, name) is not None and getattr(self, f"{name}_file") is not None:
                raise ValueError(f"server.{name} and server.{name}_file exclude each other")
        return self


class JournalConfig(Section):
    """`[journal]`: where decisions are kept and for how long."""

    path: Annotated[str, Field(min_length=1)] = "data/controller.sqlite3"
    """SQLite file; `:memory:` keeps nothing over a restart."""
    decision_days: Annotated[float, Field(gt=0, le=3660)] = 30.0
    turn_days: Annotated[float, Field(ge=0, le=3660)] = 1.0
    """Inputs of every turn, for `replay`: some 300 bytes each, 100 MB per worker and day at four a second. 0: none."""
    checkpoint_seconds: Seconds = 600.0
    """How often a replay can begin within a worker's life."""


class LogConfig(Section):
    """`[log]`: one line per decision and change of state, none per turn."""

    format: Literal["console", "json"] = "console"
    level: Literal["debug", "info", "warning", "error"] = "info"
