"""Acceptance: how good the drafts are, position by position and depth by depth, and what is wasted."""

from grafana_foundation_sdk.builders import dashboard as builders

from bench.dashboards.overview import IDLE
from bench.dashboards.panels import Query, board, chart, encode
from bench.dashboards.promql import rate, ratio

UID = "slipstream-acceptance"


def build() -> str:
    """Return the dashboard's JSON."""
    made = board(UID, "Slipstream / Acceptance", "How good the drafts are, and what is wasted.")
    made = made.with_row(builders.Row("Positions"))
    for panel in _positions():
        made = made.with_panel(panel)
    made = made.with_row(builders.Row("Depths"))
    for panel in _depths():
        made = made.with_panel(panel)
    made = made.with_row(builders.Row("Work"))
    for panel in _work():
        made = made.with_panel(panel)
    return encode(made.build())


def _positions():
    correct = rate("spec_decode_num_accepted_tokens_per_pos_total", "position")
    reached = rate("spec_decode_reached_per_pos_total", "position")
    proposed = rate("spec_decode_num_draft_tokens_per_pos_total", "position")
    return [
        chart(
            "Acceptance by position",
            "P(draft correct | all drafts before it correct), from position 0. A round in which the "
            "drafter had nothing to propose counts as wrong; one that was cut off does not count. " + IDLE,
            [Query(ratio(correct, reached), "position {{position}}")],
            unit="percentunit",
            high=1,
            span=12,
        ),
        chart(
            "Proposed where reached",
            "Drafts for a position, per round that reached it: low for n-gram lookup on new "
            "text. Above 1 because drafts behind a wrong one are proposed, too. " + IDLE,
            [Query(ratio(proposed, reached), "position {{position}}")],
            unit="percentunit",
            span=12,
        ),
    ]


def _depths():
    rounds = rate("spec_request_rounds_total", "num_steps")
    # Rows count the root of every request, too.
    all_rounds, rows = rate("spec_request_rounds_total", "worker"), rate("spec_verify_rows_total", "worker")
    return [
        chart(
            "accept_length by depth",
            f"Tokens per request-round at each depth. {IDLE}",
            [Query(ratio(rate("spec_accept_tokens_total", "num_steps"), rounds), "num_steps {{num_steps}}")],
        ),
        chart(
            "Request-rounds by depth",
            "What was executed, per second.",
            [Query(rounds, "num_steps {{num_steps}}")],
            is_stacked=True,
        ),
        chart(
            "Drafts verified per request-round",
            "What the depth came to: budgets, and what the drafter found. " + IDLE,
            [Query(ratio(f"({rows} - {all_rounds})", all_rounds), "{{worker}}")],
        ),
    ]


def _work():
    proposed, correct = (
        rate(f"spec_decode_num_{name}_tokens_total", "worker") for name in ("draft", "accepted")
    )
    emitted = rate("spec_emitted_tokens_total", "worker")
    return [
        chart(
            "Drafts wasted, by depth",
            "Verified for nothing, per second.",
            [Query(rate("spec_wasted_drafts_total", "num_steps"), "num_steps {{num_steps}}")],
            is_stacked=True,
        ),
        chart(
            "Share of drafts accepted",
            "Accepted of all verified. To look at only: it falls as the depth grows "
            "at equal quality. " + IDLE,
            [Query(ratio(correct, proposed), "{{worker}}")],
            unit="percentunit",
            high=1,
        ),
        chart(
            "Rows verified per token",
            f"Rows the target computed for each token; plain decoding has 1. {IDLE}",
            [Query(ratio(rate("spec_verify_rows_total", "worker"), emitted), "{{worker}}")],
        ),
    ]
