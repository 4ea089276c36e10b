"""The tensors of a draft head under one set of names: checked against the target, placed and used up one by one.

A layout is a renaming onto our names. Knows nothing about configuration files or where tensors are stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from worker.models.config import ModelError
from worker.models.decoder import Decoder
from worker.models.linear import Linear, make_linear
from worker.models.loader import output_weight
from worker.models.norm import RmsNorm
from worker.models.packed import Packing, pack_linear
from worker.models.rope import pair_up
from worker.spec.eagle_head import HeadConfig, HeadWeights, Style

NOT_OURS = ("rotary_emb.", "verifier_", "layers.0.self_attn.rotary_emb.")
"""Tensors that some writers store and nobody reads."""


@dataclass(frozen=True)
class Layout:
    """One way to write a head: its style, and prefixes of its tensor names with ours."""

    name: str
    style: Style
    renamed: Mapping[str, str]


EAGLE_1 = Layout("EAGLE-1", "eagle", {"fc.": "join.", "layers.0.": "layer."})
EAGLE_3 = Layout("EAGLE-3", "eagle3", {"fc.": "fuse.", "midlayer.": "layer."})
SPECULATORS_EAGLE = Layout(
    "speculators eagle",
    "eagle",
    {
        "fusion_fc.": "join.",
        "transformer.": "layer.",
        "embedding_layernorm.": "embedding_norm.",
        "pre_lm_head_layernorm.": "norm.",
    },
)
SPECULATORS_EAGLE_3 = Layout(
    "speculators eagle3", "eagle3", {"fc.": "fuse.", "layers.0.": "layer.", "input_norm.": "fuse_norm."}
)


class HeadFile:
    """The tensors of one head under our names: checked, placed and used up one by one."""

    def __init__(
        self,
        path: Path,
        layout: Layout,
        tensors: Mapping[str, Tensor],
        target: Decoder,
        packing: Packing | None,
    ) -> None:
        self._path = path
        self._layout = layout
        self._target = target
        self._packing = packing
        self._eps = 0.0
        self._wide = target.dtype if packing is None else torch.float32
        self._tensors: dict[str, Tensor] = {}
        self._given_names: dict[str, str] = {}
        for name, tensor in tensors.items():
            if not name.startswith(NOT_OURS):
                ours = _renamed(name, layout.renamed)
                self._tensors[ours], self._given_names[ours] = tensor, name

    def weights(self, config: HeadConfig, target_path: Path) -> HeadWeights:
        """Take everything; raise ModelError for what is missing, misshapen or left over."""
        layer, is_eagle = config.layer, config.style == "eagle"
        self._eps = layer.rms_norm_eps
        hidden, inner = layer.hidden_size, layer.intermediate_size
        queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        read = hidden if is_eagle else 2 * hidden  # what the attention's projections read
        features = len(config.feature_layers) * self._target.config.hidden_size
        attention, mlp = "layer.self_attn.", "layer.mlp."
        qkv = [f"{attention}{name}_proj" for name in "qkv"]
        token_ids = self._token_ids(layer.vocab_size)
        first_norm = self._norm("layer.input_layernorm.weight", hidden, needed=not is_eagle)
        is_fused = features != hidden or "fuse.weight" in self._tensors
        weights = HeadWeights(
            embedding=self._embedding(layer.vocab_size, hidden),
            fuse_norm=self._norm("fuse_norm.weight", features, needed=False),
            fuse=self._linear(["fuse"], [hidden], features) if is_fused else None,
            join=self._linear(["join"], [hidden], 2 * hidden) if is_eagle else None,
            embedding_norm=(
                self._norm("embedding_norm.weight", hidden, needed=False) if is_eagle else first_norm
            ),
            hidden_norm=None if is_eagle else self._norm("layer.hidden_norm.weight", hidden),
            input_norm=first_norm if is_eagle else None,
            qkv=self._linear(qkv, [queries, keys, keys], read, (layer.num_heads, layer.num_kv_heads)),
            output=self._linear([f"{attention}o_proj"], [hidden], queries),
            post_attention_norm=RmsNorm(
                self._placed("layer.post_attention_layernorm.weight", hidden), self._eps
            ),
            gate_up=self._linear([f"{mlp}gate_proj", f"{mlp}up_proj"], [inner, inner], hidden),
            down=self._linear([f"{mlp}down_proj"], [hidden], inner),
            final_norm=self._norm("norm.weight", hidden, needed=not is_eagle),
            head=self._head(token_ids, layer.vocab_size, hidden, target_path),
            token_ids=token_ids,
        )
        if self._tensors:
            left = sorted(self._given_names[name] for name in self._tensors)
            raise ModelError(
                f"{self._path}: tensor {left[0]} is not used by the {self._layout.name} layout ({len(left)} such)"
            )
        return weights

    def _token_ids(self, vocab_size: int) -> Tensor | None:  # [draft_vocab_size] int64
        """Read the draft vocabulary: `d2t` holds the distance from a draft id to the target's."""
        distances, flags = self._tensors.pop("d2t", None), self._tensors.pop("t2d", None)
        if distances is None:
            return None
        if distances.dim() != 1 or distances.is_floating_point():
            raise ModelError(f"{self._path}: tensor d2t must be a list of integers")
        ids = torch.arange(len(distances)) + distances.long()
        if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise ModelError(f"{self._path}: tensor d2t points outside the target's {vocab_size} tokens")
        if len(set(ids.tolist())) != len(ids):
            raise ModelError(f"{self._path}: tensor d2t names a target token twice")
        if flags is not None and flags.shape != (vocab_size,):
            raise ModelError(
                f"{self._path}: tensor t2d has shape {tuple(flags.shape)}, expected {(vocab_size,)}"
            )
        if flags is not None and not torch.equal(flags.bool().nonzero().squeeze(-1), ids.sort().values):
            raise ModelError(f"{self._path}: tensors t2d and d2t name different tokens")
        return ids.to(self._target.device)

    def _head(
        self, token_ids: Tensor | None, vocab_size: int, hidden: int, target_path: Path
    ) -> Linear | None:
        """The head's own output rows, else the target's rows of the draft vocabulary; None: the target's head."""
        rows = vocab_size if token_ids is None else len(token_ids)
        if "lm_head.weight" in self._tensors:
            return self._linear(["lm_head"], [rows], hidden)
        if token_ids is None:
            return None
        return self._make(output_weight(target_path)[token_ids.cpu()], None)

    def _embedding(self, vocab_size: int, hidden: int) -> Tensor | None:
        """The head's own embedding, unless it is the target's once more, as in most published heads."""
        if "embed_tokens.weight" not in self._tensors:
            return None
        own = self._placed("embed_tokens.weight", vocab_size, hidden)
        whole = torch.arange(vocab_size, device=self._target.device)
        return None if torch.equal(own, self._target.embed(whole).to(own.dtype)) else own

    def _norm(self, name: str, width: int, *, needed: bool = True) -> RmsNorm | None:
        is_there = needed or name in self._tensors
        return RmsNorm(self._placed(name, width), self._eps) if is_there else None

    def _linear(
        self,
        names: Sequence[str],
        widths: Sequence[int],
        in_features: int,
        paired_heads: Sequence[int] = (),
    ) -> Linear:
        """Stack projections that read the same input; a bias goes with all of them or none.

        The first of them give so many heads each as `paired_heads` says, which get the layout of pairs.
        """
        pairs = list(zip(names, widths, strict=True))
        weights = [self._take(f"{name}.weight", width, in_features) for name, width in pairs]
        biases = []
        if any(f"{name}.bias" in self._tensors for name in names):
            biases = [self._take(f"{name}.bias", width) for name, width in pairs]
        for parts in (weights, biases):
            parts[: len(paired_heads)] = map(pair_up, parts, paired_heads[: len(parts)])
        return self._make(torch.cat(weights), torch.cat(biases) if biases else None)

    def _make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self._packing is not None:
            return pack_linear(weight, bias, self._packing)
        return make_linear(weight, bias, self._target.dtype, self._target.device)

    def _placed(self, name: str, *shape: int) -> Tensor:
        return self._take(name, *shape).to(self._target.device, self._wide)

    def _take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.pop(name, None)
        given = self._given_names.get(name, _restored(name, self._layout.renamed))
        if tensor is None:
            raise ModelError(f"{self._path}: tensor {given} is missing ({self._layout.name} layout)")
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._path}: tensor {given} has shape {tuple(tensor.shape)}, expected {shape} "
                "from config.json and the target"
            )
        if not tensor.is_floating_point():
            raise ModelError(f"{self._path}: tensor {given} has dtype {tensor.dtype}, not a floating one")
        return tensor


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    for theirs, ours in renamed.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _restored(name: str, renamed: Mapping[str, str]) -> str:
    """Return the layout's own name of one of ours: what a message should say."""
    return _renamed(name, {ours: theirs for theirs, ours in renamed.items()})
