"""One decoder with its KV cache: prefill a chunk, decode rows. Target and draft models are both run through this.

Knows nothing about requests or speculation; lengths are the caller's. Prefill and decode are separate phases because
the kernels may differ between them, and a generated token's KV must never come from the prefill path (DESIGN §7).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.kv_cache import KVCache
from worker.models.attention import Segment
from worker.models.decoder import Decoder


class ModelRunner:
    """Runs a decoder over its slots. Used by the engine thread only."""

    def __init__(self, decoder: Decoder, *, num_slots: int, max_tokens: int, num_tokens: int) -> None:
        """Build the cache.

        Args:
            decoder: the model.
            num_slots: requests that can hold KV at once.
            max_tokens: KV rows per slot: the context plus the deepest tier's drafts.
            num_tokens: ids the tokenizer knows; logits beyond it (a padded embedding) are never drawn.
        """
        self.decoder = decoder
        self.kv: KVCache = decoder.new_kv_cache(num_slots, max_tokens)
        self.vocab_size = min(num_tokens, decoder.config.vocab_size)
        self.num_forwards = 0
        """Decode forwards so far: proves in tests what a depth really cost."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.decoder.device

    @torch.inference_mode()
    def prefill(self, slot: int, start: int, token_ids: Sequence[int]) -> Tensor:  # [1, vocab_size]
        """Store the KV of `token_ids` at `start`; return the logits after the last of them."""
        tokens = torch.tensor(token_ids, device=self.device)
        segment = Segment(slot, start, len(token_ids))
        hidden = self.decoder.forward(tokens, [segment], self.kv, phase="prefill")
        return self.decoder.logits(hidden[-1:])[:, : self.vocab_size]

    @torch.inference_mode()
    def decode(
        self,
        token_ids: Tensor,  # [rows] int64, rows = Σ count of the segments
        segments: Sequence[Segment],
        *,
        last_only: bool = False,
    ) -> Tensor:  # [rows, vocab_size], or [len(segments), vocab_size] with last_only
        """Store the rows' KV and return their logits (of each segment's last row only, if so asked)."""
        self.num_forwards += 1
        hidden = self.decoder.forward(token_ids, segments, self.kv, phase="decode")
        if last_only and len(token_ids) > len(segments):
            ends = torch.tensor([segment.count for segment in segments], device=self.device).cumsum(0) - 1
            hidden = hidden[ends]
        return self.decoder.logits(hidden)[:, : self.vocab_size]
