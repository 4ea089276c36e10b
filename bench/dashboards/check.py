"""Every panel's query against a real Prometheus that scraped a real run: fresh, busy and idle. No "No data" in any.

Prints one line per state and every query that has no series, or a value that is not finite.
"""

import asyncio
import math
import time
from pathlib import Path

from bench.dashboards import picture, queries
from bench.dashboards.live import Stack, send
from bench.dashboards.prometheus import Prometheus
from bench.demo.phases import schedule

RATE_INTERVAL_SECONDS = 15
"""Longer than four scrapes, as Grafana takes it; a state must last longer than this to be seen alone."""


def run(seconds: float, png: Path | None = None) -> bool:
    """Check all dashboards on a run with `seconds` of traffic; return whether everything had data."""
    asked = list(queries.read())
    with Stack() as stack:
        stack.start()
        print(f"{len(asked)} queries of {len({item.dashboard for item in asked})} dashboards")
        time.sleep(RATE_INTERVAL_SECONDS + 5)
        holds = report("fresh", stack.prometheus, asked, 5)
        began = time.time()
        for phase in schedule(seconds):
            asyncio.run(send(stack.worker, phase))
        holds = report("busy", stack.prometheus, asked, seconds - RATE_INTERVAL_SECONDS) and holds
        if png is not None:
            picture.draw(stack.prometheus, began, time.time(), png)
        time.sleep(RATE_INTERVAL_SECONDS + 10)
        holds = report("idle", stack.prometheus, asked, 5) and holds
    print("Every query has finite series, fresh, busy and idle." if holds else "FAILED: see above")
    return holds


def report(state: str, prometheus: Prometheus, asked: list[queries.Asked], seconds: float) -> bool:
    """Run all queries over the last `seconds`; print what is wrong, return whether nothing is."""
    end = time.time()
    wrong, series, marks = 0, 0, set()
    for item in asked:
        expr = item.filled(f"{RATE_INTERVAL_SECONDS}s")
        found = prometheus.series(expr, end - seconds, end, max(1.0, round(seconds / 60)))
        values = [value for _, points in found for _, value in points]
        series += len(found)
        marks |= set(values) if item.is_annotation else set()
        problem = problem_of(item, values, end)
        if problem:
            wrong += 1
            print(f"  {state}: {item.dashboard} / {item.panel}: {problem}: {expr}")
    print(f"{state}: {len(asked)} queries, {series} series, {len(marks)} marks, {wrong} wrong")
    return wrong == 0


def problem_of(item: queries.Asked, values: list[float], now: float) -> str | None:
    """Return what Grafana could not show, None where all is well."""
    # Marks are where something happened; that the worker was met is the one thing that always has.
    if not values and (not item.is_annotation or item.panel == "Workers"):
        return "no series"
    if not all(map(math.isfinite, values)):
        return "a value that is not finite"
    if item.is_annotation and not all(0 < now - value / 1000 < 86400 for value in values):
        return "a mark that is not of today"
    return None
