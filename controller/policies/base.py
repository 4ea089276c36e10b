"""What a policy is: estimates in, proposals out.

A further policy is one more module in this package that defines `KIND`; nothing else needs to know it. Policies
are pure and deterministic: the same estimates in the same order give the same proposals, on any machine. They
may keep state, but must not assume that a proposal was followed: the depth in the next estimate says so.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from controller.types import Estimate, Proposal, Slot


class Policy(Protocol):
    """Decides for one worker; a new one is built when the worker restarts."""

    def decide(self, estimate: Estimate) -> list[Proposal]:
        """Return proposals for the slots that should change, probe or end a probe; nothing for the others.

        At most one proposal per slot, and at most one new probe altogether, none while one is in flight.
        """
        ...


@dataclass(frozen=True)
class PolicyKind:
    """How a policy is called in the configuration, what it is told there, and how one is built."""

    name: str
    version: str
    """Changes whenever the same evidence could lead to another proposal."""
    parameters: type[Any]
    """A frozen dataclass; its `__post_init__` raises ValueError naming a bad field."""
    build: Callable[[Any, Sequence[Slot], str], Policy]
    """(parameters, slots, seed) -> policy; the seed (a worker's id) spreads the probes of several workers."""
    default_slots: tuple[Slot, ...] = ()
    """Slots if none are configured; empty: a slot for every power of two, with all of the worker's tiers."""


def jitter(seed: str, *counters: int) -> float:
    """Return a factor in [0.9, 1.1) that depends on nothing but its arguments."""
    digest = hashlib.sha256(repr((seed, counters)).encode()).digest()
    return 0.9 + 0.2 * int.from_bytes(digest[:4], "big") / 2**32
