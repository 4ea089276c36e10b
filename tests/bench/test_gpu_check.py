"""`make gpu-check`: rehearsed on a CPU from end to end, and able to fail."""

import json

import pytest
import torch

from bench.gpu_check import __main__ as command
from worker.graphs.forward import GraphedForward
from worker.spec.draft import ChainDrafter

REHEARSAL = ["--device", "cpu"]


def test_the_rehearsal_goes_through_everything(capsys):
    assert command.main(REHEARSAL) == command.EXIT_OK
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["bench"], summary["device"], summary["failure"]) == (
        "gpu-check",
        "cpu (rehearsal)",
        None,
    )
    assert [(row["model"], row["drafter"]) for row in summary["rows"]] == [
        ("tiny", "eagle"),
        ("tiny", "model"),
    ]
    for row in summary["rows"]:
        assert row["graph_vs_eager"]["bitwise_equal"] == row["graph_vs_eager"]["shapes"] == row["graphs"]
        assert row["graph_vs_ragged"]["worst_difference"] < 1e-5
        assert row["graph_vs_ragged"]["same_drafts"] == 1
        assert row["fast_vs_slow"] == {"cells": 3 * 2}  # batches of 1, 2 and 3 at depths 1 and 3
        assert row["draft_kernels"]["graphs_fast"] < row["draft_kernels"]["graphs_slow"]
        assert row["draft_kernels"]["eager_fast"] < row["draft_kernels"]["eager_slow"]
        assert {(cell["batch_size"], cell["num_steps"]) for cell in row["rounds"]} == {
            (batch_size, num_steps) for batch_size in (1, 3) for num_steps in (0, 1, 3)
        }


def test_a_graph_whose_buffer_has_moved_fails(monkeypatch, capsys):
    write = GraphedForward._write_spans

    def moved(self, *args):
        self._spans = self._spans.clone()
        write(self, *args)

    monkeypatch.setattr(GraphedForward, "_write_spans", moved)
    assert command.main(REHEARSAL) == command.EXIT_FAILED
    out, error = capsys.readouterr()
    assert "replay and eager differ" in error
    assert "replay and eager differ" in json.loads(out.splitlines()[-1])["failure"]


def test_paths_that_differ_fail(monkeypatch, capsys):
    organize = ChainDrafter.organize

    def wrong(self, steps):
        tree = organize(self, steps)
        return tree._replace(draft_tokens=tree.draft_tokens.flip(1))

    monkeypatch.setattr(ChainDrafter, "organize", wrong)
    assert command.main(REHEARSAL) == command.EXIT_FAILED
    assert "fast and slow path draft otherwise" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys):
    assert command.main([]) == command.EXIT_NOT_CHECKED
    assert "Nothing was checked: torch" in capsys.readouterr().err
