"""One decoder with its KV cache: prefill a chunk, decode rows. Target and draft models are both run through this.

Knows nothing about requests or speculation; lengths are the caller's. Prefill and decode are separate phases because
the kernels may differ between them, and a generated token's KV must never come from the prefill path (DESIGN §7). Where
a draft head asks for them, hidden states are stored beside the KV.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from worker.graphs.forward import GraphedForward
from worker.graphs.launches import Launches
from worker.kv_cache import KVCache
from worker.models.attention import Segment
from worker.models.decoder import Decoder, FeatureTap
from worker.models.linear import Phase
from worker.models.padded_attention import PaddedInputs, PaddedRows, place
from worker.transfer import to_device

POST_NORM = -1
"""Among feature layers: the decoder's output, behind the last layer and the final norm."""


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
        self.launches = Launches()
        self.graphs: GraphedForward | None = None
        """Of rows that all want logits (verify, draft steps)."""
        self.last_row_graphs: GraphedForward | None = None
        """Of rows whose last one per request wants them."""
        self._feature_layers: Sequence[int] = ()
        self._tap: FeatureTap | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.decoder.device

    def keep_features(self, layers: Sequence[int]) -> None:
        """From now on store every token's hidden states after these many layers (or `POST_NORM`) beside its KV.

        Takes `len(layers) * hidden_size` numbers per token of the cache.
        """
        self._feature_layers = tuple(layers)
        self._tap = FeatureTap([layer for layer in layers if layer != POST_NORM])
        self.kv.keep_features(len(layers) * self.decoder.config.hidden_size)

    def features(self, segments: Sequence[Segment]) -> Tensor:  # [rows, len(layers) * hidden_size]
        """Return what was stored at the segments' positions, in the order of `keep_features`."""
        if self.kv.features is None:
            raise RuntimeError("features are read, but keep_features was not called")
        stored = self.kv.features[0, :, 0]  # [slots, max_tokens, width]
        parts = [stored[segment.slot, segment.start : segment.stop] for segment in segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _forward(self, token_ids: Tensor, segments: Sequence[Segment], phase: Phase) -> Tensor:
        """Run the decoder → `[rows, hidden_size]`, storing KV and features."""
        hidden = self.decoder.forward(token_ids, segments, self.kv, phase=phase, tap=self._tap)
        if self._tap is not None and self.kv.features is not None:
            rows = self._tapped(self._tap, hidden)
            offset = 0
            for segment in segments:
                block = rows[offset : offset + segment.count]
                self.kv.features[0, segment.slot, 0, segment.start : segment.stop] = block
                offset += segment.count
        return hidden

    def _tapped(self, tap: FeatureTap, hidden: Tensor) -> Tensor:  # [rows, len(layers) * hidden_size]
        tapped = iter(tap.take())
        return torch.cat([hidden if i == POST_NORM else next(tapped) for i in self._feature_layers], dim=1)

    def decode_padded(self, inputs: PaddedInputs, *, last_only: bool = False) -> Tensor:
        """Compute padded rows: `decode` without anything from the host, as a graph captures it.

        Returns the logits of every row `[bucket * width, vocab_size]`, or `[bucket, vocab_size]` with `last_only`.
        """
        config = self.decoder.config
        placement = place(inputs, self.kv, config.num_heads // config.num_kv_heads, config.sliding_window)
        hidden = self.decoder.compute(
            inputs.tokens.flatten(), placement, self.kv, phase="decode", tap=self._tap
        )
        if self._tap is not None and self.kv.features is not None:
            stored = self.kv.features.view(-1, self.kv.features.shape[-1])
            cells = PaddedRows.of(inputs, self.kv.padding_slot).among_all(self.kv.max_tokens)
            stored.index_copy_(0, cells, self._tapped(self._tap, hidden))
        if last_only:
            hidden = hidden.index_select(0, inputs.last_rows)
        return self.decoder.logits(hidden)[:, : self.vocab_size]

    @torch.inference_mode()
    def prefill(self, slot: int, start: int, token_ids: Sequence[int]) -> Tensor:  # [1, vocab_size]
        """Store the KV of `token_ids` at `start`; return the logits after the last of them."""
        tokens = to_device(token_ids, self.device)
        segment = Segment(slot, start, len(token_ids))
        hidden = self._forward(tokens, [segment], "prefill")
        return self.decoder.logits(hidden[-1:])[:, : self.vocab_size]

    @torch.inference_mode()
    def decode(
        self,
        token_ids: Tensor,  # [rows] int64, rows = Σ count of the segments
        segments: Sequence[Segment],
        *,
        last_only: bool = False,
    ) -> Tensor:  # [rows, vocab_size], or [len(segments), vocab_size] with last_only
        """Store the rows' KV and return their logits (of each segment's last row only, if so asked).

        Logits that a graph left are overwritten by the next forward.
        """
        self.num_forwards += 1
        last_only = last_only and len(token_ids) > len(segments)
        graphs = self.last_row_graphs if last_only else self.graphs
        replayed = graphs.replay(token_ids, segments) if graphs is not None else None
        if replayed is not None:
            self.launches.replayed += 1
            return replayed[0]
        self.launches.eager += 1
        hidden = self._forward(token_ids, segments, "decode")
        if last_only:
            hidden = hidden.index_select(0, last_rows(segments, self.device))
        return self.decoder.logits(hidden)[:, : self.vocab_size]


def last_rows(segments: Sequence[Segment], device: torch.device) -> Tensor:  # [len(segments)]
    """Return the index of each segment's last row."""
    return to_device([stop - 1 for stop in accumulate(segment.count for segment in segments)], device)
