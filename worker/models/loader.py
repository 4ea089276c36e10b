"""Local Hugging Face directories: weights into a `Decoder`, tokenizer files into a tokenizer.

Reads safetensors, one file or sharded with an index. Never touches the network. Knows tensor names and shapes of the
Llama family; every mismatch is a `ModelError` that names the tensor.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.models.basis import Basis
from worker.models.config import DecoderConfig, ModelError, read_config
from worker.models.decoder import Decoder, DecoderLayer, DecoderWeights
from worker.models.integer import IntegerLinear
from worker.models.linear import Linear, make_linear
from worker.models.norm import RmsNorm
from worker.models.packed import Packing, RefinedHead, is_integer, pack_linear
from worker.models.rope import pair_up

HALF_DTYPES = (torch.bfloat16, torch.float16)
VERBATIM_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of transformers' tokenizer that adds nothing to `tokenizer.json`, before and since 5."""


def load_decoder(
    path: Path, *, dtype: torch.dtype, device: torch.device, packing: Packing | None = None
) -> Decoder:
    """Load a model directory.

    Args:
        path: directory with `config.json` and `model.safetensors` or `model.safetensors.index.json`.
        dtype: float64, float32 or bfloat16; weights are converted to it.
        device: where weights, caches and forwards live.
        packing: how projections are packed (CPU, dtype bfloat16); the sum of the layers' outputs is kept in float32.

    Raises:
        ModelError: the directory, a config field or a tensor is missing, unsupported or of the wrong size.
    """
    config = read_config(path)
    with torch.no_grad():
        return Decoder(config, _Checkpoint(path, config, dtype, device, packing).weights(), dtype)


def output_weight(path: Path) -> Tensor:  # [vocab_size, hidden_size], as stored
    """Read the output head of a directory: the embedding where the two are tied."""
    config, files = read_config(path), tensor_files(path)
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    if name not in files:
        raise ModelError(f"{path}: tensor {name} is missing")
    try:
        with safe_open(str(files[name]), framework="pt") as file:
            weight: Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{files[name]}: tensor {name} cannot be read: {error}") from error
    return weight


def load_tokenizer(path: Path) -> Any:
    """Load a directory's tokenizer (a transformers `PreTrainedTokenizerFast`), offline.

    Raises:
        ModelError: there is no tokenizer, or it cannot be read.
    """
    # takes seconds to import: only those who need text pay
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not (path / "tokenizer.json").exists():
        raise ModelError(f"{path}: no tokenizer.json")
    # AutoTokenizer goes by the model's type for some (qwen2), whatever the directory declares.
    loader = PreTrainedTokenizerFast if _is_verbatim(path) else AutoTokenizer
    try:
        return loader.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers documents no error types here
        raise ModelError(f"{path}: the tokenizer cannot be loaded: {error}") from error


