"""Snapshot: the state of the pure core as JSON and back, bit for bit.

A life may run for weeks while its turns are kept for a day, so replay needs points to start from. Only plain values,
collections and objects of the core's own classes are taken; no code runs on the way back (unlike pickle), so a
journal from elsewhere can do no harm. What was one object in two places is one object again. Meant for the same code
version; another one's may not fit.
"""

import importlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

CORE_MODULES = ("controller.types", "controller.estimate", "controller.guards", "controller.policies")
"""Modules (and what lies below them, or begins like them) whose classes may appear in a snapshot."""


class NotASnapshot(ValueError):
    """The value cannot be taken into, or read from, a snapshot."""


def take(value: Any) -> Any:
    """Return a JSON-ready copy of a value.

    Raises:
        NotASnapshot: it holds something that is neither plain nor of the core.
    """
    return _Taking().take(value)


def restore(data: Any) -> Any:
    """Return a value equal to the one that `take` was given.

    Raises:
        NotASnapshot: malformed, or it names a class outside the core.
    """
    try:
        return _Restoring().restore(data)
    except NotASnapshot:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ImportError) as error:
        raise NotASnapshot(f"malformed: {type(error).__name__}: {error}") from error


class _Taking:
    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._kept: list[Any] = []
        """Keeps what was seen alive, so that no id is used twice."""

    def take(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is tuple:
            return {"tuple": [self.take(item) for item in value]}
        if isinstance(value, tuple):
            return {"named": _name(type(value)), "items": [self.take(item) for item in value]}
        if id(value) in self._places:
            return {"ref": self._places[id(value)]}
        self._places[id(value)] = len(self._kept)
        self._kept.append(value)
        match value:
            case list():
                return {"list": [self.take(item) for item in value]}
            case deque():
                return {"deque": [self.take(item) for item in value], "maxlen": value.maxlen}
            case set() | frozenset():
                return {type(value).__name__: [self.take(item) for item in sorted(value)]}
            case Mapping() if not hasattr(value, "__dict__"):
                return {"dict": [[self.take(key), self.take(item)] for key, item in value.items()]}
        state = [[name, self.take(item)] for name, item in _state(value)]
        return {"class": _name(type(value)), "state": state}


class _Restoring:
    """Numbers what it makes in the same order as `_Taking` did; containers are numbered before their items."""

    def __init__(self) -> None:
        self._made: list[Any] = []

    def restore(self, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kind = next(iter(data), "")
        if kind == "ref":
            return self._made[data["ref"]]
        if kind == "tuple":
            return tuple(self.restore(item) for item in data["tuple"])
        if kind == "named":
            return _class(data["named"])(*(self.restore(item) for item in data["items"]))
        return self._mutable(kind, data)

    def _mutable(self, kind: str, data: dict[str, Any]) -> Any:
        made: Any
        match kind:
            case "list":
                made = self._number([])
                made.extend(self.restore(item) for item in data["list"])
            case "deque":
                made = self._number(deque(maxlen=data["maxlen"]))
                made.extend(self.restore(item) for item in data["deque"])
            case "set":
                made = self._number(set())
                made.update(self.restore(item) for item in data["set"])
            case "frozenset":
                place = len(self._made)
                self._made.append(None)
                made = self._made[place] = frozenset(self.restore(item) for item in data["frozenset"])
            case "dict":
                made = self._number({})
                for key, item in data["dict"]:
                    made[self.restore(key)] = self.restore(item)
            case "class":
                made = self._number(object.__new__(_class(data["class"])))
                for name, item in data["state"]:
                    object.__setattr__(made, name, self.restore(item))
            case _:
                raise NotASnapshot(f"unknown kind {kind!r}")
        return made

    def _number(self, made: Any) -> Any:
        self._made.append(made)
        return made


def _state(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Callable):  # type: ignore[arg-type]
        raise NotASnapshot(f"{value!r} is code, not state")
    names = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    slots = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return [*slots, *getattr(value, "__dict__", {}).items()]


def _name(kind: type) -> str:
    if not _is_core(kind.__module__):
        raise NotASnapshot(f"{kind.__module__}.{kind.__qualname__} is none of the core's classes")
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_core(module: str) -> bool:
    return any(module == name or module.startswith((f"{name}.", f"{name}_")) for name in CORE_MODULES)


def _class(name: str) -> type:
    module, _, qualname = name.partition(":")
    if not _is_core(module):
        raise NotASnapshot(f"{name} is none of the core's classes")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or found.__module__ != module:
        raise NotASnapshot(f"{name} is none of the core's classes")
    return found
