import dataclasses

from prometheus_client import CollectorRegistry, generate_latest

from controller.metrics import ControllerMetrics
from controller.shadow import Wished
from controller.types import Decision


def test_series_of_a_removed_worker_disappear() -> None:
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    for worker in ("a", "b"):
        metrics.ticked(worker, 0.01)
        metrics.tick_failed(worker)
        metrics.actuation_failed(worker, "unreachable")
        metrics.decided(
            Decision(worker=worker, kind="worker", reason="met", message="", outcome="noted", mode="active")
        )
        metrics.state(worker, is_up=True, is_pinned=False, mode="active", age_seconds=0.1, depths={1: 2})
    metrics.forget("a")
    text = generate_latest(registry).decode()
    assert 'worker="a"' not in text and text.count('worker="b"') > 10


def test_the_off_state_is_visible() -> None:
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    metrics.state("a", is_up=True, is_pinned=False, mode="active", age_seconds=None, depths={1: 0})
    labels = {"worker": "a", "batch_size_le": "1"}
    assert registry.get_sample_value("spec_controller_desired_num_steps", labels) == 0
    assert registry.get_sample_value("spec_controller_observation_age_seconds", {"worker": "a"}) is None


def test_a_shadow_that_is_gone_leaves_no_series() -> None:
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    wish = Wished(slot=1, num_steps_now=2, num_steps=3, gain=0.25)
    metrics.shadow("a", [wish])
    labels = {"worker": "a", "batch_size_le": "1"}
    assert registry.get_sample_value("spec_controller_shadow_num_steps", labels) == 3
    assert registry.get_sample_value("spec_controller_shadow_gain_ratio", labels) == 0.25
    metrics.shadow("a", [dataclasses.replace(wish, gain=None)])
    assert registry.get_sample_value("spec_controller_shadow_gain_ratio", labels) is None
    metrics.shadow("a", [])
    assert registry.get_sample_value("spec_controller_shadow_num_steps", labels) is None
