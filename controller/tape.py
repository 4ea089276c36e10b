"""Tape: what the journal keeps of a life so that it can be played again, and how a life is made from it.

A life begins with the worker's info and status and the controller's configuration, or from a checkpoint of the
core's state. Both ends live here so that they cannot drift apart.
"""

from collections.abc import Mapping
from typing import Any, cast

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from controller.config import ControllerConfig
from controller.journal_rows import check_fields, field_names
from controller.life import Life
from controller.snapshot import NotASnapshot, restore, take
from controller.worker_client import WorkerClient
from worker.protocol import PlanStatus, SpecInfo

RECORDED_SECTIONS = {"loop", "policy", "guards", "shadow"}
"""What decisions depend on; addresses and tokens are never written down."""

_NOT_STATE = {"info", "slots", "recent", "observer", "actuator"}
"""Attributes of a life that its beginning determines, or that no decision reads."""


class _Recorded(ControllerConfig):
    """A recorded configuration: the present environment has no say in it."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take what was recorded, nothing else."""
        return (init_settings,)


def config_body(config: ControllerConfig) -> dict[str, Any]:
    """Return what the journal keeps of a configuration."""
    return config.model_dump(mode="json", include=RECORDED_SECTIONS)


def config_from(body: Mapping[str, Any]) -> ControllerConfig:
    """Return a recorded configuration (pydantic.ValidationError: this version does not understand it)."""
    return _Recorded(**body)


def life_body(info: SpecInfo, status: PlanStatus, now: float) -> dict[str, Any]:
    """Return what a life begins with."""
    return {
        "info": info.model_dump(mode="json"),
        "status": status.model_dump(mode="json"),
        "now": now,
        "fields": field_names(),
    }


def life_from(worker_id: str, body: Mapping[str, Any], config: ControllerConfig) -> Life:
    """Begin a recorded life again; nothing that it decides is sent anywhere.

    Raises:
        OtherFields: recorded by a version that observes other things.
        pydantic.ValidationError: the wire types have changed since.
    """
    check_fields(body["fields"])
    nobody = cast(WorkerClient, None)
    info = SpecInfo.model_validate(body["info"])
    status = PlanStatus.model_validate(body["status"])
    return Life(worker_id, nobody, config, epoch=0, info=info, status=status, now=body["now"])


def checkpoint(life: Life) -> Any:
    """Return the state of a life as JSON (NotASnapshot: it holds something that cannot be kept)."""
    return take({name: value for name, value in vars(life).items() if name not in _NOT_STATE})


def resume(life: Life, state: Any) -> None:
    """Put a freshly made life into a recorded state.

    Raises:
        NotASnapshot: malformed, or of another version.
    """
    values = restore(state)
    expected = set(vars(life)) - _NOT_STATE
    if not isinstance(values, dict) or set(values) != expected:
        raise NotASnapshot(f"a life has {sorted(expected)}")
    vars(life).update(values)
