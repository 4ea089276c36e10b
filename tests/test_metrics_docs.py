"""docs/metrics.md lists every metric of both programs, with its type, labels and PromQL, and no other."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from controller.metrics import ControllerMetrics
from controller.shadow import Wished
from controller.types import Decision
from worker.api.served import ServedModel
from worker.build import build_engine
from worker.config import WorkerConfig
from worker.metrics import ServerMetrics, SpecCollector
from worker.protocol import PlanEntry, SpecPlan

TEXT = (Path(__file__).parents[1] / "docs/metrics.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(spec_\w+)`(?: \{([\w, ]+)\})? \| (\w+) \| ([^|]+) \|(?: (`[^`]+`) \|)?$", re.M)
DOCUMENTED = {name: (kind, labels, query or "") for name, labels, kind, _, query in ROW.findall(TEXT)}


def worker_metrics(tiny_model_dir: Callable[..., Path]) -> Iterable[Metric]:
    """All of a worker that has a plan."""
    config = WorkerConfig(
        model={"path": str(tiny_model_dir()), "dtype": "float64", "device": "cpu", "threads": 1},
        engine={"profile_seconds": 0, "max_context_tokens": 64},
    )
    engine = build_engine(config)
    entries = [PlanEntry(max_batch_size=8, num_steps=1)]
    engine.put_plan(
        SpecPlan(controller_epoch=1, version=1, boot_id=engine.info.boot_id, ttl_seconds=9.0, entries=entries)
    )
    registry = CollectorRegistry()
    registry.register(SpecCollector(ServedModel(engine, None)))  # type: ignore[arg-type]
    ServerMetrics(registry)
    return registry.collect()


def controller_metrics() -> Iterable[Metric]:
    """All of a controller, each with a series, so that its labels show."""
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    metrics.ticked("a", 0.1)
    metrics.tick_failed("a")
    metrics.actuation_failed("a", "refused")
    change: dict[str, Any] = {"num_steps_before": 1, "num_steps": 2, "max_batch_size": 1}
    metrics.decided(
        Decision(worker="a", kind="depth", reason="climb", message="", outcome="applied", mode="active", **change), 1.0
    )  # fmt: skip
    metrics.state("a", is_up=True, is_pinned=False, mode="active", age_seconds=0.1, depths={1: 2})
    metrics.gain("a", 0.1)
    metrics.shadow("a", [Wished(slot=1, num_steps_now=2, num_steps=3, gain=0.25)])
    return registry.collect()


@pytest.fixture(scope="module")
def exported(tiny_model_dir: Callable[..., Path]) -> dict[str, tuple[str, set[str]]]:
    """Name as PromQL has it -> (type, labels)."""
    found = {}
    for metric in (*worker_metrics(tiny_model_dir), *controller_metrics()):
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
        found[name] = metric.type, labels
    return found


def test_every_metric_is_documented_and_every_documented_one_exists(exported: dict[str, Any]) -> None:
    assert len(DOCUMENTED) == len(ROW.findall(TEXT)), "listed twice"
    assert set(exported) - set(DOCUMENTED) == set(), "not in docs/metrics.md"
    assert set(DOCUMENTED) - set(exported) == set(), "in docs/metrics.md, but not exported"
    listed = len(re.findall(r"^\| `spec_", TEXT, re.M))
    assert listed == len(DOCUMENTED), "a row that cannot be read"


def test_types_and_labels_are_as_documented(exported: dict[str, Any]) -> None:
    for name, (kind, labels, _) in DOCUMENTED.items():
        wanted = {label.strip() for label in labels.split(",")} if labels else set()
        assert exported[name] == (kind, wanted), name


def test_every_row_has_a_query_on_its_metric() -> None:
    for name, (kind, _, query) in DOCUMENTED.items():
        assert name in query, name
        if kind == "counter":
            assert "rate(" in query or "increase(" in query, name
        elif kind == "gauge":
            assert not re.search(rf"(rate|increase)\({name}", query), name


def test_names_follow_the_rules(exported: dict[str, Any]) -> None:
    for name, (kind, labels) in exported.items():
        assert name.startswith("spec_") and ":" not in name
        assert not name.endswith("_total") or kind == "counter"
        assert "seconds" not in name or re.search(r"_seconds(_total)?$", name), name
        assert labels <= {
            "num_steps", "batch_size_le", "position", "stage", "reason", "source", "worker", "kind", "outcome",
            "policy", "mode", "direction", "model", "drafter", "device", "dtype", "version",
        }, name  # fmt: skip


def test_promtool_finds_nothing_to_say(tiny_model_dir: Callable[..., Path]) -> None:
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool is not installed (it comes with Prometheus)")
    for metrics in (worker_metrics(tiny_model_dir), controller_metrics()):
        registry = CollectorRegistry()
        registry.register(_Found(list(metrics)))
        result = subprocess.run(
            [promtool, "check", "metrics"], input=generate_latest(registry), capture_output=True, timeout=60
        )
        assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


class _Found(Collector):
    """Metrics that were collected before."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
