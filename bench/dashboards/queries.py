"""What the committed dashboards ask of Prometheus: every panel's and every annotation's query, variables filled in."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parents[2] / "configs/grafana/dashboards"


@dataclass(frozen=True)
class Asked:
    """One query of one panel."""

    dashboard: str
    panel: str
    expr: str
    legend: str
    is_instant: bool = False
    is_annotation: bool = False

    def filled(self, rate_interval: str, worker: str = ".*") -> str:
        """Return the query as Grafana would send it."""
        expr = self.expr.replace("$__rate_interval", rate_interval).replace("$worker", worker)
        if "$" in expr:
            raise ValueError(f"{self.dashboard} / {self.panel}: a variable is left in {expr}")
        return expr


def read(directory: Path = DIRECTORY) -> Iterator[Asked]:
    """Yield the queries of all dashboards, in order."""
    for path in sorted(directory.glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield Asked(
                    board["title"], panel["title"], target["expr"], target.get("legendFormat", ""),
                    is_instant=bool(target.get("instant")),
                )  # fmt: skip
        for mark in board["annotations"].get("list", ()):
            expr = mark["target"]["expr"]
            yield Asked(board["title"], mark["name"], expr, mark["titleFormat"], is_annotation=True)
