"""The start-up profile: every cell measured, kept, and nothing left in the caches."""

import json
import math
import random
import statistics

import pytest

from worker.kv_cache import TOKEN_ALIGNMENT
from worker.profile import PRECISE, Profiler, error
from worker.protocol import LatencyProfile


@pytest.mark.parametrize(
    ("drafter", "draft", "topk"),
    [("model", {"noise": 0.1}, 1), ("model", {"noise": 0.1}, 2), ("ngram", None, 1)],
)
def test_every_cell_is_measured_and_kept(make_rig, tmp_path, drafter, draft, topk):
    engine = {"profile_seconds": 0.01, "profile_dir": str(tmp_path), "max_running_requests": 3}
    rig = make_rig(drafter=drafter, draft=draft, spec={"topk": topk}, engine=engine)
    profile = rig.thread.info.profile
    assert {(c.batch_size, c.num_steps) for c in profile.cells} == {
        (bs, k) for bs in (1, 2, 3) for k in (0, 1, 2, 3, 5, 7)
    }
    assert all(c.round_seconds > 0 and c.samples >= 2 for c in profile.cells)
    assert profile.error > 0
    assert all((c.draft_seconds > 0.5 * c.round_seconds) <= (drafter == "model") for c in profile.cells)
    rig.assert_idle_and_clean()
    (file,) = tmp_path.iterdir()
    assert LatencyProfile.model_validate_json(file.read_text()) == profile
    rig.set_depth(3)
    plain = make_rig(drafter="none", spec={"candidate_steps": [0]}).generate([1, 2, 3]).tokens
    assert rig.generate([1, 2, 3]).tokens == plain
    # The next start reads it …
    changed = json.loads(file.read_text())
    changed["cells"][0]["samples"] = 4242
    file.write_text(json.dumps(changed))
    assert (
        make_rig(drafter=drafter, draft=draft, spec={"topk": topk}, engine=engine)
        .thread.info.profile.cells[0]
        .samples
        == 4242
    )
    # … and measures anew what it cannot read, or what was measured under other conditions.
    file.write_text("{")
    assert (
        make_rig(drafter=drafter, draft=draft, spec={"topk": topk}, engine=engine)
        .thread.info.profile.cells[0]
        .samples
        < 4242
    )
    make_rig(drafter=drafter, draft=draft, spec={"topk": topk}, engine={**engine, "max_running_requests": 2})
    assert len(list(tmp_path.iterdir())) == 2


def test_another_version_of_the_code_measures_anew(make_rig, tmp_path, monkeypatch):
    engine = {"profile_seconds": 0.01, "profile_dir": str(tmp_path), "max_running_requests": 1}
    make_rig(engine=engine)
    make_rig(engine=engine)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr("worker.build.sources_digest", lambda: "another")
    make_rig(engine=engine)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_read_only_directory_is_no_reason_not_to_start(make_rig, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    rig = make_rig(
        engine={"profile_seconds": 0.01, "profile_dir": str(blocked / "x"), "max_running_requests": 1}
    )
    assert rig.thread.info.profile.cells


def test_no_round_of_it_lies_on_both_sides_of_an_attention_length(make_rig, tmp_path):
    """Such a round costs a kernel call more per layer; most rounds in service do not."""
    engine = {"profile_seconds": 0.01, "profile_dir": str(tmp_path), "max_running_requests": 1}
    rig = make_rig(engine={**engine, "max_context_tokens": 320})
    first = rig.thread.info.profile.context_tokens - 1
    assert first // TOKEN_ALIGNMENT == (first + rig.thread.info.candidate_steps[-1]) // TOKEN_ALIGNMENT == 3


def test_it_can_be_left_out(make_rig):
    assert make_rig().thread.info.profile is None


@pytest.mark.parametrize("drafter", ["eagle", "ngram+eagle"])
def test_a_head_is_measured_as_it_runs_in_service(make_rig, tmp_path, drafter):
    """Every round gives it one more token to store; a head with nothing to store cannot draft."""
    engine = {"profile_seconds": 0.01, "profile_dir": str(tmp_path), "max_running_requests": 2}
    rig = make_rig(drafter=drafter, engine=engine, spec={"candidate_steps": [0, 1, 3]})
    assert {(c.batch_size, c.num_steps) for c in rig.thread.info.profile.cells} == {
        (bs, k) for bs in (1, 2) for k in (0, 1, 3)
    }
    rig.assert_idle_and_clean()


@pytest.mark.parametrize("visits", [2, 3, 7])
def test_its_error_is_what_medians_scatter_by(visits):
    """Many profiles of one machine: told and true spread of the cells' medians. A median of two is a mean."""
    rng = random.Random(5)
    told, medians = [], []
    for _ in range(300):
        samples = {
            (1, k): [(0.0, 0.02 * rng.lognormvariate(0, 0.15)) for _ in range(visits)] for k in range(24)
        }
        told.append(error(samples))
        medians += [math.log(statistics.median(v for _, v in times) / 0.02) for times in samples.values()]
    assert statistics.fmean(told) == pytest.approx(statistics.stdev(medians), rel=0.15 if visits > 2 else 0.3)


@pytest.mark.parametrize(("noise", "stops_by_itself"), [(0.03, True), (0.3, False)])
def test_it_ends_when_precise_or_out_of_time(make_rig, monkeypatch, noise, stops_by_itself):
    """On a virtual clock that every round moves on by its seconds."""
    engine, rng, now = make_rig().engine, random.Random(3), [0.0]

    def round_(self, requests, num_steps):
        seconds = 0.02 * len(requests) * rng.lognormvariate(0, noise)
        now[0] += seconds
        return 0.0, seconds

    monkeypatch.setattr(Profiler, "_round", round_)
    profiler = Profiler(engine._runner, None, engine._states, context_tokens=16, clock=lambda: now[0])
    profile = profiler.measure([1, 2], 5.0)
    assert (now[0] < 5.0) == stops_by_itself
    assert (profile.error <= PRECISE) == stops_by_itself
    assert now[0] < 5.6, "a visit of all cells more at most"
