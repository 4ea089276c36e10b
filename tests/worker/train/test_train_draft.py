"""`spec-worker train-draft` on a tiny model: data, resuming, figures that serving confirms."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from worker.cli import main
from worker.config import WorkerConfig
from worker.model_runner import POST_NORM, ModelRunner
from worker.models.attention import Segment
from worker.models.config import RopeConfig, read_config
from worker.models.loader import load_decoder
from worker.record import record_file
from worker.tokenization import Tokenizer
from worker.train import produce as produce_module
from worker.train import texts as texts_module
from worker.train.data import DataError, read_shard, shard_path, shard_paths, write_shard
from worker.train.evaluate import evaluate
from worker.train.export import export_head
from worker.train.generate import Generator, Task
from worker.train.material import draft_vocabulary, epoch, make_batch, read_frozen
from worker.train.muon import orthogonalised
from worker.train.network import TrainedHead
from worker.train.objective import Objective
from worker.train.optimise import Progress, Recipe, initial_head, make_optimisers, optimise
from worker.train.prompts import KINDS, prompts
from worker.train.run import train_draft
from worker.train.texts import Job, feature_layers

TEXTS = Path(__file__).parents[3] / "bench" / "texts"
CPU = torch.device("cpu")
LAYERS = (3, 3, 6)  # of a model with 6 layers


@pytest.fixture
def target(tiny_model_dir):
    return tiny_model_dir(num_layers=6, dtype=torch.float32)


@pytest.fixture
def generator(target):
    decoder = load_decoder(target, dtype=torch.float32, device=CPU)
    return Generator(
        decoder, feature_layers=LAYERS, num_tokens=258, eos_token_ids=frozenset({257}), batch_size=3,
        max_text_tokens=100, seed=1,
    )  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """Shards of four short texts."""
    monkeypatch.setattr(produce_module, "TEXTS_PER_SHARD", 4)
    monkeypatch.setattr(produce_module, "MAX_ANSWER_TOKENS", 16)
    monkeypatch.setattr(texts_module, "BATCH_SIZE", 4)
    monkeypatch.setattr(texts_module, "EVALUATION_TOKENS", 24)


def test_greedy_texts_are_plain_decodings_and_features_are_the_runners(generator, target):
    tasks = [Task([(i * k) % 250 for i in range(1, 6 + k)], 0.0, 20 + k) for k in range(1, 8)]
    texts = list(generator.run(iter(tasks)))
    assert len(texts) == 7
    decoder = load_decoder(target, dtype=torch.float32, device=CPU)
    for text in texts:
        ids = text.token_ids.tolist()
        assert [ids[: text.prompt_length]] == [
            t.prompt_ids for t in tasks if t.prompt_ids == ids[: len(t.prompt_ids)]
        ]
        runner = ModelRunner(decoder, num_slots=1, max_tokens=100, num_tokens=258)
        runner.keep_features((3, 3, POST_NORM))
        runner.prefill(0, 0, ids[: text.prompt_length])
        for place in range(text.prompt_length, len(ids)):
            if place < len(ids) - 1:
                runner.decode(torch.tensor([ids[place]]), [Segment(0, place, 1)])
            assert int(text.top_ids[place - 1, 0]) == ids[place]
        stored = runner.features([Segment(0, 0, len(ids) - 1)])
        assert torch.allclose(text.features[:, :2].flatten(1).float(), stored[:, :64], atol=0.1, rtol=0.02)
    assert max(len(text.token_ids) - text.prompt_length for text in texts) == 27


def test_sampling_follows_the_distribution(generator):
    drawn = torch.cat(
        [generator._draw(torch.tensor([[0.0, 1.0, 2.0]] * 1000), [0.5] * 1000) for _ in range(20)]
    )
    expected = torch.tensor([0.0, 2.0, 4.0]).softmax(0)
    assert torch.allclose(torch.bincount(drawn, minlength=3) / len(drawn), expected, atol=0.01)


def test_a_file_is_read_as_it_is(generator):
    text = generator.read(list(range(40)))
    assert text.token_ids.tolist() == list(range(40))
    assert (text.prompt_length, text.features.shape[0], text.top_ids.shape[0]) == (0, 39, 39)


def test_shards_come_back_and_damage_is_named(generator, tmp_path):
    texts = list(generator.run(iter([Task([1, 2, 3], 1.0, 9), Task([4], 0.0, 5)])))
    write_shard(shard_path(tmp_path, 3), texts, {"target": "tiny"})
    (tmp_path / "shard-00004.partial").write_bytes(b"cut off")
    assert shard_paths(tmp_path) == [shard_path(tmp_path, 3)]
    again = read_shard(shard_path(tmp_path, 3), {"target": "tiny"})
    with pytest.raises(DataError, match="another"):
        read_shard(shard_path(tmp_path, 3), {"target": "another"})
    for ours, theirs in zip(again, texts, strict=True):
        assert ours.prompt_length == theirs.prompt_length
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert torch.equal(ours.features, theirs.features)
    shard_path(tmp_path, 3).write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"shard-00003.safetensors: no training shard"):
        read_shard(shard_path(tmp_path, 3))


def test_prompts_can_be_resumed_and_are_none_of_the_bench():
    made = list(itertools.islice(prompts(1), 400))
    assert list(itertools.islice(prompts(1, 100), 20)) == made[100:120]
    assert {prompt.kind for prompt in made} == set(KINDS)
    assert len({prompt.text for prompt in made}) > 380
    bench = {
        json.loads(line)["text"] for file in TEXTS.rglob("*.jsonl") for line in file.read_text().splitlines()
    }
    assert len(bench) > 80
    assert not bench & {prompt.text for prompt in made}


def test_the_draft_vocabulary_is_what_the_target_says_most(generator):
    texts = list(generator.run(iter([Task([7, 8, 9], 0.0, 40)])))
    mass = torch.zeros(258)
    for ids, log_probs in zip(texts[0].top_ids, texts[0].top_log_probs, strict=True):
        for token, log_prob in zip(ids.tolist(), log_probs.tolist(), strict=True):
            mass[token] += 2.718281828**log_prob
    vocabulary = draft_vocabulary(texts, 258, 40).tolist()
    assert vocabulary == sorted(set(vocabulary)) and len(vocabulary) == 40
    outside = [float(mass[token]) for token in range(258) if token not in vocabulary]
    assert min(float(mass[token]) for token in vocabulary) >= max(outside) - 1e-3
    assert len(draft_vocabulary(texts, 258, 10_000)) == 258


def test_an_epoch_has_every_text_once_and_batches_do_not_mix_their_ends(generator, target):
    frozen = read_frozen(target)
    tasks = [Task([(i + k) % 250 for i in range(4 + k)], 1.0, 30 - k) for k in range(9)]
    texts = list(generator.run(iter(tasks)))
    groups = list(epoch(texts, 80, random.Random(1)))
    assert sorted(id(text) for group in groups for text in group) == sorted(map(id, texts))
    assert all(len(g) == 1 or max(len(t.token_ids) for t in g) * len(g) <= 80 for g in groups)
    batch = make_batch(texts[:3], frozen, prompt_weight=0.5)
    for row, text in enumerate(texts[:3]):
        length = len(text.token_ids) - 2
        assert batch.weights[row, length:].sum() == 0
        assert batch.weights[row, : text.prompt_length - 2].tolist() == [0.5] * (text.prompt_length - 2)
        assert batch.next_tokens[row, :length].tolist() == text.token_ids[1:-1].tolist()
        assert torch.equal(batch.top_ids[row, :length], text.top_ids[1:].long())


def test_orthogonalised_has_singular_values_near_1():
    for shape in ((6, 20), (20, 6), (8, 8)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        values = torch.linalg.svdvals(orthogonalised(matrix))
        assert float(values.min()) > 0.5
        assert float(values.max()) < 1.3


def test_training_learns_and_serving_confirms_the_figures(generator, target, tmp_path):
    """The head gets better, and what the evaluation promises is what the engine's drafter gets right."""
    frozen = read_frozen(target)
    prompt_texts = [
        f"Say something about {word}." for word in ("bees", "tides", "chairs", "rain", "soup", "moss")
    ]
    tokenizer = Tokenizer.load(target)
    tasks = [
        Task(tokenizer.encode_chat([{"role": "user", "content": text}]), 0.0, 40) for text in prompt_texts
    ]
    texts = list(generator.run(iter(tasks)))
    vocabulary = torch.arange(258)
    objective = Objective(frozen, vocabulary, num_negatives=64, seed=0)
    head, recipe = initial_head(frozen, 3), Recipe(tokens_per_batch=300, first_share=0.5, feature_noise=0.01)
    before, losses, ticks = evaluate(head, objective, texts, frozen), [], itertools.count()
    optimise(
        head, objective, make_optimisers(head, recipe), texts, frozen, recipe, Progress(), seconds=60,
        report=losses.append, report_seconds=10, clock=lambda: float(next(ticks)),
    )  # fmt: skip
    assert losses[-1] < losses[0]
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.bfloat16())  # what the file holds
    figures = evaluate(head, objective, texts, frozen)
    assert figures.top1 > before.top1 + 0.2
    assert figures.survival == tuple(sorted(figures.survival, reverse=True))
    assert figures.accept_length(2) == pytest.approx(1 + sum(figures.survival[:2]))

    export_head(head, vocabulary, (3, 3, POST_NORM), tmp_path / "head", "card")
    config = WorkerConfig(
        model={"path": str(target), "dtype": "float32", "device": "cpu", "threads": 1},
        spec={
            "drafter": "eagle",
            "draft_model_path": str(tmp_path / "head"),
            "candidate_steps": [0, 5],
            "num_steps": 0,
        },
        engine={
            "max_context_tokens": 128,
            "prefill_chunk_tokens": 32,
            "profile_seconds": 0,
            "max_running_requests": 1,
        },
    )
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in prompt_texts))
    trace = record_file(config, file, max_tokens=40, temperature=0.0)
    served = [correct for stream in trace["streams"] for _, correct in stream]
    hits = sum(correct >= 1 for correct in served) / len(served)
    assert hits == pytest.approx(figures.top1, abs=0.06)


