"""`spec-worker train-draft`: from arguments to a job. What is asked for is checked here."""

import argparse
import itertools
import json
import sys
from pathlib import Path

import torch

from worker.device import available_cores
from worker.models.locate import locate_model
from worker.train.prompts import prompts
from worker.train.run import train_draft
from worker.train.texts import Job, read_prompts

HELD_OUT_PROMPTS = 24
HELD_OUT_SEED = "held out"


def run(arguments: argparse.Namespace) -> None:
    """Do the job.

    Raises:
        ValueError: an argument, a file or the model is refused; the message says which.
        OSError: a file cannot be read or written.
    """
    if arguments.minutes <= 0 or not 0 <= arguments.data_share <= 1:
        raise ValueError("--minutes must be above 0, --data-share within 0…1")
    if arguments.draft_vocabulary < 1:
        raise ValueError("--draft-vocabulary must be at least 1")
    if arguments.threads < 0:
        raise ValueError("--threads must be at least 0 (0: all cores)")
    stems = [path.stem for path in arguments.evaluation]
    if len(set(stems)) < len(stems):
        raise ValueError(f"--evaluation: figures go by the file's name, and {stems} has one twice")
    torch.set_num_threads(arguments.threads or available_cores())
    arguments.out.mkdir(parents=True, exist_ok=True)
    seconds = 60 * arguments.minutes
    job = Job(
        target=locate_model(arguments.model),
        directory=arguments.out,
        evaluation=arguments.evaluation or [_held_out(arguments.out)],
        data_seconds=seconds * arguments.data_share,
        train_seconds=seconds * (1 - arguments.data_share),
        own_prompts=[prompt for path in arguments.prompts for prompt in read_prompts(path)],
        own_files=arguments.files,
        draft_vocab_size=arguments.draft_vocabulary,
    )
    train_draft(job, _say)


def _held_out(directory: Path) -> Path:
    """Write the prompts that stand in for an evaluation file, once: they are made like the training's."""
    path = directory / "held-out.jsonl"
    if not path.exists():
        made = itertools.islice(prompts(HELD_OUT_SEED), HELD_OUT_PROMPTS)
        path.write_text(
            "".join(json.dumps({"text": prompt.text}) + "\n" for prompt in made), encoding="utf-8"
        )
    return path


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
