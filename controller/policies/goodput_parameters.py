"""What `goodput` is told in `[policy.parameters]`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class GoodputParameters:
    """`[policy.parameters]` of `goodput`."""

    objective: Literal["throughput", "latency_slo"] = "throughput"
    slo_seconds: float | None = None
    """With `latency_slo`: bound of the inter-token time's 95th percentile."""
    delta: float = 0.03
    """Least gain (relative) that is worth a deeper depth."""
    delta_down: float = 0.005
    """The same for a shallower one."""
    z: float = 1.2
    """Standard deviations by which a gain must be beyond doubt."""
    optimism: float = 1.3
    """Standard deviations on top of the expected gain in the choice of what to probe."""
    probe_samples: int = 8
    """Request-rounds of a probe; from depth 0, where probes look for any change at all, a quarter of them."""
    probe_share: float = 0.008
    """Share of busy time that probes may take."""
    probe_pause_seconds: float = 0.5
    """Least time between two probes of a slot, doubled by each that found nothing, up to `probe_pause_max_seconds`."""
    probe_pause_max_seconds: float = 8.0
    sight: float = 0.10
    """What any depth but 0 is worth beside its goodput (in logarithms) just after the text has changed."""
    sight_seconds: float = 10.0
    """How fast that fades once the text has ceased to change."""
    max_num_steps: Mapping[int, int] = field(default_factory=dict)
    """Batch size -> deepest depth allowed from that batch size on."""

    def __post_init__(self) -> None:
        is_good = self.slo_seconds is not None and 0 < self.slo_seconds < math.inf
        if self.objective == "latency_slo" and not is_good:
            raise ValueError(
                f'objective "latency_slo" needs slo_seconds, a positive number, got {self.slo_seconds}'
            )
        if self.slo_seconds is not None and not is_good:
            raise ValueError(f"slo_seconds must be above 0 and finite, got {self.slo_seconds}")
        if not 0 < self.sight_seconds < math.inf:
            raise ValueError(f"sight_seconds must be above 0 and finite, got {self.sight_seconds}")
        for name in (
            "delta",
            "delta_down",
            "z",
            "optimism",
            "sight",
            "probe_pause_seconds",
            "probe_pause_max_seconds",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more and finite, got {getattr(self, name)}")
        if not 0 < self.probe_share <= 0.2:
            raise ValueError(f"probe_share must be above 0 and at most 0.2, got {self.probe_share}")
        if not 1 <= self.probe_samples <= 1024:
            raise ValueError(f"probe_samples must be within 1…1024, got {self.probe_samples}")
        if self.probe_pause_max_seconds < self.probe_pause_seconds:
            raise ValueError(
                f"probe_pause_max_seconds {self.probe_pause_max_seconds} is below "
                f"probe_pause_seconds {self.probe_pause_seconds}"
            )
        for size, deepest in self.max_num_steps.items():
            if size < 1 or deepest < 0:
                raise ValueError(f"max_num_steps: {size} = {deepest}: batch sizes from 1, depths from 0")
