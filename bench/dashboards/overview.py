"""Overview: is the fleet well, how fast is it, and what does speculation bring? The page for the first look."""

from grafana_foundation_sdk.builders import dashboard as builders

from bench.dashboards.panels import Query, board, chart, encode, figure, listing
from bench.dashboards.promql import increase, or_zero, quantile, rate, ratio, select, total

UID = "slipstream-overview"
IDLE = "0 while idle."


def build() -> str:
    """Return the dashboard's JSON."""
    made = board(UID, "Slipstream / Overview", "The fleet at a glance.")
    made = made.with_row(builders.Row("Now"))
    for panel in _figures():
        made = made.with_panel(panel)
    made = made.with_row(builders.Row("Speed and depth"))
    for panel in _speed():
        made = made.with_panel(panel)
    made = made.with_row(builders.Row("Load and trouble"))
    for panel in _trouble():
        made = made.with_panel(panel)
    return encode(made.build())


def _figures():
    accept_length = ratio(rate("spec_accept_tokens_total"), rate("spec_request_rounds_total"))
    stale = f"max({select('spec_controller_observation_age_seconds')})"
    alerts = or_zero('count(ALERTS{alertstate="firing", alertname=~"Spec.*"})')
    return [
        figure(
            "Workers up",
            "Workers that answer the controller.",
            Query(total("spec_controller_worker_up")),
            limits=((None, "red"), (1, "green")),
        ),
        figure(
            "Alerts firing",
            "Of the rules in configs/prometheus/rules.",
            Query(alerts),
            limits=((None, "green"), (1, "red")),
        ),
        figure("Tokens/s", "Tokens handed out.", Query(rate("spec_generated_tokens_total")), decimals=1),
        figure(
            "accept_length",
            f"Tokens per request and round, the target's own included: 1 is plain decoding. {IDLE}",
            Query(accept_length),
            decimals=2,
        ),
        figure(
            "Gain over plain",
            "Estimated by the controller: tokens/s of the depths in force against plain decoding "
            "(worst worker); 0 while costs are unknown.",
            Query(or_zero(f"min({select('spec_controller_gain_over_plain_ratio')})")),
            unit="percentunit",
            decimals=0,
            limits=((None, "red"), (-0.05, "green")),
        ),
        figure("Running", "Requests that hold a slot.", Query(total("spec_requests_running"))),
        figure(
            "Waiting",
            "Requests in the queues.",
            Query(total("spec_requests_waiting")),
            limits=((None, "green"), (1, "orange")),
        ),
        figure(
            "Oldest data",
            "Age of the controller's oldest reading of a worker.",
            Query(stale),
            unit="s",
            decimals=1,
            limits=((None, "green"), (5, "red")),
        ),
    ]


def _speed():
    first = ratio(
        rate("spec_decode_num_accepted_tokens_per_pos_total", "worker", position="0"),
        rate("spec_decode_reached_per_pos_total", "worker", position="0"),
    )
    length = ratio(rate("spec_accept_tokens_total", "worker"), rate("spec_request_rounds_total", "worker"))
    return [
        chart(
            "Tokens/s",
            "Handed out, by worker.",
            [Query(rate("spec_generated_tokens_total", "worker"), "{{worker}}")],
        ),
        chart(
            "Depth in force",
            "num_steps by batch size, as the worker would run it now.",
            [Query(select("spec_num_steps_in_force"), "{{worker}} ≤{{batch_size_le}}")],
            has_steps=True,
        ),
        chart("accept_length", f"Tokens per request and round. {IDLE}", [Query(length, "{{worker}}")]),
        chart(
            "First draft accepted",
            "P(first draft correct), of the rounds that could have one. " + IDLE,
            [Query(first, "{{worker}}")],
            unit="percentunit",
            high=1,
        ),
        chart(
            "Time to first token, p95",
            f"From arrival, queueing included. {IDLE}",
            [Query(quantile(0.95, "spec_time_to_first_token_seconds", "worker"), "{{worker}}")],
            unit="s",
        ),
        chart(
            "Inter-token time, p95",
            f"Per token after the first. {IDLE}",
            [Query(quantile(0.95, "spec_inter_token_seconds", "worker"), "{{worker}}")],
            unit="s",
        ),
    ]


def _trouble():
    used = f"1 - {total('spec_kv_tokens_free', 'worker')} / {total('spec_kv_tokens_capacity', 'worker')}"
    return [
        chart(
            "Requests",
            "Running and waiting.",
            [
                Query(total("spec_requests_running", "worker"), "{{worker}} running"),
                Query(total("spec_requests_waiting", "worker"), "{{worker}} waiting"),
            ],
        ),
        chart(
            "KV cache used", "Share of its tokens.", [Query(used, "{{worker}}")], unit="percentunit", high=1
        ),
        chart(
            "Requests ended",
            "By reason; `abort` is mostly clients that left.",
            [Query(increase("spec_requests_finished_total", "reason"), "{{reason}}")],
            has_bars=True,
        ),
        chart(
            "Fallbacks",
            "Rounds at depth 0 because the drafter failed, rounds off the topk=1 fast path, and rounds without a "
            "captured graph (on a CPU all).",
            [
                Query(rate("spec_draft_failures_total", "worker"), "{{worker}} draft failures/s"),
                Query(rate("spec_slow_path_rounds_total", "worker"), "{{worker}} slow path/s"),
                Query(rate("spec_eager_rounds_total", "worker"), "{{worker}} without a graph/s"),
            ],
        ),
        chart(
            "What decides the depth",
            "1 for the source in force: the controller's plan, an operator's pin, or the "
            "worker's own fallback.",
            [Query(select("spec_plan_source"), "{{worker}} {{source}}")],
            has_steps=True,
        ),
        chart(
            "Age of the data",
            "Of the controller's newest reading; above 5 s nothing is decided.",
            [Query(select("spec_controller_observation_age_seconds"), "{{worker}}")],
            unit="s",
        ),
        listing("Workers", "What each worker is.", Query(select("spec_worker_info")), hidden=()),
    ]
