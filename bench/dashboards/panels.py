"""The building blocks of all dashboards: panels of three sorts, variables, links. Knows the look and no metric.

Everything is laid out in rows of 24 columns by the order of the panels.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "slipstream"
HEIGHT = 8


@dataclass(frozen=True)
class Query:
    """One PromQL expression and what its series are called."""

    expr: str
    legend: str = ""


def chart(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str = "short",
    span: int = 8,
    is_stacked: bool = False,
    has_steps: bool = False,
    has_bars: bool = False,
    low: float | None = 0,
    high: float | None = None,
) -> timeseries.Panel:
    """Lines over time; `has_steps` for depths, which do not slope, `has_bars` for events."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .span(span)
        .height(HEIGHT)
        .line_width(1)
        .fill_opacity(70 if is_stacked or has_bars else 8)
        .show_points(common.VisibilityMode.NEVER)
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs([])
        )
    )
    if low is not None:
        panel = panel.min(low)
    if high is not None:
        panel = panel.max(high)
    if has_steps:
        panel = panel.line_interpolation(common.LineInterpolation.STEP_AFTER)
    if has_bars:
        panel = panel.draw_style(common.GraphDrawStyle.BARS)
    if is_stacked or has_bars:
        panel = panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    return panel.targets(_targets(queries))


def figure(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str = "short",
    decimals: int | None = None,
    span: int = 3,
    limits: Sequence[tuple[float | None, str]] = ((None, "green"),),
) -> stat.Panel:
    """One large number with a small line; `limits` are (from, colour), the first from None."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .span(span)
        .height(4)
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.VALUE)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .thresholds(
            builders.ThresholdsConfig()
            .mode(dashboard.ThresholdsMode.ABSOLUTE)
            .steps([dashboard.Threshold(value=value, color=color) for value, color in limits])
        )
    )
    if decimals is not None:
        panel = panel.decimals(decimals)
    return panel.targets(_targets([query]))


def listing(
    title: str, description: str, query: Query, *, hidden: Sequence[str], span: int = 24
) -> table.Panel:
    """A table of the labels of the series there are now."""
    hide = dict.fromkeys(("Time", "Value", "__name__", "job", *hidden), True)
    target = _target(query, "A").instant().format(PromQueryFormat.TABLE)
    return (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .span(span)
        .height(5)
        .with_transformation(
            dashboard.DataTransformerConfig(id_val="organize", options={"excludeByName": hide})
        )
        .targets([target])
    )


def board(uid: str, title: str, description: str) -> builders.Dashboard:
    """An empty dashboard with the variables and links that all of them share."""
    worker = (
        builders.QueryVariable("worker")
        .label("Worker")
        .description(
            "As configured in the controller; the scrape configuration gives workers the same label."
        )
        .datasource(SOURCE)
        .query("label_values(spec_controller_worker_up, worker)")
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(dashboard.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )
    source = builders.DatasourceVariable("datasource").label("Data source").type("prometheus")
    return (
        builders.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .editable()
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .variables([source, worker])
        .link(
            builders.DashboardLink("Slipstream")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )


def encode(made: dashboard.Dashboard, annotations: Sequence[dict[str, Any]] = ()) -> str:
    """Return the JSON as it is committed; the same input gives the same bytes.

    Args:
        made: the built dashboard.
        annotations: queries in Grafana's own form; the kit does not know Prometheus' fields.
    """
    text = json.dumps(made, cls=JSONEncoder)
    found = _without_null_options(json.loads(text))
    for number, panel in enumerate(found["panels"], start=1):
        panel["id"] = number
    for variable in found["templating"]["list"]:
        for key in ("auto", "auto_min", "auto_count"):  # of intervals only, by the schema
            variable.pop(key, None)
    if annotations:
        found["annotations"] = {"list": list(annotations)}
    return json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _without_null_options(value: Any) -> Any:
    # The kit writes `"options": null` for a panel without options, which Grafana's own schema refuses.
    if isinstance(value, dict):
        return {k: _without_null_options(v) for k, v in value.items() if not (k == "options" and v is None)}
    return [_without_null_options(item) for item in value] if isinstance(value, list) else value


def _target(query: Query, ref_id: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(query.expr).legend_format(query.legend or "__auto").ref_id(ref_id)


def _targets(queries: Sequence[Query]) -> list[Any]:
    return [_target(query, chr(ord("A") + index)).range() for index, query in enumerate(queries)]
