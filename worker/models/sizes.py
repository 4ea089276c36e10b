"""What a decoder's weights take in memory, told from its configuration. Knows nothing about files or KV caches."""

import torch

from worker.models.basis import basis_bytes
from worker.models.config import DecoderConfig
from worker.models.linear import linear_bytes
from worker.models.packed import Packing, is_integer, packed_bytes


def decoder_bytes(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device, *, packing: Packing | None = None
) -> int:
    """Return what the weights of `load_decoder` will take in memory."""
    wide = torch.float32.itemsize if packing else dtype.itemsize
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def linear(out_features: int, in_features: int, bias: bool) -> int:
        if packing:
            return packed_bytes(out_features, in_features, bias=bias, packing=packing)
        return linear_bytes(out_features, in_features, bias=bias, dtype=dtype, device=device)

    layer = linear(queries + 2 * keys, hidden, config.qkv_bias) + linear(hidden, queries, config.output_bias)
    layer += linear(2 * inner, hidden, config.mlp_bias) + linear(hidden, inner, config.mlp_bias)
    # Integer projections take the norm before them in.
    norms = 0 if is_integer(packing) else 2 * hidden * wide
    norms += (queries + keys if config.qk_norm else 0) * dtype.itemsize
    embedding = config.vocab_size * hidden * wide
    head = linear(config.vocab_size, hidden, False)
    if is_integer(packing):
        head += basis_bytes(hidden)
    elif packing and not config.tie_word_embeddings:
        head += config.vocab_size * hidden * dtype.itemsize
    if not packing and config.tie_word_embeddings:
        head -= embedding
    return embedding + head + config.num_layers * (layer + norms) + hidden * wide
