"""Self-generated text: the target answers prompts, many at once, and what a head learns from is kept on the way.

One sampled token costs one row of one forward; hidden states and the likeliest tokens come with it for nothing.
Knows nothing about heads, files or the serving engine (whose per-request noise would cost more than the model here).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from worker.models.attention import Segment
from worker.models.decoder import Decoder, FeatureTap
from worker.train.data import Text

TOP_TOKENS = 16
"""Next tokens kept per position; the target's argmax is the first."""


class Task(NamedTuple):
    """One answer to generate."""

    prompt_ids: list[int]
    temperature: float
    max_tokens: int


@dataclass
class _Growing:
    """A text in the making, in one slot."""

    task: Task
    token_ids: list[int]
    features: list[Tensor] = field(default_factory=list)  # [rows, features, hidden_size] each
    top_ids: list[Tensor] = field(default_factory=list)  # [rows, TOP_TOKENS] each
    top_log_probs: list[Tensor] = field(default_factory=list)

    def finished(self, eos_token_ids: frozenset[int]) -> bool:
        """Whether the last token ended the text."""
        answered = len(self.token_ids) - len(self.task.prompt_ids)
        return answered >= self.task.max_tokens or (answered > 0 and self.token_ids[-1] in eos_token_ids)

    def text(self) -> Text:
        """Return what was kept."""
        return Text(
            token_ids=torch.tensor(self.token_ids, dtype=torch.int32),
            prompt_length=len(self.task.prompt_ids),
            features=torch.cat(self.features),
            top_ids=torch.cat(self.top_ids),
            top_log_probs=torch.cat(self.top_log_probs),
        )


class Generator:
    """Answers tasks in slots of a KV cache; a slot that falls free takes the next task at once."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        feature_layers: tuple[int, ...],
        num_tokens: int,
        eos_token_ids: frozenset[int],
        batch_size: int,
        max_text_tokens: int,
        seed: int,
    ) -> None:
        """Allocate the cache.

        Args:
            decoder: the target.
            feature_layers: after how many layers hidden states are kept.
            num_tokens: ids the tokenizer knows; others are never drawn.
            eos_token_ids: these end a text.
            batch_size: texts generated at once.
            max_text_tokens: prompt and answer together.
            seed: of the sampling.
        """
        self._decoder = decoder
        self._kv = decoder.new_kv_cache(batch_size, max_text_tokens)
        self._tap = FeatureTap(feature_layers)
        self._num_tokens = num_tokens
        self._eos = eos_token_ids
        self._max_text_tokens = max_text_tokens
        self._noise = torch.Generator().manual_seed(seed)
        self._slots: list[_Growing | None] = [None] * batch_size

    @torch.inference_mode()
    def run(self, tasks: Iterator[Task]) -> Iterator[Text]:
        """Yield texts as they are finished, until the tasks run out."""
        while True:
            for slot, growing in enumerate(self._slots):
                if growing is None and (task := next(tasks, None)) is not None:
                    self._slots[slot] = self._begin(slot, task)
            active = [(slot, growing) for slot, growing in enumerate(self._slots) if growing is not None]
            if not active:
                return
            for slot, growing in active:
                if growing.finished(self._eos):
                    self._slots[slot] = None
                    yield growing.text()
            self._step([pair for pair in active if self._slots[pair[0]] is not None])

    @torch.inference_mode()
    def read(self, token_ids: list[int]) -> Text:
        """Return what the target sees along a text that is there already; all of it counts as its answer."""
        reading = _Growing(Task([], 0.0, 0), list(token_ids))
        rows = torch.tensor(token_ids[:-1])
        hidden = self._decoder.forward(
            rows, [Segment(0, 0, len(rows))], self._kv, phase="prefill", tap=self._tap
        )
        self._keep([reading], [len(rows)], self._logits(hidden))
        return reading.text()

    def _begin(self, slot: int, task: Task) -> _Growing:
        room = self._max_text_tokens - len(task.prompt_ids)
        if room < 1:
            raise ValueError(f"a prompt of {len(task.prompt_ids)} tokens leaves no room for an answer")
        growing = _Growing(task._replace(max_tokens=min(task.max_tokens, room)), list(task.prompt_ids))
        rows = torch.tensor(task.prompt_ids)
        hidden = self._decoder.forward(
            rows, [Segment(slot, 0, len(rows))], self._kv, phase="prefill", tap=self._tap
        )
        # Features of the whole prompt are the context of the head's attention.
        logits = self._logits(hidden)
        self._keep([growing], [len(rows)], logits)
        growing.token_ids.append(int(self._draw(logits[-1:], [task.temperature])))
        return growing

    def _step(self, active: list[tuple[int, _Growing]]) -> None:
        if not active:
            return
        rows = torch.tensor([growing.token_ids[-1] for _, growing in active])
        segments = [Segment(slot, len(growing.token_ids) - 1, 1) for slot, growing in active]
        hidden = self._decoder.forward(rows, segments, self._kv, phase="decode", tap=self._tap)
        logits = self._logits(hidden)
        texts = [growing for _, growing in active]
        self._keep(texts, [1] * len(texts), logits)
        drawn = self._draw(logits, [growing.task.temperature for growing in texts])
        for growing, token in zip(texts, drawn.tolist(), strict=True):
            growing.token_ids.append(token)

    def _logits(self, hidden: Tensor) -> Tensor:
        # contiguous: the float32 kernel leaves rows as the fast dimension, which topk and softmax are slow on
        return self._decoder.logits(hidden)[:, : self._num_tokens].float().contiguous()

    def _keep(self, texts: list[_Growing], counts: list[int], logits: Tensor) -> None:
        """Store the forward's features and likeliest tokens, `counts` rows for each text."""
        features = torch.stack(self._tap.take(), dim=1).to(torch.bfloat16)
        top = logits.topk(TOP_TOKENS, dim=-1)
        log_probs = (top.values - logits.logsumexp(dim=-1, keepdim=True)).to(torch.bfloat16)
        ids = top.indices.to(torch.int32)
        parts = zip(texts, *(torch.split(rows, counts) for rows in (features, ids, log_probs)), strict=True)
        for growing, feature, top_ids, top_log_probs in parts:
            # clone: a view would keep the whole batch's tensor alive
            growing.features.append(feature.clone())
            growing.top_ids.append(top_ids.clone())
            growing.top_log_probs.append(top_log_probs.clone())

    def _draw(self, logits: Tensor, temperatures: list[float]) -> Tensor:  # [rows, num_tokens] -> [rows]
        tokens = logits.argmax(dim=-1)
        sampled = [row for row, temperature in enumerate(temperatures) if temperature > 0]
        if sampled:
            scale = torch.tensor([[temperatures[row]] for row in sampled])
            # By the inverse of the distribution function: multinomial takes longer than the model's head.
            mass = (logits[sampled] / scale).softmax(dim=-1).cumsum(dim=-1)  # [sampled, num_tokens]
            points = torch.rand(len(sampled), 1, generator=self._noise) * mass[:, -1:]
            drawn = torch.searchsorted(mass, points, right=True).squeeze(-1)
            tokens[sampled] = drawn.clamp(max=logits.shape[-1] - 1)
        return tokens


def temperature_for(kind: str, rng: random.Random) -> float:
    """Return a temperature as the demo's traffic has it: prose at 1, the rest mostly greedy, with some variety."""
    if kind == "prose":
        return 1.0 if rng.random() < 0.8 else 0.0
    return 0.0 if rng.random() < 0.65 else rng.choice([0.5, 0.8, 1.0])
