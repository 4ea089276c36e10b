"""Latency: where the time goes, as clients feel it and stage by stage."""

from grafana_foundation_sdk.builders import dashboard as builders

from bench.dashboards.overview import IDLE
from bench.dashboards.panels import Query, board, chart, encode
from bench.dashboards.promql import mean, quantile, rate, ratio

UID = "slipstream-latency"
QUANTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


def build() -> str:
    """Return the dashboard's JSON."""
    made = board(UID, "Slipstream / Latency", "Where the time goes. Quantiles are over all chosen workers.")
    made = made.with_row(builders.Row("As clients feel it"))
    for title, metric, text in (
        ("Time to first token", "spec_time_to_first_token_seconds", "From arrival, queueing included."),
        (
            "Inter-token time",
            "spec_inter_token_seconds",
            "Per token after the first; a round's tokens share its time.",
        ),
        ("Request duration", "spec_request_duration_seconds", "From arrival to the last token."),
    ):
        made = made.with_panel(_quantiles(title, metric, text))
    made = made.with_row(builders.Row("Stages of a round"))
    for stage, text in (
        ("draft", "Making drafts."),
        ("verify", "The target over roots and drafts."),
        ("round", "Draft, verify, commit and our own bookkeeping."),
    ):
        metric = "spec_round_seconds"
        made = made.with_panel(_quantiles(stage.capitalize(), metric, f"{text} No prefill.", stage=stage))
    made = made.with_row(builders.Row("By depth"))
    for panel in _by_depth():
        made = made.with_panel(panel)
    return encode(made.build())


def _quantiles(title: str, metric: str, text: str, **labels: str):
    queries = [Query(quantile(q, metric, **labels), name) for q, name in QUANTILES]
    return chart(title, f"{text} {IDLE}", queries, unit="s")


def _by_depth():
    cost = ratio(
        rate("spec_timed_round_seconds_total", "num_steps", "batch_size_le"),
        rate("spec_timed_rounds_total", "num_steps", "batch_size_le"),
    )
    whole = rate("spec_round_seconds_sum", stage="round")
    shares = [
        Query(ratio(rate("spec_round_seconds_sum", stage=stage), whole), stage)
        for stage in ("draft", "verify", "catch_up")
    ]
    return [
        *(
            chart(
                f"{stage.capitalize()}, p95 by depth",
                IDLE,
                [
                    Query(
                        quantile(0.95, "spec_round_seconds", "num_steps", stage=stage),
                        "num_steps {{num_steps}}",
                    )
                ],
                unit="s",
            )
            for stage in ("draft", "verify", "round")
        ),
        chart(
            "Round, mean by depth and batch size",
            f"What the controller learns costs from. {IDLE}",
            [Query(cost, "num_steps {{num_steps}} ≤{{batch_size_le}}")],
            unit="s",
        ),
        chart(
            "Share of round time",
            "Of all timed rounds; what is left to 1 is our own bookkeeping, and catching the "
            "drafter's KV up comes on top. " + IDLE,
            shares,
            unit="percentunit",
        ),
        chart(
            "Controller's turn",
            f"Requests to the worker included. {IDLE}",
            [
                Query(quantile(0.95, "spec_controller_tick_seconds", "worker"), "{{worker}} p95"),
                Query(mean("spec_controller_tick_seconds", "worker"), "{{worker}} mean"),
            ],
            unit="s",
        ),
    ]
