"""Every alert seen firing once on a real run, each by a fault that is really planted; and none before.

The deployed rules run with their windows, counts and `for` scaled by `FACTOR`; expressions and thresholds are theirs.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import yaml

from bench.dashboards.live import Background, Stack, wait_for
from bench.dashboards.prometheus import RULES
from bench.demo.phases import PREDICTABLE
from bench.demo.processes import DemoError

FACTOR = 1 / 40
"""Ten minutes become 15 s."""
FIRE_SECONDS = 75.0
TWITCHY = {
    "policy__name": "threshold",
    "policy__parameters__warmup": 2, "policy__parameters__interval": 1, "policy__parameters__probe_interval": 3,
    "policy__parameters__probe_interval_max": 4, "policy__parameters__probe_rounds": 2, "policy__ema_alpha": 0.9,
    "policy__parameters__up_hysteresis": -0.25, "guards__dwell_seconds": 0, "guards__min_rounds": 1,
    "guards__min_request_rounds": 1,
}  # fmt: skip
"""A controller that follows every whim, as no configuration should."""


class Faults:
    """The faults, in an order in which none covers up another."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.seen: dict[str, float] = {}

    def steps(self) -> list[tuple[tuple[str, ...], Callable[[], None]]]:
        """Return (alerts that must fire, what makes them) in order."""
        return [
            (("SpecDraftLatencyUp", "SpecSlowerThanPlain"), self.slow_drafter),
            (("SpecAcceptanceCollapsed",), self.wrong_drafter),
            (("SpecJournalFailing",), self.locked_journal),
            (("SpecDepthFlapping",), self.twitchy_controller),
            (("SpecBreakerOpen",), self.lying_statistics),
            (("SpecControllerGone", "SpecPlanStale"), self.dead_controller),
            (("SpecWorkerGone",), self.dead_worker),
        ]

    def slow_drafter(self) -> None:
        """Drafts take 150 ms longer from one moment on; a pin keeps the controller from dodging it."""
        self._stack.pin(3)
        time.sleep(45)  # a history to compare with
        self._stack.plant("slow")
        self._fires("SpecDraftLatencyUp", "SpecSlowerThanPlain")

    def wrong_drafter(self) -> None:
        """The drafter proposes nonsense, as one for another model would."""
        self._stack.pin(3)
        self._stack.plant("wrong")
        self._fires("SpecAcceptanceCollapsed")

    def locked_journal(self) -> None:
        """Another process holds the journal's lock for good."""
        self._stack.plant("")
        with closing(sqlite3.connect(self._stack.journal, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            self._fires("SpecJournalFailing")

    def twitchy_controller(self) -> None:
        """A controller whose settings follow every whim; the drafter is good and bad by turns."""
        self._stack.pin(None)
        self._stack.kill("controller")
        self._stack.start_controller(has_file=False, **TWITCHY)

        def flaps() -> bool:
            self._stack.plant("wrong" if int(time.monotonic()) % 6 < 3 else "")
            return self._is_firing("SpecDepthFlapping")

        self.seen["SpecDepthFlapping"] = wait_for("SpecDepthFlapping fires", flaps, FIRE_SECONDS)

    def lying_statistics(self) -> None:
        """The worker's statistics tell half of the tokens, so it delivers less than forecast, again and again."""
        self._stack.plant("lie")
        self._stack.kill("controller")
        self._stack.start_controller()
        with Background(self._stack.worker, PREDICTABLE, 6):  # the breaker wants hundreds of rounds
            self._fires("SpecBreakerOpen", within=2 * FIRE_SECONDS)

    def dead_controller(self) -> None:
        """kill -9."""
        self._stack.plant("")
        self._stack.kill("controller")
        self._fires("SpecControllerGone", "SpecPlanStale")

    def dead_worker(self) -> None:
        """kill -9."""
        self._stack.kill("worker")
        self._fires("SpecWorkerGone")

    def _is_firing(self, name: str) -> bool:
        return self._stack.prometheus.alerts().get(name) == "firing"

    def _fires(self, *names: str, within: float = FIRE_SECONDS) -> None:
        for name in names:
            seconds = wait_for(f"{name} fires", lambda name=name: self._is_firing(name), within)  # type: ignore[misc]
            self.seen[name] = seconds


def run(only: Sequence[str] | None = None) -> bool:
    """Plant every fault (or those of `only`'s alerts); return whether each of their alerts fired, and none before."""
    groups = yaml.safe_load((RULES / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    known = [rule["alert"] for group in groups for rule in group["rules"]]
    holds = True
    with Stack(factor=FACTOR, is_planted=True) as stack:
        stack.start()
        faults = Faults(stack)
        with Background(stack.worker, PREDICTABLE, 2):
            time.sleep(20)
            early = sorted(name for name, state in stack.prometheus.alerts().items() if state == "firing")
            print(f"healthy, under traffic: {', '.join(early) or 'no alert'} firing")
            holds = not early
            for names, make in faults.steps():
                if only and not set(only) & set(names):
                    continue
                print(f"fault: {(make.__doc__ or '').strip()}", flush=True)
                try:
                    make()
                except DemoError as error:
                    print(f"  FAILED: {error}; active: {stack.prometheus.alerts()}")
                    holds = False
                for name in names:
                    if name in faults.seen:
                        print(f"  {name} fired after {faults.seen[name]:.0f} s")
    missing = [name for name in only or known if name not in faults.seen]
    print(f"never fired: {', '.join(missing)}" if missing else f"all of {len(faults.seen)} alerts fired")
    return holds and not missing
