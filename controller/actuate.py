"""Actuate: keep one worker following the wished plan, as few requests as that takes.

New content gets a new version; the same content is renewed at a third of its time to live, or sent again at once
while unconfirmed: a lost answer needs no care, because a repeated version is a renewal. A pin travels with its
own remaining time. Knows nothing about why a depth is wished.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from controller.types import ProbeRequest
from controller.worker_client import Conflict, WorkerClient
from worker.protocol import Pin, PlanEntry, PlanStatus, Probe, SpecPlan

MIN_PIN_SECONDS = 0.05
"""A pin with less time left than this is over."""


@dataclass(frozen=True)
class ActivePin:
    """An operator's depth for a worker until `expires_seconds` (monotonic)."""

    num_steps: int
    expires_seconds: float
    reason: str = ""

    def remaining(self, now: float) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.expires_seconds - now)


@dataclass(frozen=True)
class Wish:
    """The plan's content, without version and times: equal wishes are the same plan."""

    entries: tuple[tuple[int, int], ...]
    """(slot edge, num_steps), by rising edge."""
    dead_band: float
    probe: ProbeRequest | None = None
    pin: ActivePin | None = None

    @staticmethod
    def of(
        depths: Mapping[int, int], *, dead_band: float, probe: ProbeRequest | None, pin: ActivePin | None
    ) -> "Wish":
        """Make a wish of a depth table."""
        return Wish(tuple(sorted(depths.items())), dead_band, probe, pin)


class BootChanged(Exception):
    """The worker is another process than the one the wish was for: read its info and start over."""


class Actuator:
    """Sends the plans of one worker life (one boot_id). Used from one task at a time."""

    def __init__(
        self, client: WorkerClient, *, boot_id: str, epoch: int, version: int, ttl_seconds: float
    ) -> None:
        self._client = client
        self._boot_id = boot_id
        self._epoch = epoch
        self._ttl = ttl_seconds
        self.version = version
        """Version of the newest plan sent, or to start from."""
        self._wish: Wish | None = None
        self._reason = ""
        self._confirmed_at: float | None = None
        self.conflict: str | None = None
        """What newer plan of somebody else the latest `actuate` went past; None: there was none."""

    @property
    def epoch(self) -> int:
        """The controller epoch in use (grows only when a worker holds a newer one)."""
        return self._epoch

    def is_confirmed(self, wish: Wish) -> bool:
        """Whether the worker has confirmed exactly this wish."""
        return self._wish == wish and self._confirmed_at is not None

    def is_due(self, wish: Wish, now: float) -> bool:
        """Whether something must be sent: new content, an unconfirmed plan, or a renewal."""
        if not self.is_confirmed(wish) or self._confirmed_at is None:
            return True
        return now - self._confirmed_at >= self._ttl / 3

    async def actuate(self, wish: Wish, reason: str, now: float) -> PlanStatus:
        """Send the wish (a renewal if it was sent before) and return what the worker follows now.

        Raises:
            BootChanged: the worker has been restarted.
            WorkerError: no answer or a refusal; the same call may simply be made again.
        """
        if wish != self._wish:
            self.version += 1
            self._wish, self._reason, self._confirmed_at = wish, reason[:256], None
        self.conflict = None
        try:
            status = await self._client.put_plan(self._plan(wish, now))
        except Conflict as conflict:
            self._adopt(conflict)
            status = await self._client.put_plan(self._plan(wish, now))
        self._confirmed_at = now
        return status

    def forget(self) -> None:
        """The plan is left to lapse: the next wish is sent as a new version."""
        self._wish, self._confirmed_at = None, None

    def _adopt(self, conflict: Conflict) -> None:
        """Go past the worker's newer plan; raise for what a higher version cannot mend."""
        held = conflict.current.plan if conflict.current else None
        if held is None or held.boot_id != self._boot_id:
            raise BootChanged(str(conflict)) from conflict
        if (held.controller_epoch, held.version) < (self._epoch, self.version):
            raise BootChanged(str(conflict)) from conflict  # not about versions: another boot_id
        self.conflict = f"went past plan {held.version} of epoch {held.controller_epoch}, which is not ours"
        self._epoch = max(self._epoch, held.controller_epoch)
        self.version = held.version + 1

    def _plan(self, wish: Wish, now: float) -> SpecPlan:
        probe, pin = wish.probe, wish.pin
        return SpecPlan(
            controller_epoch=self._epoch,
            version=self.version,
            boot_id=self._boot_id,
            ttl_seconds=self._ttl,
            entries=[PlanEntry(max_batch_size=edge, num_steps=depth) for edge, depth in wish.entries],
            dead_band=wish.dead_band,
            probe=None
            if probe is None
            else Probe(num_steps=probe.num_steps, rounds=probe.rounds, max_batch_size=probe.max_batch_size),
            pin=None
            if pin is None
            else Pin(num_steps=pin.num_steps, ttl_seconds=max(MIN_PIN_SECONDS, pin.remaining(now))),
            reason=self._reason,
        )
