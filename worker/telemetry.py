"""One reading of everything that the worker's metrics are made of: the wire's counters, and what only people look at.

Data only. Knows nothing about Prometheus; the controller never sees it (it lives on `SpecStats`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from worker.durations import DurationHistogram
from worker.protocol import SpecStats
from worker.spec.plan import DepthCounts


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """Cumulative since the start of the engine, but for the gauges in `stats`."""

    stats: SpecStats
    durations: Mapping[tuple[str, int], DurationHistogram]
    """By (stage, num_steps), of rounds without a prefill; a round may be here before it is in `stats`."""
    depth: DepthCounts
    slow_path_rounds: int
    """Rounds whose drafts were organised the long way (off the topk=1 fast path)."""
    eager_rounds: int
    """Rounds with a forward that replayed no captured graph."""