def token_count(tokenizer: Any) -> int:
    """Return the number of ids a tokenizer spans: the highest plus one, added tokens and holes included."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def _is_verbatim(path: Path) -> bool:
    """Whether the directory says that `tokenizer.json` is the whole tokenizer."""
    try:
        declared = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))["tokenizer_class"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return declared in VERBATIM_CLASSES


class _Checkpoint:
    """The tensors of one directory, read one by one, checked, placed."""

    def __init__(
        self,
        path: Path,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        packing: Packing | None,
    ) -> None:
        self._path = path
        self._config = config
        self._dtype = dtype
        self._wide = torch.float32 if packing else dtype
        self._packing = packing
        self._device = device
        self._basis = Basis(config.hidden_size) if is_integer(packing) else None
        self._files = tensor_files(path)  # tensor name -> file
        self._open: dict[Path, Any] = {}

    def weights(self) -> DecoderWeights:
        """Read everything."""
        config = self._config
        if config.tie_word_embeddings:
            self._files.pop("lm_head.weight", None)  # some writers store the embedding twice
        embedding = self._placed("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        head_weight = (
            embedding
            if config.tie_word_embeddings
            else self._read("lm_head.weight", config.vocab_size, config.hidden_size)
        )
        weights = DecoderWeights(
            embedding=embedding,
            layers=[self._layer(f"model.layers.{index}.") for index in range(config.num_layers)],
            final_norm=self._norm("model.norm.weight"),
            head=self._head(head_weight),
            basis=self._basis,
        )
        unused = sorted(name for name in self._files if not name.endswith("rotary_emb.inv_freq"))
        if unused:
            raise ModelError(
                f"{self._path}: tensor {unused[0]} is not used by this architecture ({len(unused)} such)"
            )
        return weights

    def _layer(self, prefix: str) -> DecoderLayer:
        config = self._config
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        input_norm, qkv = self._behind_norm(
            f"{prefix}input_layernorm.weight",
            [f"{attention}{name}_proj" for name in "qkv"],
            [queries, keys, keys],
            bias=config.qkv_bias,
            paired_heads=[config.num_heads, config.num_kv_heads],
        )
        post_attention_norm, gate_up = self._behind_norm(
            f"{prefix}post_attention_layernorm.weight",
            [f"{mlp}gate_proj", f"{mlp}up_proj"],
            [inner, inner],
            bias=config.mlp_bias,
        )
        return DecoderLayer(
            input_norm=input_norm,
            head_norm=self._head_norm(attention) if config.qk_norm else None,
            qkv=qkv,
            output=self._adding(f"{attention}o_proj", queries, bias=config.output_bias),
            post_attention_norm=post_attention_norm,
            gate_up=gate_up,
            down=self._adding(f"{mlp}down_proj", inner, bias=config.mlp_bias),
        )

    def _head(self, weight: Tensor) -> Linear:
        """Make the output head of `[vocab_size, hidden_size]`; a tied embedding is shared, not copied."""
        if not self._packing:
            placed = weight.to(self._device, self._dtype)
            head = make_linear(placed, None, self._dtype, self._device)
            return RefinedHead(head, placed) if self._dtype in HALF_DTYPES else head
        packed = pack_linear(weight, None, self._packing)
        if isinstance(packed, IntegerLinear):
            return packed  # its results are float32
        exact = weight if self._config.tie_word_embeddings else weight.to(self._device, self._dtype)
        return RefinedHead(packed, exact)

    def _head_norm(self, attention: str) -> Tensor:  # [num_heads + num_kv_heads, head_dim]
        """Lay the norms of query and key heads out like the heads, so that one multiplication does both."""
        config = self._config
        norms = [
            pair_up(self._placed(f"{attention}{name}_norm.weight", config.head_dim), 1).to(self._dtype)
            for name in "qk"
        ]
        heads = (config.num_heads, config.num_kv_heads)
        return torch.cat([norm.expand(n, -1) for norm, n in zip(norms, heads, strict=True)]).contiguous()

    def _behind_norm(
        self,
        norm_name: str,
        names: list[str],
        widths: list[int],
        *,
        bias: bool,
        paired_heads: Sequence[int] = (),
    ) -> tuple[RmsNorm | None, Linear]:
        """Read a norm, and stack the projections behind it into one; None: that one does the norm's work as well."""
        norm = self._placed(norm_name, self._config.hidden_size)
        weight, offsets = self._stacked(names, widths, self._config.hidden_size, bias, paired_heads)
        if self._basis is not None:
            read = self._basis.reading(weight, norm)
            return None, IntegerLinear(read, offsets, norm_eps=self._config.rms_norm_eps)
        return RmsNorm(norm, self._config.rms_norm_eps), self._project(weight, offsets)

    def _adding(self, name: str, in_features: int, *, bias: bool) -> Linear:
        """Read a projection whose result is added to the stream."""
        weight, offsets = self._stacked([name], [self._config.hidden_size], in_features, bias)
        if self._basis is not None:
            weight = self._basis.writing(weight)
            offsets = None if offsets is None else self._basis.writing(offsets)
        return self._project(weight, offsets)

    def _stacked(
        self,
        names: list[str],
        widths: list[int],
        in_features: int,
        bias: bool,
        paired_heads: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:  # [sum of widths, in_features], [sum of widths]
        """Read projections of the same input.

        The first of them give so many heads each as `paired_heads` says, which get the layout of pairs.
        """
        weights = [
            self._read(f"{name}.weight", width, in_features)
            for name, width in zip(names, widths, strict=True)
        ]
        biases = (
            [self._read(f"{name}.bias", width) for name, width in zip(names, widths, strict=True)]
            if bias
            else []
        )
        for parts in (weights, biases):
            parts[: len(paired_heads)] = map(pair_up, parts, paired_heads)
        return torch.cat(weights), torch.cat(biases) if bias else None

    def _project(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self._packing:
            return pack_linear(weight, bias, self._packing)
        return make_linear(weight, bias, self._dtype, self._device)

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._placed(name, self._config.hidden_size), self._config.rms_norm_eps)

    def _placed(self, name: str, *shape: int) -> Tensor:
        return self._read(name, *shape).to(self._device, self._wide)

    def _read(self, name: str, *shape: int) -> Tensor:
        file = self._files.pop(name, None)
        if file is None:
            raise ModelError(f"{self._path}: tensor {name} is missing")
        try:
            if file not in self._open:
                self._open[file] = safe_open(str(file), framework="pt")
            tensor: Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: tensor {name} cannot be read: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{file}: tensor {name} has shape {tuple(tensor.shape)}, config.json says {shape}"
            )
        if not tensor.is_floating_point():
            raise ModelError(
                f"{file}: tensor {name} has dtype {tensor.dtype}; only floating dtypes are supported"
            )
        return tensor


def tensor_files(path: Path) -> dict[str, Path]:
    """Map tensor names to the files that hold them."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: path / file for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index}: cannot be read: {error!r}") from error
    single = path / "model.safetensors"
    if not single.exists():
        raise ModelError(f"{path}: neither model.safetensors nor model.safetensors.index.json is there")
    try:
        with safe_open(str(single), framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{single}: cannot be read: {error}") from error
