"""What training takes from the target and from its texts: frozen weights, the draft vocabulary, batches of rows.

Row t of a text predicts the token at t + 2 from the features at t and the token at t + 1. Knows nothing about networks.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from worker.models.config import DecoderConfig, read_config
from worker.models.loader import output_weight, tensor_files
from worker.train.data import Text

READ_FEATURES = 3
"""Of the stored features a head reads the last ones: middle, late, and the target's output."""


@dataclass(frozen=True)
class Frozen:
    """The target's weights that a head is trained against, float32."""

    config: DecoderConfig
    embedding: Tensor  # [vocab_size, hidden_size]
    output: Tensor  # [vocab_size, hidden_size]
    final_norm: Tensor  # [hidden_size]
    last_layer: dict[str, Tensor]
    """By name below `model.layers.N.`: the head begins as a copy of it."""


def read_frozen(path: Path) -> Frozen:
    """Read the target's directory."""
    config, files = read_config(path), tensor_files(path)

    def read(name: str) -> Tensor:
        with safe_open(str(files[name]), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.float()

    prefix = f"model.layers.{config.num_layers - 1}."
    return Frozen(
        config=config,
        embedding=read("model.embed_tokens.weight"),
        output=output_weight(path).float(),
        final_norm=read("model.norm.weight"),
        last_layer={name.removeprefix(prefix): read(name) for name in files if name.startswith(prefix)},
    )


def draft_vocabulary(texts: Sequence[Text], vocab_size: int, size: int) -> Tensor:  # [size] int64, rising
    """Choose the tokens that the target gives the most probability in its texts; then the lowest ids.

    In a byte-pair vocabulary low ids were merged first: they are the frequent ones.
    """
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for text in texts:
        mass.index_add_(0, text.top_ids.flatten().long(), text.top_log_probs.flatten().double().exp())
    mass += torch.linspace(1e-6, 0, vocab_size, dtype=torch.float64)
    return mass.topk(min(size, vocab_size)).indices.sort().values


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded at the end."""

    features: Tensor  # [texts, rows, features * hidden_size]
    next_tokens: Tensor  # [texts, rows] int64: at t + 1
    goals: Tensor  # [texts, rows, hidden_size]: the target's output at t + 1
    top_ids: Tensor  # [texts, rows, k] int64: the target's likeliest tokens at t + 2
    top_log_probs: Tensor  # [texts, rows, k]
    weights: Tensor  # [texts, rows]: 0 for padding

    @property
    def num_rows(self) -> int:
        """Rows that count."""
        return int((self.weights > 0).sum())


def make_batch(texts: Sequence[Text], frozen: Frozen, prompt_weight: float) -> Batch:
    """Lay texts side by side; the last stored feature is the hidden state before the final norm."""
    rows = max(len(text.token_ids) for text in texts) - 2

    def padded(parts: list[Tensor]) -> Tensor:
        return torch.stack([F.pad(p, (0, 0) * (p.dim() - 1) + (0, rows - len(p))) for p in parts])

    features, goals = [], []
    for text in texts:
        stored = text.features.float()
        outputs = F.rms_norm(
            stored[:, -1], frozen.final_norm.shape, frozen.final_norm, frozen.config.rms_norm_eps
        )
        features.append(torch.cat((stored[:-1, -READ_FEATURES:-1].flatten(1), outputs[:-1]), dim=1))
        goals.append(outputs[1:])
    weights = []
    for text in texts:
        weight = torch.ones(len(text.token_ids) - 2)
        weight[: max(0, text.prompt_length - 2)] = prompt_weight
        weights.append(weight)
    return Batch(
        features=padded(features),
        next_tokens=padded([text.token_ids[1:-1].long() for text in texts]),
        goals=padded(goals),
        top_ids=padded([text.top_ids[1:].long() for text in texts]),
        top_log_probs=padded([text.top_log_probs[1:].float() for text in texts]),
        weights=padded(weights),
    )


def epoch(texts: Sequence[Text], tokens_per_batch: int, rng: random.Random) -> Iterator[list[Text]]:
    """Yield all texts once, in groups of similar length and of about `tokens_per_batch` with padding, shuffled."""
    usable = [text for text in texts if len(text.token_ids) > 3]
    usable.sort(key=lambda text: len(text.token_ids) * rng.uniform(0.9, 1.1))
    groups: list[list[Text]] = [[]]
    for text in usable:
        longest = max([len(text.token_ids), *(len(other.token_ids) for other in groups[-1])])
        if groups[-1] and longest * (len(groups[-1]) + 1) > tokens_per_batch:
            groups.append([])
        groups[-1].append(text)
    rng.shuffle(groups)
    yield from groups
