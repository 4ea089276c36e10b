"""PromQL as the panels need it: filtered by the dashboard's worker, and with zeros instead of gaps.

A ratio or a quantile of nothing is NaN, which Grafana shows as "No data". While nothing happens these are 0 instead,
and the panels' descriptions say so.
"""

WINDOW = "$__rate_interval"


def select(metric: str, **labels: str) -> str:
    """Return a selector; values that begin with `~` are regular expressions. Always the dashboard's workers."""
    found = {"worker": "~$worker", **labels}
    pairs = [f'{k}=~"{v[1:]}"' if v.startswith("~") else f'{k}="{v}"' for k, v in found.items()]
    return f"{metric}{{{', '.join(pairs)}}}"


def total(metric: str, *by: str, **labels: str) -> str:
    """Sum of a gauge."""
    return f"sum{_by(by)}({select(metric, **labels)})"


def rate(metric: str, *by: str, **labels: str) -> str:
    """Sum of a counter's rates per second."""
    return f"sum{_by(by)}(rate({select(metric, **labels)}[{WINDOW}]))"


def increase(metric: str, *by: str, **labels: str) -> str:
    """Sum of a counter's increases over a step of the panel."""
    return f"sum{_by(by)}(increase({select(metric, **labels)}[{WINDOW}]))"


def ratio(numerator: str, denominator: str) -> str:
    """Quotient of two sums; 0 where the denominator is."""
    return f"{numerator} / ({denominator} > 0) or 0 * {denominator}"


def quantile(q: float, metric: str, *by: str, **labels: str) -> str:
    """Quantile of a histogram; 0 where nothing was observed."""
    found = f"histogram_quantile({q}, {rate(f'{metric}_bucket', 'le', *by, **labels)})"
    return f"{found} >= 0 or 0 * {rate(f'{metric}_count', *by, **labels)}"


def mean(metric: str, *by: str, **labels: str) -> str:
    """Mean of a histogram; 0 where nothing was observed."""
    return ratio(rate(f"{metric}_sum", *by, **labels), rate(f"{metric}_count", *by, **labels))


def or_zero(query: str) -> str:
    """The query, or a single 0 while it has no series at all (nothing of the sort has happened yet)."""
    return f"{query} or on() vector(0)"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""
