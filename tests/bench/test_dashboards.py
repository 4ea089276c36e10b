"""Dashboards and alerts as committed: what the code writes, asking only for what is exported, alerts with runbooks."""

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `bench` is run from the checkout, not installed.

from bench.dashboards import faults, prometheus, queries  # noqa: E402
from bench.dashboards.__main__ import DIRECTORY, generated  # noqa: E402
from controller.metrics import ControllerMetrics  # noqa: E402

BOARDS = {path.name: json.loads(path.read_text()) for path in sorted(DIRECTORY.glob("*.json"))}
RULES = {
    path.name: [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
    for path in sorted((ROOT / "configs/prometheus/rules").glob("*.yml"))
}
ALERTS = RULES["alerts.yml"]
OF_PROMETHEUS = {"up", "ALERTS"}


@functools.cache
def exported() -> frozenset[str]:
    """Return every metric's name that docs/metrics.md lists (another test holds it against the programs)."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^\| `(spec_\w+)`", text, re.M))


def names_in(expr: str) -> set[str]:
    """Return the metrics that an expression asks for, without a histogram's suffix; recorded series are left out."""
    bare = re.sub(r'"[^"]*"', "", expr)
    found = set(re.findall(r"(?<![\w:])(spec_[a-z0-9_]+)(?![\w:])", bare))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


def test_the_committed_dashboards_are_what_the_code_writes() -> None:
    """`make dashboards` after a change."""
    made = generated()
    assert set(made) == set(BOARDS)
    for name, text in made.items():
        assert (DIRECTORY / name).read_text(encoding="utf-8") == text, f"{name}: run `make dashboards`"


@pytest.mark.parametrize("asked", list(queries.read()), ids=lambda asked: f"{asked.dashboard}-{asked.panel}")
def test_every_query_asks_for_what_is_exported(asked: queries.Asked) -> None:
    names = names_in(asked.expr)
    assert names - exported() == set()
    assert names or "ALERTS" in asked.expr
    assert "$" not in asked.filled("1m")


@pytest.mark.parametrize("asked", list(queries.read()), ids=lambda asked: f"{asked.dashboard}-{asked.panel}")
def test_no_gauge_is_taken_for_a_counter(asked: queries.Asked) -> None:
    for name in re.findall(r"(?:rate|increase)\((\w+)", asked.expr):
        assert name.endswith(("_total", "_bucket", "_sum", "_count"))


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_panels_are_complete(name: str) -> None:
    board = BOARDS[name]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    sources = re.findall(r'"uid": "([^"]+)"', json.dumps({**board, "uid": ""}))
    assert set(sources) == {"${datasource}"}, "a data source is hard-coded"
    for panel in board["panels"]:
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["description"], panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_the_decisions_are_marked_at_their_own_time() -> None:
    marks = BOARDS["slipstream-decisions.json"]["annotations"]["list"]
    assert {mark["name"] for mark in marks} >= {"Depth changes", "Operators", "Workers"}
    assert all(mark["useValueForTime"] and mark["target"]["expr"].endswith("* 1000") for mark in marks)


# ---- alerts ----


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_has_its_runbook(rule: dict) -> None:
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (path, anchor) == ("docs/operating.md", rule["alert"].lower())
    text = (ROOT / path).read_text(encoding="utf-8")
    found = re.search(rf"^#### {rule['alert']}\n\n(.+?)(?=\n#|\Z)", text, re.M | re.S)
    assert found, f"{path} has no paragraph on {rule['alert']}"
    assert len(found[1].split()) > 25, "a paragraph, not a word"
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_no_runbook_is_left_behind() -> None:
    text = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^#### (Spec\w+)", text, re.M)) == {rule["alert"] for rule in ALERTS}


@pytest.mark.parametrize("rule", [rule for rules in RULES.values() for rule in rules],
                         ids=lambda rule: rule.get("alert") or rule["record"])  # fmt: skip
def test_rules_ask_for_what_is_exported_or_recorded(rule: dict) -> None:
    assert names_in(rule["expr"]) - exported() == set()
    recorded = set(re.findall(r"worker(?:_\w+)?:spec_\w+:\w+", rule["expr"]))
    assert recorded <= {other["record"] for other in RULES["recording.yml"]}


def test_every_alert_is_tested_and_has_a_fault() -> None:
    cases = yaml.safe_load((ROOT / "configs/prometheus/tests/alerts.yml").read_text())["tests"]
    checks = [check for case in cases for check in case.get("alert_rule_test", ())]
    names = {rule["alert"] for rule in ALERTS}
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == names, "seen firing"
    assert {check["alertname"] for check in checks if not check["exp_alerts"]} == names, "seen not firing"
    planted = [name for alerts, _ in faults.Faults(None).steps() for name in alerts]  # type: ignore[arg-type]
    assert sorted(planted) == sorted(names)


def test_promtool_is_content() -> None:
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool is not installed (it comes with Prometheus)")
    rules = sorted(map(str, (ROOT / "configs/prometheus/rules").glob("*.yml")))
    for command in (["check", "rules", *rules], ["test", "rules", "configs/prometheus/tests/alerts.yml"]):
        result = subprocess.run([promtool, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stdout + result.stderr


def test_scaled_rules_keep_their_thresholds() -> None:
    text = "expr: sum(increase(x[10m])) > 200 and y > 1.5 * avg_over_time(z[6h] offset 15m)\nfor: 5m\n"
    scaled = "expr: sum(increase(x[30s])) > 10 and y > 1.5 * avg_over_time(z[1080s] offset 45s)\nfor: 15s\n"
    assert prometheus.scaled(text, 1 / 20) == scaled


def test_the_controllers_metrics_have_help_texts() -> None:
    registry = CollectorRegistry()
    ControllerMetrics(registry)
    assert all(metric.documentation.endswith(".") for metric in registry.collect())
