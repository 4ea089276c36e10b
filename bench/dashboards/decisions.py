"""Decisions: what the controller did and why, with the journal's records as marks, and what the shadow would do."""

from typing import Any

from grafana_foundation_sdk.builders import dashboard as builders

from bench.dashboards.overview import IDLE
from bench.dashboards.panels import Query, board, chart, encode
from bench.dashboards.promql import increase, or_zero, rate, ratio, select

UID = "slipstream-decisions"


def build() -> str:
    """Return the dashboard's JSON."""
    text = (
        "What the controller decided. Marks are records of the journal; GET /v1/decisions has them in full."
    )
    made = board(UID, "Slipstream / Decisions", text)
    made = made.with_row(builders.Row("Depth"))
    for panel in _depths():
        made = made.with_panel(panel)
    made = made.with_row(builders.Row("Records"))
    for panel in _records():
        made = made.with_panel(panel)
    made = made.with_row(builders.Row("The controller itself"))
    for panel in _controller():
        made = made.with_panel(panel)
    return encode(made.build(), ANNOTATIONS)


def _annotation(name: str, color: str, is_on: bool, **labels: str) -> dict[str, Any]:
    """Marks at the very time of the records: the series' value is the time of the newest one of its sort."""
    expr = select("spec_controller_last_decision_timestamp_seconds", **labels)
    return {
        "name": name,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "enable": is_on,
        "iconColor": color,
        "target": {"refId": "Anno", "expr": f"{expr} * 1000"},
        "useValueForTime": True,
        "titleFormat": "{{worker}}: {{kind}} {{reason}}",
        "textFormat": "{{outcome}}",
        "tagKeys": "kind,reason,outcome",
    }


ANNOTATIONS = (
    _annotation("Depth changes", "blue", True, kind="depth", outcome="~applied|unconfirmed"),
    _annotation("Operators", "purple", True, kind="~pin|mode|rollback"),
    _annotation("Workers", "red", True, kind="~worker|plan"),
    _annotation("Probes", "green", False, kind="probe"),
    _annotation("Held back", "orange", False, outcome="held"),
)


def _depths():
    desired = Query(select("spec_controller_desired_num_steps"), "{{worker}} ≤{{batch_size_le}}")
    shadow = Query(select("spec_controller_shadow_num_steps"), "{{worker}} ≤{{batch_size_le}} shadow")
    by_depth, all_rounds = rate("spec_request_rounds_total", "num_steps"), rate("spec_request_rounds_total")
    executed = f"{by_depth} / on() group_left() ({all_rounds} > 0) or 0 * {by_depth}"
    return [
        chart(
            "Depth decided",
            "num_steps for batches up to the edge; the last slot has no end.",
            [desired],
            has_steps=True,
            span=12,
        ),
        chart(
            "Shadow against active",
            "What the second policy would have on the same evidence, beside what is "
            "decided. Without a [shadow] only the latter.",
            [desired, shadow],
            has_steps=True,
            span=12,
        ),
        chart(
            "Depth executed",
            f"Share of request-rounds. {IDLE}",
            [Query(executed, "num_steps {{num_steps}}")],
            unit="percentunit",
            is_stacked=True,
        ),
        chart(
            "Gain over plain decoding",
            "Estimated, in tokens/s, of the depths in force; 0 while costs are unknown.",
            [Query(or_zero(select("spec_controller_gain_over_plain_ratio")), "{{worker}}")],
            unit="percentunit",
            low=None,
        ),
        chart(
            "Gain of the shadow",
            "Estimated gain of following the shadow policy; 0 without one.",
            [Query(or_zero(select("spec_controller_shadow_gain_ratio")), "{{worker}} ≤{{batch_size_le}}")],
            unit="percentunit",
            low=None,
        ),
    ]


def _records():
    decisions = "spec_controller_decisions_total"
    return [
        chart(
            "Changes by reason",
            "Of the depth, by what the policy or guard said.",
            [
                Query(
                    or_zero(increase("spec_controller_depth_changes_total", "reason", "direction")),
                    "{{reason}} {{direction}}",
                )
            ],
            has_bars=True,
        ),
        chart(
            "Records by kind",
            "Everything that was recorded.",
            [Query(increase(decisions, "kind", "outcome"), "{{kind}} {{outcome}}")],
            has_bars=True,
        ),
        chart(
            "Held back by a guard",
            "Wishes of the policy that were refused, by the policy's reason.",
            [Query(or_zero(increase(decisions, "reason", outcome="held")), "{{reason}}")],
            has_bars=True,
        ),
        chart(
            "Changes at the worker",
            "Rounds asked for another depth than the round before, by what asked.",
            [Query(increase("spec_depth_changes_total", "reason"), "{{reason}}")],
            has_bars=True,
        ),
        chart(
            "Probes",
            f"Share of rounds spent on measuring other depths. {IDLE}",
            [
                Query(
                    ratio(rate("spec_probe_rounds_total", "worker"), rate("spec_rounds_total", "worker")),
                    "{{worker}}",
                )
            ],
            unit="percentunit",
        ),
        chart(
            "Plans not confirmed",
            "By the worker, per second, by reason.",
            [
                Query(
                    or_zero(rate("spec_controller_actuation_failures_total", "worker", "reason")),
                    "{{worker}} {{reason}}",
                )
            ],
        ),
    ]


def _controller():
    states = [
        Query(select(f"spec_controller_{name}"), f"{{{{worker}}}} {text}")
        for name, text in (("worker_pinned", "pinned"), ("worker_held", "held"), ("breaker_open", "breaker"))
    ]
    mode = Query(f"{select('spec_controller_mode')} == 1", "{{worker}} {{mode}}")
    return [
        chart("Mode", "The mode in force.", [mode], has_steps=True, high=1),
        chart("Pins, holds, breaker", "1 while it is so.", states, has_steps=True, high=1),
        chart(
            "Plan age",
            "Since the worker last heard of its plan, renewed every third of its time to live; 0 where none is sent.",
            [Query(or_zero(select("spec_plan_age_seconds")), "{{worker}}")],
            unit="s",
        ),
        chart(
            "Turns",
            "Per second, and those that failed.",
            [
                Query(rate("spec_controller_ticks_total", "worker"), "{{worker}}"),
                Query(or_zero(rate("spec_controller_tick_failures_total", "worker")), "{{worker}} failed"),
            ],
        ),
        chart(
            "Journal",
            "Size on disk, its write-ahead log included.",
            [Query("spec_controller_journal_bytes", "{{instance}}")],
            unit="bytes",
        ),
        chart(
            "Journal trouble",
            "Failed writes and entries given up, per second; entries that wait for the disk.",
            [
                Query("rate(spec_controller_journal_failures_total[$__rate_interval])", "failures/s"),
                Query("rate(spec_controller_journal_dropped_total[$__rate_interval])", "dropped/s"),
                Query("spec_controller_journal_waiting_entries", "waiting"),
            ],
        ),
    ]