def test_a_job_goes_on_where_it_stopped(target, tmp_path, small):
    evaluation = tmp_path / "eval.jsonl"
    evaluation.write_text('{"text": "Tell me about bees."}\n')
    lines: list[str] = []
    job = Job(target, tmp_path / "job", [evaluation], data_seconds=0.5, train_seconds=0.5)
    assert train_draft(job, lines.append)["eval"].places > 0
    shards = len(shard_paths(tmp_path / "job" / "texts"))
    assert shards >= 1
    state = torch.load(tmp_path / "job" / "state.pt", weights_only=True)
    assert train_draft(job, lines.append)["eval"].places > 0
    assert len(shard_paths(tmp_path / "job" / "texts")) > shards
    again = torch.load(tmp_path / "job" / "state.pt", weights_only=True)
    assert again["progress"]["batches"] > state["progress"]["batches"] >= 1
    assert torch.equal(again["vocabulary"], state["vocabulary"])
    assert any(line.startswith("resumed after") for line in lines)
    assert sum(line.startswith("evaluation texts") for line in lines) == 1
    (tmp_path / "job" / "state.pt").write_bytes(b"cut off")
    with pytest.raises(DataError, match="state.pt: cannot be resumed"):
        train_draft(job, lines.append)
    card = (tmp_path / "job" / "head" / "README.md").read_text()
    assert "top-1" in card and "eval.jsonl" in card
    with pytest.raises(DataError, match="choose another directory"):
        read = read_shard(shard_path(tmp_path / "job" / "texts", 0))
        write_shard(shard_path(tmp_path / "job" / "texts", 0), read, {"target": "another"})
        train_draft(job, lines.append)


