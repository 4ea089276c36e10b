"""The head as it is trained: whole texts at once, with the head's own hidden states fed back as in drafting.

Step 0 reads the target's features everywhere. Step j computes what row t would be if the last j rows before it had been
drafted: its hidden state is step j - 1's of row t - 1, and its attention sees step 0's keys up to row t - j and one key
of each later step behind them ("training-time test" of EAGLE-3). The arithmetic is `EagleHead`'s; a test compares the
two. Knows nothing about losses or data.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.models.config import DecoderConfig
from worker.models.rope import RotaryTable


class TrainedHead(nn.Module):
    """An `eagle` head over fused features, every projection a float32 matrix `[out_features, in_features]`."""

    def __init__(self, layer: DecoderConfig, num_features: int) -> None:
        super().__init__()
        self.layer = layer
        hidden, inner = layer.hidden_size, layer.intermediate_size
        queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        self.fuse_norm = nn.Parameter(torch.ones(num_features * hidden))
        self.fuse = nn.Parameter(torch.zeros(hidden, num_features * hidden))
        self.join = nn.Parameter(torch.zeros(hidden, 2 * hidden))
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Parameter(torch.zeros(queries + 2 * keys, hidden))
        self.output = nn.Parameter(torch.zeros(hidden, queries))
        self.post_attention_norm = nn.Parameter(torch.ones(hidden))
        self.gate_up = nn.Parameter(torch.zeros(2 * inner, hidden))
        self.down = nn.Parameter(torch.zeros(hidden, inner))
        self._rotary = RotaryTable(layer.rope, layer.head_dim, torch.float32, torch.device("cpu"))

    def forward(
        self,
        features: Tensor,  # [texts, rows, num_features * hidden_size]: of positions 0 … rows - 1
        embedded: Tensor,  # [texts, rows, hidden_size]: of the tokens at 1 … rows
        num_steps: int,
    ) -> list[Tensor]:  # per step [texts, rows, hidden_size]
        """Return the hidden states of each step; rows below j of step j mean nothing."""
        hidden = F.linear(F.rms_norm(features, self.fuse_norm.shape, self.fuse_norm, self._eps), self.fuse)
        outputs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(num_steps):
            x = F.linear(torch.cat((embedded, hidden), dim=-1), self.join)
            queries, key, value = self._heads(
                F.rms_norm(x, self.input_norm.shape, self.input_norm, self._eps)
            )
            keys.append(key)
            values.append(value)
            x = x + F.linear(self._attend(queries, keys, values), self.output)
            normed = F.rms_norm(x, self.post_attention_norm.shape, self.post_attention_norm, self._eps)
            gate, up = F.linear(normed, self.gate_up).chunk(2, dim=-1)
            outputs.append(x + F.linear(F.silu(gate) * up, self.down))
            hidden = F.pad(outputs[-1][:, :-1], (0, 0, 1, 0))
        return outputs

    @property
    def _eps(self) -> float:
        return self.layer.rms_norm_eps

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project and rotate → queries, keys, values, `[texts, heads, rows, head_dim]` each, KV heads repeated."""
        layer, (texts, rows, _) = self.layer, x.shape
        heads = F.linear(x, self.qkv).view(texts, rows, -1, layer.head_dim).transpose(1, 2)
        queries, keys, values = torch.split(
            heads, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1
        )
        self._rotary.reserve(rows)
        cosines, sines = (part.flatten(1) for part in self._rotary.at(torch.arange(rows)))  # [rows, head_dim]
        groups = layer.num_heads // layer.num_kv_heads

        def rotate(part: Tensor) -> Tensor:
            return part * cosines + part.roll(layer.head_dim // 2, dims=-1) * sines

        return (
            rotate(queries),
            rotate(keys).repeat_interleave(groups, dim=1),
            values.repeat_interleave(groups, dim=1),
        )

    def _attend(self, queries: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attend the rows of the latest step → `[texts, rows, num_heads * head_dim]`."""
        step, rows = len(keys) - 1, queries.shape[2]
        if step == 0:
            out = F.scaled_dot_product_attention(queries, keys[0], values[0], is_causal=True)
            return out.transpose(1, 2).flatten(2)
        scale: float = self.layer.head_dim**-0.5
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1 - step)  # step 0's keys of rows > t - step
        scores = (queries @ keys[0].transpose(-1, -2)).masked_fill(hidden, -1e9)
        # Of step i each row sees one key, that of the row step - i before it.
        later = [_shifted(part, step - i) for i, part in enumerate(keys) if i > 0]
        near = torch.stack([(queries * part).sum(dim=-1) for part in later], dim=-1)
        weights = (torch.cat((scores, near), dim=-1) * scale).softmax(dim=-1)
        out = weights[..., :rows] @ values[0]
        for i, part in enumerate(values[1:], 1):
            out = out + weights[..., rows + i - 1, None] * _shifted(part, step - i)
        joined: Tensor = out.transpose(1, 2).flatten(2)
        return joined


def _shifted(part: Tensor, by: int) -> Tensor:
    """Move rows down: row t gets what row t - by held."""
    return part if by == 0 else F.pad(part[:, :, :-by], (0, 0, by, 0))
