"""What a head is trained for: the target's distribution over the next token, and its hidden state.

Knows nothing about optimisers or data on disk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.train.material import Batch, Frozen
from worker.train.network import TrainedHead

STEP_DECAY = 0.8
"""Weight of step j + 1 against step j."""
LEAST_LOG_PROB = -5.0
"""Less likely tokens are no targets: the softmax would have to run over twice as many columns for them."""
HIDDEN_WEIGHT = 0.3
"""Of the hidden state's loss against the distribution's."""


class Objective(nn.Module):
    """Losses of a batch, with the target's output rows of the draft vocabulary frozen."""

    def __init__(self, frozen: Frozen, vocabulary: Tensor, *, num_negatives: int, seed: int) -> None:
        """Prepare.

        Args:
            frozen: the target's weights.
            vocabulary: `[draft_vocab_size]` target ids, rising.
            num_negatives: tokens drawn at random for each batch beside those that its targets name.
            seed: of the draw.
        """
        super().__init__()
        self._frozen = frozen
        self._rows = frozen.output[vocabulary]  # [draft_vocab_size, hidden_size]
        self._draft_ids = torch.full((frozen.config.vocab_size,), -1).scatter_(
            0, vocabulary, torch.arange(len(vocabulary))
        )
        self._num_negatives = num_negatives
        self._noise = torch.Generator().manual_seed(seed)

    def losses(self, head: TrainedHead, batch: Batch, num_steps: int) -> Tensor:
        """Return the weighted mean loss over rows and steps."""
        embedded = self._frozen.embedding[batch.next_tokens]
        outputs = head(batch.features, embedded, num_steps)
        draft_ids = self._draft_ids[batch.top_ids]  # [texts, rows, k]; -1 outside the draft vocabulary
        draft_ids = draft_ids.masked_fill(batch.top_log_probs < LEAST_LOG_PROB, -1)
        columns, positions = self._columns(draft_ids[batch.weights > 0])
        total, weight_sum = torch.zeros(()), 0.0
        for step, hidden in enumerate(outputs):
            weights = batch.weights.clone()
            weights[:, :step] = 0
            used = weights > 0
            loss = self._row_losses(
                hidden[used],
                batch.goals[used],
                positions(draft_ids[used]),
                batch.top_log_probs[used],
                columns,
            )
            factor = STEP_DECAY**step
            total = total + factor * (loss * weights[used]).sum()
            weight_sum += factor * float(weights.sum())
        return total / weight_sum

    def _columns(self, draft_ids: Tensor) -> tuple[Tensor, "_Lookup"]:
        """Choose the tokens that the softmax runs over: a whole vocabulary costs more than the head."""
        chosen = torch.zeros(len(self._rows), dtype=torch.bool)
        chosen[draft_ids[draft_ids >= 0]] = True
        chosen[torch.randint(len(self._rows), (self._num_negatives,), generator=self._noise)] = True
        ids = chosen.nonzero().squeeze(-1)
        return self._rows[ids], _Lookup(ids, len(self._rows))

    def _row_losses(
        self, hidden: Tensor, goals: Tensor, positions: Tensor, log_probs: Tensor, columns: Tensor
    ) -> Tensor:  # [rows]
        logits = hidden @ columns.t()  # [rows, columns]
        probs = log_probs.exp().masked_fill(positions < 0, 0)
        probs = probs / probs.sum(dim=-1, keepdim=True).clamp(min=1e-6)
        log_draft_probs = logits.gather(1, positions.clamp(min=0)) - logits.logsumexp(dim=-1, keepdim=True)
        entropy = -(probs * log_draft_probs).sum(dim=-1)
        spread = goals.var(dim=0, keepdim=True) + 0.1
        distance = F.smooth_l1_loss(hidden / spread.sqrt(), goals / spread.sqrt(), reduction="none").mean(
            dim=-1
        )
        return entropy + HIDDEN_WEIGHT * distance

    @torch.no_grad()
    def hits(self, head: TrainedHead, batch: Batch, num_steps: int) -> list[Tensor]:
        """Return per step `[texts, rows]` booleans: the best draft token is the target's best (rows with weight)."""
        outputs = head(batch.features, self._frozen.embedding[batch.next_tokens], num_steps)
        used = batch.weights > 0
        best = self._draft_ids[batch.top_ids[..., 0][used]]
        results = []
        for hidden in outputs:
            hit = torch.zeros_like(used)
            hit[used] = (hidden[used] @ self._rows.t()).argmax(dim=-1) == best
            results.append(hit)
        return results


class _Lookup:
    """Maps draft ids to their place among the chosen columns; -1 for those outside the draft vocabulary."""

    def __init__(self, ids: Tensor, size: int) -> None:
        self._places = torch.full((size + 1,), -1).scatter_(0, ids, torch.arange(len(ids)))

    def __call__(self, draft_ids: Tensor) -> Tensor:
        return self._places[draft_ids]
