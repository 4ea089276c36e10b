"""The policies, found by looking at this package's modules: a further policy is a matter of one file."""

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from controller.policies.base import Policy, PolicyKind

__all__ = ["Policy", "PolicyKind", "policy_kinds"]


@functools.cache
def policy_kinds() -> Mapping[str, PolicyKind]:
    """Return all policies by name.

    Raises:
        ValueError: two modules define the same name.
    """
    kinds: dict[str, PolicyKind] = {}
    for module in pkgutil.iter_modules(__path__):
        kind = getattr(importlib.import_module(f"{__name__}.{module.name}"), "KIND", None)
        if kind is None:
            continue
        if kind.name in kinds:
            raise ValueError(f"two policies are called {kind.name!r}")
        kinds[kind.name] = kind
    return MappingProxyType(kinds)
