"""Some panels drawn from their own queries, for the README: by matplotlib, not by Grafana."""

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from bench.dashboards import queries
from bench.dashboards.prometheus import Prometheus

PANELS = (
    ("Slipstream / Overview", "Tokens/s"),
    ("Slipstream / Decisions", "Depth decided"),
    ("Slipstream / Acceptance", "Acceptance by position"),
    ("Slipstream / Acceptance", "Request-rounds by depth"),
    ("Slipstream / Latency", "Round, p95 by depth"),
    ("Slipstream / Acceptance", "accept_length by depth"),
)
COLORS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#c0d8ff")
STACKED = {"Request-rounds by depth"}
STEPS = {"Depth decided"}


def draw(prometheus: Prometheus, start: float, end: float, png: Path) -> None:
    """Draw `PANELS` over a stretch of time (Unix seconds) into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import dates, pyplot

    pyplot.style.use("dark_background")
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 5.6), dpi=80, layout="constrained")
    figure.patch.set_facecolor("#111217")
    by_panel = {(item.dashboard, item.panel): item for item in queries.read() if not item.is_annotation}
    for place, axis in zip(PANELS, axes.flat, strict=True):
        asked = by_panel[place]
        found = prometheus.series(asked.filled("10s"), start, end, 1.0)
        found = [(labels, points) for labels, points in found if any(value for _, value in points)]
        _lines(axis, asked, found)
        axis.set_title(place[1], fontsize=10, loc="left", color="#ccccdc")
        axis.set_facecolor("#181b1f")
        axis.grid(color="#2c3235", linewidth=0.5)
        axis.tick_params(labelsize=7, colors="#8e8e9e", length=0)
        axis.set_ylim(0, 1.2 * axis.get_ylim()[1])  # room for the legend
        axis.set_xlim(datetime.fromtimestamp(start), datetime.fromtimestamp(end))
        axis.xaxis.set_major_formatter(dates.DateFormatter("%H:%M:%S"))
        axis.xaxis.set_major_locator(dates.AutoDateLocator(maxticks=5))
        for spine in axis.spines.values():
            spine.set_visible(False)
        if found:
            axis.legend(
                fontsize=7, ncols=3, loc="upper left", frameon=False, labelcolor="#ccccdc", handlelength=1
            )
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png)
    print(f"drew {png}")


def _lines(axis, asked, found) -> None:
    if asked.panel in STACKED:
        times = sorted({time for _, points in found for time, _ in points})
        heights = [[dict(points).get(time, 0.0) for time in times] for _, points in found]
        names = [named(asked.legend, labels) for labels, _ in found]
        axis.stackplot(
            [datetime.fromtimestamp(t) for t in times], heights, labels=names, colors=COLORS, alpha=0.7
        )
        return
    for index, (labels, points) in enumerate(found):
        times = [datetime.fromtimestamp(time) for time, _ in points]
        values = [value for _, value in points]
        style = "steps-post" if asked.panel in STEPS else "default"
        color = COLORS[index % len(COLORS)]
        axis.plot(
            times, values, label=named(asked.legend, labels), linewidth=1.2, drawstyle=style, color=color
        )


def named(legend: str, labels: Mapping[str, str]) -> str:
    """Return a series' name as Grafana would fill it in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)
