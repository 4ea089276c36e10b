"""`make bench-fast-path`: the command, its table and its last line, on tiny models."""

import importlib.util
import json
from pathlib import Path

import pytest

from bench import fast_path


@pytest.fixture
def head(tiny_model_dir, tmp_path):
    """A tiny target and a head for it (the writer is the worker tests')."""
    writer_path = Path(__file__).parents[1] / "worker" / "eagle_writer.py"
    spec = importlib.util.spec_from_file_location("eagle_writer", writer_path)
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    target = tiny_model_dir()
    return target, writer.write_head(target, tmp_path, "own")


ARGUMENTS = ["--dtype", "float64", "--seconds-per-cell", "0", "--batch-sizes", "1", "3", "--depths", "1", "3"]


def test_the_last_line_is_the_summary(head, capsys):
    target, path = head
    assert fast_path.main(["--model", str(target), "--head", str(path), *ARGUMENTS]) == 0
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    assert summary["bench"] == "fast-path"
    assert [(row["batch_size"], row["num_steps"]) for row in summary["rows"]] == [
        (1, 1),
        (1, 3),
        (3, 1),
        (3, 3),
    ]
    assert len(lines) == 6
    assert summary["organise_speedup_min"] == pytest.approx(
        min(row["organise_speedup"] for row in summary["rows"]), abs=0.01
    )


def test_without_a_head_random_weights_draft(tiny_model_dir, capsys):
    assert fast_path.main(["--model", str(tiny_model_dir()), *ARGUMENTS]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["organise_speedup_min"] > 0


def test_paths_that_differ_fail_the_bench(head, monkeypatch):
    target, path = head
    organize = fast_path.EagleDrafter.organize

    def wrong(self, steps):
        tree = organize(self, steps)
        return tree._replace(draft_tokens=tree.draft_tokens + 1)

    monkeypatch.setattr(fast_path.EagleDrafter, "organize", wrong)
    with pytest.raises(RuntimeError, match="draft_tokens differs"):
        fast_path.main(["--model", str(target), "--head", str(path), *ARGUMENTS])