def test_the_command_says_what_is_wrong(target, tmp_path, tiny_model_dir, small, capsys):
    out = str(tmp_path / "out")
    assert main(["train-draft", "--model", str(target), "--out", out, "--minutes", "0"]) == 1
    assert "--minutes must be above 0" in capsys.readouterr().err
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n[1]\n')
    assert main(["train-draft", "--model", str(target), "--out", out, "--prompts", str(bad)]) == 1
    assert "bad.jsonl:2: must be a JSON object" in capsys.readouterr().err
    assert main(["train-draft", "--model", str(tiny_model_dir()), "--out", out, "--minutes", "0.01"]) == 1
    assert "num_hidden_layers 2" in capsys.readouterr().err
    assert (
        main(["train-draft", "--model", str(target), "--out", out, "--minutes", "0.02", "--threads", "1"])
        == 0
    )
    assert "head: " in capsys.readouterr().out


def test_features_are_taken_from_the_middle_the_late_and_the_last_layer(target):
    assert feature_layers(read_frozen(target).config) == LAYERS


def test_an_exported_head_turns_as_it_was_trained(target, tmp_path):
    llama3 = RopeConfig(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    for rope in (llama3, RopeConfig(10_000.0, "linear", 2.0), RopeConfig(10_000.0)):
        layer = replace(read_frozen(target).config, rope=rope)
        export_head(TrainedHead(layer, 3), torch.arange(8), LAYERS, tmp_path, "card")
        assert read_config(tmp_path).rope == rope
