"""Producing training shards: prompts through the generator onto the disk, until a time or a number is reached.

Resumable: shard number i is made of prompts `i * texts … (i + 1) * texts - 1` of the seed, so a later run goes on with
the first number that is not there.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from worker.tokenization import Tokenizer
from worker.train.data import read_shard, shard_path, shard_paths, write_shard
from worker.train.generate import Generator, Task, temperature_for
from worker.train.prompts import Prompt, prompts

TEXTS_PER_SHARD = 32
MAX_ANSWER_TOKENS = 224


def produce(
    generator: Generator,
    tokenizer: Tokenizer,
    directory: Path,
    described: dict[str, str],
    *,
    seed: int,
    seconds: float,
    longest_prompt: int,
    own_prompts: Sequence[str] = (),
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Write shards until `seconds` are over; texts that are not finished then are dropped.

    Args:
        generator: the target at work.
        tokenizer: the target's.
        directory: where shards go; those that are there are kept.
        described: stored in every shard and compared with those that are there.
        seed: of the prompts.
        seconds: time to spend.
        longest_prompt: prompts of more tokens are left out.
        own_prompts: the user's, mixed in evenly.
        say: told of progress.
        clock: monotonic seconds.

    Raises:
        DataError: the shards that are there were made for another target or other features.
    """
    directory.mkdir(parents=True, exist_ok=True)
    there = shard_paths(directory)
    for path in there[:1]:
        read_shard(path, described)
    number = 1 + int(there[-1].stem.removeprefix("shard-")) if there else 0
    began, answered = clock(), 0
    tasks = _tasks(tokenizer, seed, number * TEXTS_PER_SHARD, longest_prompt, own_prompts)
    kept = []
    for text in generator.run(tasks):
        kept.append(text)
        if len(kept) == TEXTS_PER_SHARD:
            write_shard(shard_path(directory, number), kept, described)
            answered += sum(text.answer_tokens for text in kept)
            passed = clock() - began
            say(f"shard {number}: {answered} tokens, {answered / passed:.0f} tokens/s")
            kept, number = [], number + 1
        if clock() - began > seconds:
            return


def read_files(
    generator: Generator,
    tokenizer: Tokenizer,
    paths: Sequence[Path],
    directory: Path,
    described: dict[str, str],
    *,
    seconds: float,
    text_tokens: int,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Write shards of pieces of the user's own files, in an order that does not favour any, until time is over.

    Raises:
        OSError, UnicodeDecodeError: a file cannot be read as text.
    """
    directory.mkdir(parents=True, exist_ok=True)
    began = clock()
    pieces = []
    for path in paths:
        ids = tokenizer.encode(path.read_text(encoding="utf-8"))
        pieces += [ids[i : i + text_tokens] for i in range(0, len(ids) - text_tokens + 1, text_tokens)]
    random.Random(0).shuffle(pieces)
    for number in range(len(shard_paths(directory)), -(-len(pieces) // TEXTS_PER_SHARD)):
        part = pieces[number * TEXTS_PER_SHARD : (number + 1) * TEXTS_PER_SHARD]
        write_shard(shard_path(directory, number), [generator.read(piece) for piece in part], described)
        say(f"files: shard {number}, {clock() - began:.0f} s")
        if clock() - began > seconds:
            return


def _tasks(
    tokenizer: Tokenizer, seed: int, start: int, longest_prompt: int, own_prompts: Sequence[str]
) -> Iterator[Task]:
    for number, made in enumerate(prompts(seed, start), start):
        rng = random.Random(f"{seed}/{number}/sampling")
        own = own_prompts and number % 2
        prompt = Prompt("chat", own_prompts[number // 2 % len(own_prompts)]) if own else made
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        if len(ids) <= longest_prompt:
            yield Task(ids, temperature_for(prompt.kind, rng), MAX_ANSWER_TOKENS)
