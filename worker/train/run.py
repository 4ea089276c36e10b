"""`spec-worker train-draft`: texts, optimisation and export, resumable at every point.

Everything lies in one directory: `evaluation/` and `texts/` (shards), `files/` (pieces of the user's files),
`state.pt`, and the head itself. A later call goes on where an earlier one stopped. Knows nothing about serving.
"""

import pickle
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from worker.model_runner import POST_NORM
from worker.tokenization import Tokenizer
from worker.train.card import model_card
from worker.train.data import DataError, Text, read_shard, shard_paths
from worker.train.evaluate import Figures, evaluate
from worker.train.export import export_head
from worker.train.material import READ_FEATURES, Frozen, draft_vocabulary, read_frozen
from worker.train.network import TrainedHead
from worker.train.objective import Objective
from worker.train.optimise import Progress, initial_head, make_optimisers, optimise
from worker.train.texts import Job, Say, described_by, feature_layers, prepare_texts

SECONDS_BETWEEN_REPORTS = 300.0


def train_draft(job: Job, say: Say) -> dict[str, Figures]:
    """Do what is left of a job; return the figures of the exported head by evaluation file.

    Raises:
        ModelError: the target cannot be loaded.
        DataError: the directory holds the work of another job.
    """
    tokenizer = Tokenizer.load(job.target)
    frozen = read_frozen(job.target)
    held_out = prepare_texts(job, tokenizer, frozen.config, say)
    paths = [*shard_paths(job.directory / "texts"), *shard_paths(job.directory / "files")]
    described = described_by(job, frozen.config)
    texts = [text for path in paths for text in read_shard(path, described)]
    if not texts:
        raise DataError(f"{job.directory}: no training text yet; give more --minutes")
    say(f"{len(texts)} training texts, {sum(len(text.token_ids) for text in texts)} tokens")
    return _train(job, texts, held_out, frozen, say)


def _train(
    job: Job, texts: Sequence[Text], held_out: dict[str, list[Text]], frozen: Frozen, say: Say
) -> dict[str, Figures]:
    layers = feature_layers(frozen.config)
    head, progress = initial_head(frozen, READ_FEATURES), Progress()
    optimisers = make_optimisers(head, job.recipe)
    state_path = job.directory / "state.pt"
    vocabulary = draft_vocabulary(texts, frozen.config.vocab_size, job.draft_vocab_size)
    if state_path.exists():
        progress, vocabulary = _resume(state_path, head, optimisers)
        say(f"resumed after {progress.batches} batches")
    objective = Objective(frozen, vocabulary, num_negatives=job.recipe.num_negatives, seed=job.seed)

    def report(loss: float) -> None:
        say(f"epoch {progress.epochs}, {progress.rows} rows, {progress.seconds:.0f} s: loss {loss:.3f}")
        for name, part in held_out.items():
            say(f"  {name}: {evaluate(head, objective, part, frozen)}")
        state = {
            "head": head.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in optimisers],
            "progress": asdict(progress),
            "vocabulary": vocabulary,
        }
        torch.save(state, state_path.with_suffix(".partial"))
        state_path.with_suffix(".partial").replace(state_path)

    optimise(
        head, objective, optimisers, texts, frozen, job.recipe, progress,
        seconds=progress.seconds + job.train_seconds, report=report, report_seconds=SECONDS_BETWEEN_REPORTS,
    )  # fmt: skip
    figures = {name: evaluate(head, objective, part, frozen) for name, part in held_out.items()}
    card = model_card(job.target.name, texts, job.evaluation, figures, progress, job.recipe, len(vocabulary))
    read_by_head = (*layers[:-1], POST_NORM)
    export_head(head, vocabulary, read_by_head, job.directory / "head", card)
    say(f"head: {job.directory / 'head'}")
    return figures


def _resume(
    path: Path, head: TrainedHead, optimisers: Sequence[torch.optim.Optimizer]
) -> tuple[Progress, Tensor]:
    """Load the state of an earlier call into head and optimisers; return its progress and draft vocabulary."""
    try:
        state = torch.load(path, weights_only=True)
        head.load_state_dict(state["head"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        return Progress(**state["progress"]), state["vocabulary"]
    except (RuntimeError, KeyError, ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(
            f"{path}: cannot be resumed for this target ({error}); delete it or choose another directory"
        ) from error
