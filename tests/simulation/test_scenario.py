"""Scenario files: what is refused, by which name; variants; the files that we ship."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from controller.simulate.scenario import Scenario, load_scenario
from controller.simulate.surface import Surface
from controller.simulate.work import phase_tokens

SHIPPED = sorted((Path(__file__).parents[2] / "bench/scenarios").glob("*/*.toml"))
MINIMAL = "[latency]\nhost_seconds = 0.01\n[[phases]]\ntokens = 100\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_shipped_scenarios_load(path: Path) -> None:
    for scenario in load_scenario(path).variants():
        surface = Surface(scenario.latency, scenario.directory)
        assert all(phase_tokens(phase, scenario, surface) > 50 for phase in scenario.phases)


def test_both_sets_are_there_and_share_nothing() -> None:
    tuning = {p.read_text(encoding="utf-8") for p in SHIPPED if p.parent.name == "tuning"}
    test = {p.read_text(encoding="utf-8") for p in SHIPPED if p.parent.name == "test"}
    assert len(tuning) >= 5 and len(test) >= 10 and not tuning & test


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("unknown = 1\n", "unknown"),
        ("candidate_steps = [1, 2]\n", "candidate_steps"),
        ("fallback_num_steps = 4\n", "fallback_num_steps"),
        ("lost_polls = 1.0\n", "lost_polls"),
        ("poll_interval_seconds = 0\n", "poll_interval_seconds"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path: Path, change: str, field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        load_scenario(write(tmp_path / "s.toml", change + MINIMAL))


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("tokens = 1\nseconds = 1.0", "not both"),
        ("", "phases.0"),
        ("tokens = 1\nbatch_size = { low = 4, high = 2 }", "low 4 is above high 2"),
        ("tokens = 1\nrequest_tokens = [9, 3]", "request_tokens"),
        ("tokens = 1\nacceptance = [1.5]", "acceptance"),
    ],
)
def test_bad_phases_are_refused(tmp_path: Path, phase: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        load_scenario(write(tmp_path / "s.toml", f"[latency]\n[[phases]]\n{phase}\n"))


def test_variants_fill_in_the_lengths(tmp_path: Path) -> None:
    text = (
        "phase_seconds = [3.0, 10.0]\n[latency]\nhost_seconds = 0.01\n[[phases]]\n[[phases]]\ntokens = 70\n"
    )
    short, long = load_scenario(write(tmp_path / "s.toml", text)).variants()
    assert (short.name, long.name) == ("s@3s", "s@10s")
    assert [p.seconds for p in short.phases] == [3.0, None]
    surface = Surface(long.latency, long.directory)
    assert phase_tokens(long.phases[0], long, surface) > 3 * phase_tokens(short.phases[0], short, surface)


def test_work_is_what_the_best_depth_brings() -> None:
    scenario = Scenario.model_validate(
        {
            "candidate_steps": [0, 1, 3],
            "latency": {"host_seconds": 0.01, "draft_step_seconds": 0.001},
            "phases": [{"seconds": 10.0, "acceptance": [0.5], "batch_size": 2}],
        }
    )
    # E(1) / t(1) = 1.5 / 0.011, E(3) / t(3) = 1.875 / 0.013: depth 3.
    tokens = phase_tokens(scenario.phases[0], scenario, Surface(scenario.latency, Path()))
    assert tokens == round(10 * 2 * 1.875 / 0.013)
