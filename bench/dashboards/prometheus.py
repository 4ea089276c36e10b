"""A Prometheus of our own: its configuration for two local programs, and its HTTP API. Loopback only."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

RULES = Path(__file__).resolve().parents[2] / "configs/prometheus/rules"
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
Labels = Mapping[str, str]
Points = list[tuple[float, float]]


def configuration(targets: Mapping[str, str], *, worker: str, interval: str = "1s") -> str:
    """Return a prometheus.yml (JSON is YAML) that scrapes `targets` (job -> HOST:PORT) with the rules beside it."""
    jobs = [
        {
            "job_name": job,
            "static_configs": [{"targets": [target], **({"labels": {"worker": worker}} if job == "worker" else {})}],
        }
        for job, target in targets.items()
    ]  # fmt: skip
    times = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    return json.dumps({"global": times, "rule_files": ["rules/*.yml"], "scrape_configs": jobs}, indent=1)


def scaled(rules: str, factor: float) -> str:
    """Return rules with every window, offset and `for`, and counts over a window, multiplied by `factor`.

    So that a fault is seen in seconds by the very expressions that are deployed. A window keeps at least 5 s.
    """

    def shorter(match: re.Match[str]) -> str:
        seconds = float(match[2]) * SECONDS[match[3]] * factor
        floor = 5.0 if match[1] == "[" else 0.0
        return f"{match[1]}{max(1, math.ceil(max(floor, seconds)))}s"

    def fewer(match: re.Match[str]) -> str:
        return f"{match[1]}{max(1, round(int(match[2]) * factor))}"

    rules = re.sub(r"(increase\(.+\]\)\) > )(\d+)", fewer, rules)
    return re.sub(r"(\[|offset |for: )(\d+)(ms|s|m|h|d)\b", shorter, rules)


def write(directory: Path, text: str, *, factor: float = 1.0) -> None:
    """Write prometheus.yml and the committed rules into a directory."""
    (directory / "rules").mkdir(parents=True)
    (directory / "prometheus.yml").write_text(text, encoding="utf-8")
    for path in RULES.glob("*.yml"):
        (directory / "rules" / path.name).write_text(scaled(path.read_text(), factor), encoding="utf-8")


class Prometheus:
    """Its HTTP API."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30.0, trust_env=False)

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def series(self, expr: str, start: float, end: float, step: float) -> list[tuple[Labels, Points]]:
        """Run a range query (Unix seconds)."""
        parameters = {"query": expr, "start": start, "end": end, "step": step}
        found = self._ask("/api/v1/query_range", parameters)["result"]
        return [(item["metric"], [(float(t), float(v)) for t, v in item["values"]]) for item in found]

    def now(self, expr: str) -> list[tuple[Labels, float]]:
        """Run an instant query."""
        found = self._ask("/api/v1/query", {"query": expr})["result"]
        return [(item["metric"], float(item["value"][1])) for item in found]

    def alerts(self) -> dict[str, str]:
        """Return each active alert's state, firing over pending."""
        states: dict[str, str] = {}
        for alert in self._ask("/api/v1/alerts", {})["alerts"]:
            name = alert["labels"]["alertname"]
            if states.get(name) != "firing":
                states[name] = alert["state"]
        return states

    def _ask(self, path: str, parameters: dict[str, Any]) -> Any:
        answer = self._http.post(path, data=parameters) if parameters else self._http.get(path)
        body = answer.json()
        if body["status"] != "success":
            raise ValueError(f"{body.get('error')}: {parameters.get('query')}")
        return body["data"]
