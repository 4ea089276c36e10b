"""Watches the pair over HTTP: the worker's counters and the controller's decisions, a few times a second.

Keeps a short window for the live figures and a running sum per phase. Draws nothing.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.demo.counters import Interval, add, between
from bench.demo.phases import Phase
from bench.demo.processes import DemoError
from worker.protocol import SpecStats

POLL_SECONDS = 0.25
WINDOW_SECONDS = 3.0
"""The live figures tell of the last seconds, not of the whole phase."""
IDLE_SECONDS = 5.0


@dataclass
class PhaseResult:
    """What one run of a phase has come to."""

    phase: Phase
    seconds: float = 0.0
    sums: Interval | None = None
    changes: int = 0
    """Applied changes of depth for a batch size, probes not counted."""
    probes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """All generated tokens over the wall time of the phase."""
        return self.sums.generated_tokens / self.seconds if self.sums and self.seconds else 0.0


@dataclass
class Watch:
    """The newest readings; `poll` refreshes them."""

    worker_control: httpx.AsyncClient
    controller: httpx.AsyncClient
    on_decision: Callable[[dict[str, Any]], None]
    clock: Callable[[], float] = time.monotonic
    stats: SpecStats | None = None
    result: PhaseResult | None = None
    """The latest phase. Decisions count for it until the next one begins: they follow from its rounds."""
    _window: deque[tuple[float, SpecStats]] = field(default_factory=deque)
    _cursor: int = 0
    _phase_start: tuple[float, SpecStats] | None = None

    def begin(self, phase: Phase) -> PhaseResult:
        """Start a phase's sums at the newest reading (call `poll` before)."""
        assert self.stats is not None
        self.result = PhaseResult(phase)
        self._phase_start = (self.clock(), self.stats)
        self._window.clear()
        self._window.append(self._phase_start)
        return self.result

    def end(self) -> None:
        """Close the phase's sums at the newest reading."""
        self._phase_start = None

    async def poll(self) -> None:
        """Read both programs once.

        Raises:
            DemoError: one of them does not answer as it should.
        """
        try:
            stats, page = await asyncio.gather(
                self.worker_control.get("/v1/spec/stats"),
                self.controller.get("/v1/decisions", params={"after": self._cursor, "limit": 100}),
            )
        except httpx.HTTPError as error:
            raise DemoError(f"polling failed: {type(error).__name__}: {error}") from error
        for answer in (stats, page):
            if answer.status_code != 200:
                raise DemoError(
                    f"GET {answer.request.url} answered {answer.status_code}: {answer.text[:500]}"
                )
        self._take_stats(SpecStats.model_validate_json(stats.content))
        self._take_decisions(page.json())

    async def until_idle(self) -> None:
        """Poll until no request runs or waits, for at most `IDLE_SECONDS`."""
        deadline = self.clock() + IDLE_SECONDS
        while self.clock() < deadline:
            await self.poll()
            assert self.stats is not None
            if not self.stats.queue.running and not self.stats.queue.waiting:
                return
            await asyncio.sleep(POLL_SECONDS / 2)
        raise DemoError(f"requests are still running {IDLE_SECONDS:g} s after their clients went away")

    def recent(self) -> tuple[Interval, float] | None:
        """Return sums over the last seconds and the seconds, or None before the second reading."""
        if len(self._window) < 2:
            return None
        (start, before), (end, after) = self._window[0], self._window[-1]
        return between(before, after), end - start

    def _take_stats(self, stats: SpecStats) -> None:
        if self.stats is not None and stats.boot_id != self.stats.boot_id:
            raise DemoError(f"the worker restarted: boot {self.stats.boot_id}, now {stats.boot_id}")
        now = self.clock()
        self.stats = stats
        self._window.append((now, stats))
        while len(self._window) > 2 and now - self._window[0][0] > WINDOW_SECONDS:
            self._window.popleft()
        if self.result is not None and self._phase_start is not None:
            since, before = self._phase_start
            self.result.seconds = now - since
            self.result.sums = between(before, stats)

    def _take_decisions(self, page: dict[str, Any]) -> None:
        for decision in page["decisions"]:
            self._cursor = max(self._cursor, decision["cursor"])
            if self.result is not None and decision["outcome"] == "applied":
                self.result.changes += decision["kind"] == "depth"
                self.result.probes += decision["kind"] == "probe"
            self.on_decision(decision)


def merge(results: list[PhaseResult]) -> list[PhaseResult]:
    """Add up the runs of equal phases (kind and concurrency), in order of first appearance."""
    merged: dict[str, PhaseResult] = {}
    for result in results:
        if result.sums is None:
            continue
        total = merged.setdefault(result.phase.label, PhaseResult(result.phase))
        total.seconds += result.seconds
        total.sums = result.sums if total.sums is None else add(total.sums, result.sums)
        total.changes += result.changes
        total.probes += result.probes
    return list(merged.values())
