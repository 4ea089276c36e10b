"""The texts of a job: the target's answers to evaluation prompts, to training prompts, and pieces of files.

What is there already is kept. Knows nothing about heads.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from worker.models.config import DecoderConfig, ModelError
from worker.models.loader import load_decoder
from worker.tokenization import Tokenizer
from worker.train.data import DataError, Text, read_shard, write_shard
from worker.train.generate import Generator, Task
from worker.train.optimise import Recipe
from worker.train.produce import produce, read_files

MAX_TEXT_TOKENS = 448
LONGEST_PROMPT = 220
EVALUATION_TOKENS = 96
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


def described_by(job: Job, config: DecoderConfig) -> dict[str, str]:
    """Return what every shard of a job says about itself: data of another target teach nothing."""
    layers = ",".join(map(str, feature_layers(config)))
    return {"target": job.target.name, "layers": layers, "dtype": "float32"}


def prepare_texts(job: Job, tokenizer: Tokenizer, config: DecoderConfig, say: Say) -> dict[str, list[Text]]:
    """Generate what is not there yet; return the evaluation texts by file."""
    layers = feature_layers(config)
    described = described_by(job, config)
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
            _answer(generator, tokenizer, path, _evaluation_shard(job, path), described)
            say(f"evaluation texts: {_evaluation_shard(job, path)}")
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
    return {path.stem: read_shard(_evaluation_shard(job, path), described) for path in job.evaluation}


def _answer(
    generator: Generator, tokenizer: Tokenizer, path: Path, shard: Path, described: dict[str, str]
) -> None:
    """Write the target's greedy answers to an evaluation file's prompts."""
    encoded = [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in read_prompts(path)]
    tasks = [Task(ids, 0.0, EVALUATION_TOKENS) for ids in encoded if len(ids) <= LONGEST_PROMPT]
    if not tasks:
        raise DataError(f"{path}: no prompt of at most {LONGEST_PROMPT} tokens")
    shard.parent.mkdir(parents=True, exist_ok=True)
    write_shard(shard, list(generator.run(iter(tasks))), described)


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
