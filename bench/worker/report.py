"""Figures of a run: medians with the range of the repeats, ratios taken repeat by repeat. Knows no arm by type."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.worker.arms import Sample

Samples = Mapping[tuple[str, str], Sequence[Sample]]
"""By workload and arm, one per repeat."""

PLAIN, TWIN, ADAPTIVE, FLOAT32 = "depth 0", "depth 0 again", "adaptive", "float32 depth 0"


def rows(samples: Samples) -> list[dict[str, Any]]:
    """Return one row per workload and arm."""
    result = []
    for (workload, arm), found in samples.items():
        speeds = [sample.tokens_per_second for sample in found]
        lengths = [sample.accept_length for sample in found if sample.accept_length is not None]
        result.append(
            {
                "workload": workload,
                "arm": arm,
                "tokens": found[0].tokens,
                "tokens_per_second": round(statistics.median(speeds), 2),
                "range": [round(min(speeds), 2), round(max(speeds), 2)],
                "repeats": len(found),
                "vs_plain": ratio(samples, workload, arm, PLAIN),
                "accept_length": round(statistics.median(lengths), 3) if lengths else None,
            }
        )
    return result


def ratio(samples: Samples, workload: str, ours: str, theirs: str | None) -> float | None:
    """Return the median over repeats of how many times faster `ours` was; None where one is missing."""
    pairs = zip(samples.get((workload, ours), ()), samples.get((workload, theirs or ""), ()), strict=False)
    ratios = [one.tokens_per_second / other.tokens_per_second for one, other in pairs]
    return round(statistics.median(ratios), 3) if ratios else None


def best(samples: Samples, workload: str, begins: str) -> str | None:
    """Return the arm with the best median among those whose names begin so; None without any."""
    arms = [arm for kind, arm in samples if kind == workload and arm.startswith(begins) and arm != TWIN]
    return max(
        arms,
        key=lambda arm: statistics.median(s.tokens_per_second for s in samples[workload, arm]),
        default=None,
    )


def summary(samples: Samples, missing: Sequence[str]) -> dict[str, Any]:
    """Return the last line's object."""
    workloads = list(dict.fromkeys(workload for workload, _ in samples))

    def by_workload(ours: str, theirs: str | Mapping[str, str | None]) -> dict[str, float | None] | None:
        arms = {workload: theirs if isinstance(theirs, str) else theirs[workload] for workload in workloads}
        found = {workload: ratio(samples, workload, ours, arm) for workload, arm in arms.items()}
        return None if all(value is None for value in found.values()) else found

    def overall(theirs: str) -> float | None:
        found = [value for value in (by_workload(PLAIN, theirs) or {}).values() if value is not None]
        return round(statistics.median(found), 3) if found else None

    twins = [value for value in (by_workload(TWIN, PLAIN) or {}).values() if value is not None]
    deepest = [arm for _, arm in samples if arm.startswith("depth") and arm not in (PLAIN, TWIN)]
    first = [s.first_drafts for (_, arm), found in samples.items() if arm in set(deepest) for s in found]
    proposed = sum(pair[1] for pair in first)
    table = rows(samples)
    best_fixed = {workload: best(samples, workload, "depth") for workload in workloads}
    best_vllm = {workload: best(samples, workload, "vllm") for workload in workloads}
    return {
        "bench": "worker",
        "noise_floor": max((abs(value - 1) for value in twins), default=None),
        "plain_vs_transformers": overall("transformers"),
        "packed_vs_fp32": overall(FLOAT32),
        "vs_llamacpp_plain": by_workload(ADAPTIVE, "llama.cpp"),
        "vs_transformers_lookup": by_workload(ADAPTIVE, "transformers lookup"),
        "vs_vllm": by_workload(ADAPTIVE, best_vllm),
        "adaptive_vs_plain": by_workload(ADAPTIVE, PLAIN),
        "adaptive_vs_best_fixed": by_workload(ADAPTIVE, best_fixed),
        "best_fixed": best_fixed,
        "draft_top1": round(sum(pair[0] for pair in first) / proposed, 3) if proposed else None,
        "accept_length": {row["workload"]: row["accept_length"] for row in table if row["arm"] == ADAPTIVE},
        "left_out": list(missing),
        "rows": table,
    }
