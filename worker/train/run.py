"""`spec-worker train-draft`: evaluation texts, training texts, optimisation and export, resumable at every point.

Everything lies in one directory: `evaluation/` and `texts/` (shards), `files/` (pieces of the user's files),
`state.pt`, and the head itself. A later call goes on where an earlier one stopped. Knows nothing about serving.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from worker.model_runner import POST_NORM
from worker.models.config import DecoderConfig, ModelError
from worker.models.loader import load_decoder
from worker.tokenization import Tokenizer
from worker.train.card import model_card
from worker.train.data import DataError, Text, read_shard, shard_paths, write_shard
from worker.train.evaluate import Figures, evaluate
from worker.train.export import export_head
from worker.train.generate import Generator, Task
from worker.train.material import READ_FEATURES, Frozen, draft_vocabulary, read_frozen
from worker.train.objective import Objective
from worker.train.optimise import Progress, Recipe, initial_head, make_optimisers, optimise
from worker.train.produce import produce, read_files

MAX_TEXT_TOKENS = 448
LONGEST_PROMPT = 220
EVALUATION_TOKENS = 96
SECONDS_BETWEEN_REPORTS = 300.0
BATCH_SIZE = 64
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What is to be done."""

    target: Path
    directory: Path
    evaluation: Sequence[Path]
    """JSONL files, {"text": prompt} per line: what the figures are measured on, never trained on."""
    data_seconds: float
    """For making texts, before training; what is there already counts for nothing."""
    train_seconds: float
    """For training, beside what earlier calls trained."""
    own_prompts: Sequence[str] = ()
    own_files: Sequence[Path] = ()
    draft_vocab_size: int = 8192
    seed: int = 1
    recipe: Recipe = field(default_factory=Recipe)


def feature_layers(config: DecoderConfig) -> tuple[int, ...]:
    """Return the layers whose hidden states are stored: middle, late, last."""
    layers = config.num_layers
    if layers < 6:
        raise ModelError(f"num_hidden_layers {layers}: features are taken from at least 6 layers")
    return layers // 2, layers - 3, layers


def train_draft(job: Job, say: Say) -> dict[str, Figures]:
    """Do what is left of a job; return the figures of the exported head by evaluation file.

    Raises:
        ModelError: the target cannot be loaded.
        DataError: the directory holds the work of another job.
    """
    tokenizer = Tokenizer.load(job.target)
    frozen = read_frozen(job.target)
    held_out = _prepare_texts(job, tokenizer, frozen.config, say)
    paths = [*shard_paths(job.directory / "texts"), *shard_paths(job.directory / "files")]
    texts = [text for path in paths for text in read_shard(path)[0]]
    if not texts:
        raise DataError(f"{job.directory}: no training text yet; give more --minutes")
    say(f"{len(texts)} training texts, {sum(len(text.token_ids) for text in texts)} tokens")
    return _train(job, texts, held_out, frozen, say)


def _prepare_texts(job: Job, tokenizer: Tokenizer, config: DecoderConfig, say: Say) -> dict[str, list[Text]]:
    """Generate what is not there yet; return the evaluation texts by file."""
    layers = feature_layers(config)
    described = {"target": job.target.name, "layers": ",".join(map(str, layers)), "dtype": "float32"}
    needed = [path for path in job.evaluation if not _evaluation_shard(job, path).exists()]
    if needed or job.data_seconds > 0:
        decoder = load_decoder(job.target, dtype=torch.float32, device=torch.device("cpu"))
        generator = Generator(
            decoder,
            feature_layers=layers,
            num_tokens=min(tokenizer.vocab_size, config.vocab_size),
            eos_token_ids=tokenizer.eos_token_ids,
            batch_size=BATCH_SIZE,
            max_text_tokens=MAX_TEXT_TOKENS,
            seed=int(time.time()),
        )
        for path in needed:
            encoded = [
                tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in read_prompts(path)
            ]
            tasks = [Task(ids, 0.0, EVALUATION_TOKENS) for ids in encoded if len(ids) <= LONGEST_PROMPT]
            if not tasks:
                raise DataError(f"{path}: no prompt of at most {LONGEST_PROMPT} tokens")
            shard = _evaluation_shard(job, path)
            shard.parent.mkdir(parents=True, exist_ok=True)
            write_shard(shard, list(generator.run(iter(tasks))), described)
            say(f"evaluation texts: {shard}")
        began = time.monotonic()
        if job.own_files:
            files = job.directory / "files"
            read_files(
                generator, tokenizer, job.own_files, files, described,
                seconds=job.data_seconds, text_tokens=MAX_TEXT_TOKENS, say=say,
            )  # fmt: skip
        left = job.data_seconds - (time.monotonic() - began)
        if left > 0:
            produce(
                generator, tokenizer, job.directory / "texts", described,
                seed=job.seed, seconds=left, longest_prompt=LONGEST_PROMPT, own_prompts=job.own_prompts, say=say,
            )  # fmt: skip
    return {path.stem: read_shard(_evaluation_shard(job, path))[0] for path in job.evaluation}


def _evaluation_shard(job: Job, path: Path) -> Path:
    """Return where the answers to a file's prompts are: another content is another file."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return job.directory / "evaluation" / f"{path.stem}-{digest[:12]}.safetensors"


def read_prompts(path: Path) -> list[str]:
    """Read JSONL, {"text": prompt} per line.

    Raises:
        DataError: a line is something else.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            prompts.append(str(json.loads(line)["text"]))
        except (ValueError, KeyError, TypeError):
            raise DataError(f'{path}:{number}: must be a JSON object with a "text"') from None
    return prompts


def _train(
    job: Job, texts: Sequence[Text], held_out: dict[str, list[Text]], frozen: Frozen, say: Say
) -> dict[str, Figures]:
    layers = feature_layers(frozen.config)
    head, progress = initial_head(frozen, READ_FEATURES), Progress()
    optimisers = make_optimisers(head, job.recipe)
    state_path = job.directory / "state.pt"
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        vocabulary: Tensor = state["vocabulary"]
        head.load_state_dict(state["head"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        progress = Progress(**state["progress"])
        say(f"resumed after {progress.batches} batches")
    else:
        vocabulary = draft_vocabulary(texts, frozen.config.vocab_size, job.draft_vocab_size)
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
