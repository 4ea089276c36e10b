"""Speculation statistics of one request in the shape that vLLM publishes (`metrics.speculative_decoding`).

Only rounds in which a draft was verified count as steps, as there; so the sums over requests are the counters
`spec_decode_num_drafts_total` and its like in /metrics. The depth varies, so there is no `num_spec_tokens`.
"""

from collections import Counter
from typing import Any

from worker.config import MetricsLevel
from worker.request import RequestSpecStats


def acceptance_metrics(spec: RequestSpecStats, level: MetricsLevel) -> dict[str, Any]:
    """Return the object; Σ histogram = steps, and Σ j · histogram[j] = accepted <= drafted, always."""
    steps = [
        (drafted, accepted)
        for drafted, accepted in zip(spec.proposed_by_round, spec.correct_by_round, strict=True)
        if drafted
    ]
    num_drafted = sum(drafted for drafted, _ in steps)
    num_accepted = sum(accepted for _, accepted in steps)
    counts = Counter(steps)
    lengths = sorted({drafted for drafted, _ in steps})
    by_length = {
        str(length): [counts[length, accepted] for accepted in range(length + 1)] for length in lengths
    }
    deepest = lengths[-1] if lengths else 0
    metrics: dict[str, Any] = {
        "mean_acceptance_length": 1 + num_accepted / len(steps) if steps else 1.0,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": [
            sum(counts[length, accepted] for length in lengths) for accepted in range(deepest + 1)
        ],
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": None,
    }
    if level == "detailed":
        metrics["per_step_accepted"] = [accepted for _, accepted in steps]
        metrics["per_step_drafted"] = [drafted for drafted, _ in steps]
    return metrics
