"""The simulator itself: same work, same texts, exact counts, determinism; rivals and scores by their definition."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from controller.simulate.contenders import configured, play, play_oracle
from controller.simulate.recorded import Place, RecordedStream, load_streams
from controller.simulate.rivals import EmaSlot
from controller.simulate.rules import FixedDepth
from controller.simulate.run import simulate
from controller.simulate.scenario import Scenario
from controller.simulate.score import interval, score, t_quantile
from controller.simulate.surface import Surface
from controller.simulate.worker import SimulatedWorker


def scenario(**changes: Any) -> Scenario:
    values: dict[str, Any] = {
        "name": "s",
        "candidate_steps": [0, 1, 3],
        "latency": {"host_seconds": 0.002, "weights_seconds": 0.01, "draft_step_seconds": 0.001},
        "profile": {},
        "phases": [
            {"tokens": 2000, "acceptance": [0.9], "batch_size": 2},
            {"tokens": 2000, "acceptance": [0.2], "batch_size": 2},
        ],
    }
    return Scenario.model_validate(values | changes)


def test_equal_arguments_give_equal_runs() -> None:
    one, other = (play("goodput", scenario(), [3])[0] for _ in range(2))
    assert one == other
    assert one.phase_seconds != play("goodput", scenario(), [4])[0].phase_seconds


def test_every_policy_does_the_same_work() -> None:
    for name in ("fixed:0", "fixed:3", "goodput", "threshold", "sglang_ema", "sglang_throughput"):
        run = play(name, scenario(), [0])[0]
        for phase in (0, 1):
            tokens = sum(s.tokens for s in run.stretches if s.phase == phase)
            assert 2000 <= tokens < 2000 + 2 * 4, name


def test_the_mean_goodput_is_the_formulas() -> None:
    # Depth 3 at acceptance 0.9: E = 1 + .9 + .81 + .729 = 3.439 tokens in 15 ms for each of 2 requests.
    run = play("fixed:3", scenario(phases=[{"tokens": 40_000, "acceptance": [0.9], "batch_size": 2}]), [0])[0]
    assert 40_000 / run.seconds == pytest.approx(2 * 3.439 / 0.015, rel=0.01)


def test_counters_are_consistent() -> None:
    phase = {
        "tokens": 3000, "acceptance": [0.8], "batch_size": 3, "propose": 0.7, "request_tokens": [3, 20],
        "prefill_seconds": 0.01,
    }  # fmt: skip
    for ends in ("eos", "length"):
        s = scenario(phases=[phase | {"ends": ends}])
        worker = SimulatedWorker(s, Surface(s.latency, s.directory), "x", FixedDepth(3))
        worker.begin(s.phases[0], 0, 3000)
        while not worker.is_done:
            _, counted = worker.play()
            worker.count(counted)
        (bucket,) = worker.stats(worker.now).buckets
        assert bucket.num_steps == 3 and bucket.max_batch_size == 4
        for correct, reached in zip(bucket.correct, bucket.reached, strict=True):
            assert 0 < correct <= reached <= bucket.request_rounds
        assert bucket.proposed == sorted(bucket.proposed, reverse=True)
        assert bucket.reached[1] <= bucket.correct[0], "a position is reached only past a correct one"
        assert bucket.verify_rows == bucket.request_rounds + sum(bucket.proposed)
        assert (bucket.accept_tokens > bucket.emitted_tokens) == (ends == "eos"), (
            "lengths are known beforehand"
        )
        assert 0 < bucket.prefill_rounds < bucket.rounds
        stats = worker.stats(worker.now)
        assert stats.generated_tokens == bucket.emitted_tokens + stats.first_tokens


def test_a_lost_controller_leaves_the_worker_at_its_own_depth() -> None:
    run = simulate(scenario(lost_polls=0.999999), 0, config=configured("goodput", scenario(), None))
    assert {s.num_steps for s in run.stretches} == {1}


def test_idle_time_is_no_busy_time() -> None:
    s = scenario(phases=[{"tokens": 500}, {"tokens": 500, "idle_seconds": 30.0}])
    run = play("fixed:1", s, [0])[0]
    assert run.phase_started[1] - run.phase_started[0] > 30 and run.seconds < 20


def test_probes_run_and_are_counted() -> None:
    s = scenario(
        phases=[{"tokens": 30_000, "acceptance": [0.05], "batch_size": 4}],
        latency={"weights_seconds": 0.01, "draft_step_seconds": 0.006},
    )
    run = play("goodput", s, [0])[0]
    assert {stretch.num_steps for stretch in run.stretches[-5:] if not stretch.is_probe} == {0}
    assert 0 < run.probe_seconds / run.seconds < 0.015


# ---- recorded texts ----


def test_recorded_places_answer_for_every_depth() -> None:
    # A text whose drafts are right for 3 places from place 0 on, then none is proposed.
    places = [Place(4, 3), Place(4, 2), Place(4, 1), Place(4, 0), Place(0, 0)]
    stream = RecordedStream(places, random.Random(0))
    stream._place = 0
    assert stream.next_round(2) == (2, 2)  # 0, 1 correct, 2 the target's own
    assert stream.next_round(4) == (4, 0)  # place 3
    assert stream.next_round(4) == (0, 0)  # place 4
    assert stream.next_round(4) == (4, 3), "from the beginning again"


def test_a_bad_trace_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"num_steps": 3, "streams": [[[3, 3], [3, 4]]]}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"streams\[0\]\[1\]"):
        load_streams(path)


def test_a_scenario_of_recorded_rows(tmp_path: Path) -> None:
    places = [[3, 3], [3, 2], [3, 1], [3, 0]] * 50
    (tmp_path / "t.json").write_text(json.dumps({"num_steps": 3, "streams": [places]}), encoding="utf-8")
    s = scenario(phases=[{"tokens": 400, "recorded": "t.json"}]).model_copy(update={"directory": tmp_path})
    full = play("fixed:3", s, [0])[0]
    assert 400 / full.rounds == pytest.approx(4.0, rel=0.05)
    assert 400 / play("fixed:1", s, [0])[0].rounds == pytest.approx(2.0, rel=0.05)


# ---- rivals ----


@pytest.mark.parametrize(
    ("candidates", "current", "correct", "expected"),
    [
        ((1, 3, 7), 3, 0.25, 1),
        ((1, 3, 7), 3, 0.26, 3),
        ((1, 3, 7), 3, 2.5, 3),
        ((1, 3, 7), 3, 2.51, 7),
        ((1, 3, 7), 7, 2.25, 3),
        ((1, 3, 7), 7, 2.26, 7),
        ((1, 3, 7), 7, 0.2, 1),
        ((0, 1, 3), 0, 0.0, 1),
    ],
)
def test_the_ema_rule(candidates: tuple[int, ...], current: int, correct: float, expected: int) -> None:
    slot = EmaSlot(candidates, 0.0, -0.25, current)
    slot._ema = correct
    slot._settle()
    assert slot.current == expected


# ---- scores ----


def test_fixed_depths_score_what_they_should() -> None:
    s = scenario()
    oracle = play_oracle(s, range(3))
    assert list(oracle.best) == [3, 1]
    best_single = score(s, oracle, play(f"fixed:{oracle.best_single}", s, range(3)))
    assert 60 < best_single["oracle_pct"] < 99  # type: ignore[operator]
    goodput = score(s, oracle, play("goodput", s, range(3)))
    assert goodput["oracle_pct"] > best_single["oracle_pct"]  # type: ignore[operator]
    assert set(goodput) >= {
        "oracle_pct", "oracle_pct_ci", "worst_phase_pct", "changes_per_1000", "probe_pct", "adapt_seconds",
    }  # fmt: skip


def test_intervals_are_students() -> None:
    assert t_quantile(0.95, 9) == pytest.approx(2.262, rel=0.01)
    low, high = interval([1.0, 2.0, 3.0, 4.0])
    assert (low + high) / 2 == pytest.approx(2.5) and high - low == pytest.approx(
        2 * 3.182 * 1.291 / 2, rel=0.02
    )


# ---- command line ----


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        "candidate_steps = [0, 2]\n[latency]\nhost_seconds = 0.01\n[[phases]]\ntokens = 300\n",
        encoding="utf-8",
    )
    status = main(
        [
            "simulate",
            "--scenario",
            str(path),
            "--policy",
            "goodput",
            "--policy",
            "fixed:2",
            "--seeds",
            "2",
            "--json",
        ]
    )
    report = json.loads(capsys.readouterr().out)
    assert status == 0 and report["seeds"] == 2
    figures = report["scenarios"]["s"]
    assert set(figures["policies"]) == {"goodput", "fixed:2"}
    assert figures["best_fixed_depth"][0]["num_steps"] == 2


@pytest.mark.parametrize(
    ("text", "policy", "words"),
    [
        ("nonsense = 1\n[latency]\n[[phases]]\ntokens = 1\n", "goodput", "nonsense"),
        ("[latency]\nhost_seconds = 0.01\n[[phases]]\ntokens = 9\n", "fixed:9", "fixed:9"),
        ("[latency]\nhost_seconds = 0.01\n[[phases]]\ntokens = 9\n", "best", "best"),
        ("not toml", "goodput", "s.toml"),
    ],
)
def test_bad_input_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, policy: str, words: str
) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text, encoding="utf-8")
    assert main(["simulate", "--scenario", str(path), "--policy", policy, "--seeds", "1"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "not toml", "[loop]\npoll_interval_seconds = 0\n"])
def test_a_bad_configuration_is_named_by_its_own_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    scenario, config = tmp_path / "s.toml", tmp_path / "c.toml"
    scenario.write_text("[latency]\nhost_seconds = 0.01\n[[phases]]\ntokens = 9\n", encoding="utf-8")
    if text is not None:
        config.write_text(text, encoding="utf-8")
    assert main(["simulate", "--scenario", str(scenario), "--config", str(config), "--seeds", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{config}: ") and str(scenario) not in said


def test_what_a_probe_found_is_looked_at_before_the_interval_is_over() -> None:
    # Plain decoding at first, so that only probes can show that the text has become easy.
    slow = scenario(
        poll_interval_seconds=1.0,
        latency={"host_seconds": 0.001, "weights_seconds": 0.01, "draft_step_seconds": 0.006},
        phases=[
            {"tokens": 3000, "acceptance": [0.1], "batch_size": 2},
            {"tokens": 6000, "acceptance": [0.95], "batch_size": 2},
        ],
    )
    run = play("goodput", slow, [0])[0]
    ended = [(time, reason) for time, reason in run.reasons if "probe_failed" in reason]
    asked = [time for time, reason in run.reasons if " probe " in reason]
    assert ended
    assert all(min(time - at for at in asked if at < time) < 0.6 for time, _ in ended)
