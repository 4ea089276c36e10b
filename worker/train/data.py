"""Training data on disk: shards of texts with what the target computed along them.

A shard is one safetensors file, written whole or not at all, so a run that was killed loses only what was in the
making. Knows nothing about how texts are made or used.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SHARD_GLOB = "shard-*.safetensors"


class DataError(ValueError):
    """A shard cannot be read, or was made for another target; the message names the file."""


@dataclass(frozen=True)
class Text:
    """One text and what the target saw at its positions 0 … n - 2 (nobody computed the last token's)."""

    token_ids: Tensor  # [n] int32, prompt and answer
    prompt_length: int
    features: Tensor  # [n - 1, features, hidden_size] bfloat16
    top_ids: Tensor  # [n - 1, k] int32: likeliest next tokens
    top_log_probs: Tensor  # [n - 1, k] bfloat16: their log probabilities at temperature 1

    @property
    def answer_tokens(self) -> int:
        """Tokens that the target generated."""
        return len(self.token_ids) - self.prompt_length


def shard_path(directory: Path, number: int) -> Path:
    """Return the file of shard `number`."""
    return directory / f"shard-{number:05d}.safetensors"


def shard_paths(directory: Path) -> list[Path]:
    """Return the finished shards in their order."""
    return sorted(directory.glob(SHARD_GLOB))


def write_shard(path: Path, texts: Sequence[Text], described: dict[str, str]) -> None:
    """Write texts and a description (target, feature layers, prompts' seed) at once."""
    tensors = {
        "lengths": torch.tensor([len(text.token_ids) for text in texts]),
        "prompt_lengths": torch.tensor([text.prompt_length for text in texts]),
        "token_ids": torch.cat([text.token_ids for text in texts]),
        "features": torch.cat([text.features for text in texts]),
        "top_ids": torch.cat([text.top_ids for text in texts]),
        "top_log_probs": torch.cat([text.top_log_probs for text in texts]),
    }
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary, metadata=described)
    os.replace(temporary, path)


def read_shard(path: Path, described: dict[str, str] | None = None) -> list[Text]:
    """Return the texts of a shard.

    Raises:
        DataError: the file is damaged, or was made with something else than `described`.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
            found = file.metadata() or {}
        lengths = tensors["lengths"].tolist()
    except (OSError, SafetensorError, KeyError) as error:
        raise DataError(f"{path}: no training shard: {error}") from error
    if described is not None and found != described:
        raise DataError(f"{path}: was made with {found}, not with {described}; choose another directory")
    seen = [length - 1 for length in lengths]
    parts = (
        tensors["token_ids"].split(lengths),
        tensors["prompt_lengths"].tolist(),
        tensors["features"].split(seen),
        tensors["top_ids"].split(seen),
        tensors["top_log_probs"].split(seen),
    )
    return [Text(*fields) for fields in zip(*parts, strict=True)]
