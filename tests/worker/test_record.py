"""Recording: the trace says at every place and depth what a real round there would have got right."""

import json

import pytest

from worker.cli import main
from worker.record import outcomes


def test_outcomes_are_counted_against_the_text_itself():
    text = [9, 1, 2, 3, 4, 5]
    proposals = [[1, 2, 7], [2, 3], [], [4, 4, 4], [5]]
    assert outcomes(text, proposals, num_steps=3) == [[3, 2], [2, 2], [0, 0]]  # the last places are cut off


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_a_trace_predicts_real_rounds_at_every_depth(
    make_rig, tiny_model_dir, tmp_path, monkeypatch, drafter
):
    texts, out = tmp_path / "texts.jsonl", tmp_path / "trace.json"
    texts.write_text('{"text": "abc abc abc"}\n{"text": "to be or not to be"}\n')
    directory = tiny_model_dir()
    settings = {
        "MODEL__PATH": str(directory),
        "MODEL__DTYPE": "float64",
        "MODEL__THREADS": "1",
        "SPEC__DRAFTER": drafter,
        "ENGINE__MAX_CONTEXT_TOKENS": "256",
        "ENGINE__PROFILE_SECONDS": "0",
    }
    draft = {"noise": 0.1} if drafter == "model" else None
    if draft:
        settings["SPEC__DRAFT_MODEL_PATH"] = str(tiny_model_dir(**draft))
    for name, value in settings.items():
        monkeypatch.setenv(f"SPEC_WORKER_{name}", value)
    assert main(["record", "--texts", str(texts), "--out", str(out), "--max-tokens", "60"]) == 0
    trace = json.loads(out.read_text())
    assert (trace["num_steps"], len(trace["streams"])) == (7, 2)

    from worker.models.loader import load_tokenizer
    from worker.tokenization import Tokenizer

    tokenizer = Tokenizer(load_tokenizer(directory), frozenset())
    rig = make_rig(drafter=drafter, draft=draft)
    for text, places in zip(("abc abc abc", "to be or not to be"), trace["streams"], strict=True):
        assert drafter == "ngram" or any(correct for _, correct in places)
        for num_steps in (1, 3, 7):
            rig.set_depth(num_steps)
            stream = rig.submit(tokenizer.encode_chat([{"role": "user", "content": text}]), max_tokens=60)
            while not stream.tokens:
                rig.step()
            place = 0
            while place < len(places):
                spec = stream.request.spec
                before = spec.proposed_drafts, spec.correct_drafts
                rig.step()
                took = spec.proposed_drafts - before[0], spec.correct_drafts - before[1]
                proposed, correct = places[place]
                assert took == (min(proposed, num_steps), min(correct, num_steps))
                place += 1 + took[1]
            rig.thread.run_until_idle()


def test_bad_input_is_refused_by_name(tmp_path, capsys):
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"txt": "abc"}\n')
    assert main(["record", "--texts", str(texts), "--out", str(tmp_path / "o"), "--max-tokens", "0"]) == 2
    assert "--max-tokens" in capsys.readouterr().err


def test_a_prompt_that_fills_the_context_is_said_in_a_line(tmp_path, tiny_model_dir, capsys):
    config, texts = tmp_path / "worker.toml", tmp_path / "texts.jsonl"
    config.write_text(
        f'[model]\npath = "{tiny_model_dir()}"\ndevice = "cpu"\nthreads = 1\ndtype = "float32"\n'
        "[engine]\nmax_context_tokens = 40\nprofile_seconds = 0\n"
    )
    out = tmp_path / "trace.json"
    arguments = ["record", "--config", str(config), "--texts", str(texts), "--out", str(out)]
    texts.write_text('{"text": "abc"}\n')
    assert main([*arguments, "--max-tokens", "4000"]) == 0  # as much as the context has room for
    texts.write_text('{"text": "' + "abc " * 40 + '"}\n')
    assert main(arguments) == 1
    assert "at most 39 leave room" in capsys.readouterr().err
