"""What a person sees: a live table on a terminal, plain lines elsewhere, and the summary at the end."""

import time
from collections import deque
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bench.demo.counters import Interval
from bench.demo.watch import PhaseResult, Watch

PLAIN_SECONDS = 2.5
"""A plain line comes this often."""
RECENT_DECISIONS = 8
RECENT_PHASES = 6


class Display(Protocol):
    """What the demo tells while it runs."""

    def say(self, text: str) -> None:
        """Print a line that stays."""

    def decision(self, decision: dict[str, Any]) -> None:
        """Take a decision of the controller, once."""

    def refresh(self, watch: Watch) -> None:
        """Show the newest readings."""

    def close(self) -> None:
        """Leave the terminal in order."""


def open_display(console: Console, results: list[PhaseResult]) -> Display:
    """Return the live table for a terminal, plain lines otherwise. `results` grows as phases begin."""
    return LiveDisplay(console, results) if console.is_terminal else PlainDisplay(console)


class PlainDisplay:
    """Lines for a log file or a pipe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = 0.0

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def decision(self, decision: dict[str, Any]) -> None:
        """Print the decision."""
        self.say(f"    decision  {decision_line(decision)}")

    def refresh(self, watch: Watch) -> None:
        """Print the figures of the last seconds, every `PLAIN_SECONDS`."""
        now = time.monotonic()
        if watch.result is None or watch.stats is None or now - self._last < PLAIN_SECONDS:
            return
        self._last = now
        recent = watch.recent()
        sums, seconds = recent if recent else (None, 0.0)
        self.say(
            f"{watch.result.phase.label:<15} {watch.result.seconds:5.1f} s  running {watch.stats.queue.running}  "
            f"num_steps {watch.stats.plan.num_steps}  accept_length {accept_length(sums)}  "
            f"positions {positions(sums)}  {tokens_per_second(sums, seconds)} tokens/s"
        )

    def close(self) -> None:
        """Nothing to put in order."""


class LiveDisplay:
    """A table of phases, the last one alive, above the latest decisions."""

    def __init__(self, console: Console, results: list[PhaseResult]) -> None:
        self._results = results
        self._decisions: deque[str] = deque(maxlen=RECENT_DECISIONS)
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def decision(self, decision: dict[str, Any]) -> None:
        """Keep the decision for the list below the table."""
        self._decisions.append(decision_line(decision))

    def refresh(self, watch: Watch) -> None:
        """Redraw."""
        self._live.update(self._draw(watch), refresh=True)

    def close(self) -> None:
        """Leave the last picture standing."""
        self._live.stop()

    def _draw(self, watch: Watch) -> RenderableType:
        columns = (
            "phase",
            "seconds",
            "running",
            "num_steps",
            "accept_length",
            "acceptance per position",
            "tokens/s",
        )
        table = Table(*columns, title="Slipstream, live", title_justify="left")
        for result in self._results[-RECENT_PHASES:]:
            if result is watch.result:
                table.add_row(*_live_row(watch, result), style="bold")
            else:
                table.add_row(*_finished_row(result), style="dim")
        lines = [Text(line, overflow="ellipsis", no_wrap=True) for line in self._decisions]
        return Group(table, Text("decisions (newest last)", style="bold"), *lines)


def _live_row(watch: Watch, result: PhaseResult) -> tuple[str, ...]:
    assert watch.stats is not None
    sums, seconds = watch.recent() or (None, 0.0)
    return (
        result.phase.label,
        f"{result.seconds:.0f}/{result.phase.seconds:.0f}",
        str(watch.stats.queue.running),
        str(watch.stats.plan.num_steps),
        accept_length(sums),
        positions(sums),
        tokens_per_second(sums, seconds),
    )


def _finished_row(result: PhaseResult) -> tuple[str, ...]:
    return (
        result.phase.label,
        f"{result.seconds:.0f}",
        "",
        depths(result.sums),
        accept_length(result.sums),
        positions(result.sums),
        f"{result.tokens_per_second:.1f}",
    )


def summary(results: list[PhaseResult]) -> Table:
    """Return the closing table, one row per phase."""
    columns = (
        "phase",
        "seconds",
        "tokens/s",
        "depths used (share of rounds)",
        "changes",
        "probes",
        "accept_length",
    )
    table = Table(*columns, title="Summary", title_justify="left")
    for result in results:
        table.add_row(
            result.phase.label,
            f"{result.seconds:.0f}",
            f"{result.tokens_per_second:.1f}",
            depths(result.sums),
            str(result.changes),
            str(result.probes),
            accept_length(result.sums),
        )
    return table


# ---- cells ----


def accept_length(sums: Interval | None) -> str:
    """Format the mean tokens per round and request."""
    return "-" if sums is None or sums.accept_length is None else f"{sums.accept_length:.2f}"


def positions(sums: Interval | None) -> str:
    """Format the acceptance per position."""
    return (
        " ".join(f"{share:.2f}" for share in sums.position_acceptance) if sums and any(sums.reached) else "-"
    )


def depths(sums: Interval | None) -> str:
    """Format the depths used with their share of the rounds, below half a per cent left out."""
    shares = sums.depth_shares if sums else []
    return "  ".join(f"{depth}: {share:.0%}" for depth, share in shares if share >= 0.005) or "-"


def tokens_per_second(sums: Interval | None, seconds: float) -> str:
    """Format the rate over an interval."""
    return f"{sums.generated_tokens / seconds:.1f}" if sums and seconds > 0 else "-"


def decision_line(decision: dict[str, Any]) -> str:
    """Put a decision of `GET /v1/decisions` on one line."""
    before, after = decision.get("num_steps_before"), decision.get("num_steps")
    slot = decision.get("max_batch_size")
    words = [decision["outcome"], decision["kind"]]
    if slot is not None:
        words.append(f"batch ≤{slot}:")
    if after is not None:
        words.append(
            f"{before} → {after}" if before is not None and before != after else f"num_steps {after}"
        )
    words.append(f"[{decision['reason']}]")
    words.append(decision["message"])
    return " ".join(words)
