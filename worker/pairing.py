"""The target's partner: loading models at the configured precision, and the drafter that goes with a target.

Two models fit together when their tokenizers agree id by id. Knows nothing about engines or caches' contents.
"""

import logging
from pathlib import Path
from typing import Any

import torch

from worker.config import WorkerConfig
from worker.device import choose_precision
from worker.model_runner import ModelRunner
from worker.models.config import ModelError
from worker.models.decoder import Decoder
from worker.models.loader import load_decoder, load_tokenizer, token_count
from worker.models.locate import locate_model
from worker.spec.composite import CompositeDrafter
from worker.spec.draft import Drafter
from worker.spec.eagle import EagleDrafter
from worker.spec.eagle_layouts import load_head
from worker.spec.model_draft import ModelDrafter
from worker.spec.ngram import NgramDrafter

logger = logging.getLogger(__name__)


def load_model(config: WorkerConfig, directory: Path, device: torch.device) -> Decoder:
    """Load a model directory as `[model] dtype` says."""
    precision = choose_precision(config.model.dtype, device)
    return load_decoder(directory, dtype=precision.dtype, device=device, packing=precision.packing)


def draft_cache_tokens(config: WorkerConfig) -> int:
    """Room per slot of the draft's cache: a row near its end still runs the round's whole depth.

    What it drafts past its budget is not verified. A tree stores `topk` nodes per step.
    """
    return config.engine.max_context_tokens + config.spec.topk * config.spec.candidate_steps[-1] + 1


def target_cache_tokens(config: WorkerConfig) -> int:
    """Room per slot of the target's cache: a chain ends where its text may, a tree's nodes lie side by side."""
    branches = config.spec.most_draft_tokens if config.spec.topk > 1 else 0
    return config.engine.max_context_tokens + branches


def build_drafter(
    config: WorkerConfig, tokenizer: Any, target: ModelRunner, target_path: Path
) -> Drafter | None:
    """Make the configured drafter; None decodes plainly. Raises ModelError for a model that does not fit."""
    spec = config.spec
    if spec.drafter == "none":
        return None
    if spec.drafter == "ngram":
        return NgramDrafter(ngram_min=spec.ngram_min, ngram_max=spec.ngram_max, device=target.device)
    if spec.has_head:
        head = _build_eagle_drafter(config, target, target_path)
        if spec.drafter == "eagle":
            return head
        longest = spec.ngram_max
        return CompositeDrafter(
            NgramDrafter(ngram_min=longest, ngram_max=longest, device=target.device), head
        )
    return _build_model_drafter(config, tokenizer, target)


def head_directory(config: WorkerConfig) -> Path:
    """Return where the configured EAGLE head is; ModelError where there is no such directory."""
    directory = Path(config.spec.draft_model_path or "")
    if not directory.is_dir():
        raise ModelError(f"spec.draft_model_path: {directory}: no such directory")
    return directory


def _build_eagle_drafter(config: WorkerConfig, target: ModelRunner, target_path: Path) -> EagleDrafter:
    precision = choose_precision(config.model.dtype, target.device)
    head = load_head(
        head_directory(config),
        target.decoder,
        target_path,
        num_tokens=target.vocab_size,
        packing=precision.packing,
    )
    _warn_of_limit(head.config.layer.max_position_embeddings, config)
    return EagleDrafter(
        head,
        target,
        topk=config.spec.topk,
        max_rows=max(config.engine.cuda_graph_max_batch_size, config.engine.max_running_requests, 1),
        max_tokens=draft_cache_tokens(config),
        deepest_num_steps=config.spec.candidate_steps[-1],
        use_fast_path=config.spec.fast_path == "auto",
        catch_up_chunk_tokens=config.engine.prefill_chunk_tokens,
    )


def _warn_of_limit(positions: int, config: WorkerConfig) -> None:
    if positions < config.engine.max_context_tokens:
        logger.warning("the draft model has %d positions: texts beyond are decoded without drafts", positions)


def _build_model_drafter(config: WorkerConfig, tokenizer: Any, target: ModelRunner) -> ModelDrafter:
    spec, rows = config.spec, config.engine.max_running_requests
    directory = locate_model(spec.draft_model_path or "")
    check_same_tokens(tokenizer, load_tokenizer(directory), directory)
    decoder = load_model(config, directory, target.device)
    check_width(decoder, tokenizer, directory)
    _warn_of_limit(decoder.config.max_position_embeddings, config)
    runner = ModelRunner(
        decoder,
        num_slots=rows,
        max_tokens=draft_cache_tokens(config),
        num_tokens=token_count(tokenizer),
    )
    runner.launches = target.launches
    return ModelDrafter(
        runner,
        topk=spec.topk,
        max_rows=max(config.engine.cuda_graph_max_batch_size, rows, 1),
        use_fast_path=spec.fast_path == "auto",
        catch_up_chunk_tokens=config.engine.prefill_chunk_tokens,
    )


def check_width(decoder: Decoder, tokenizer: Any, directory: Path) -> None:
    """Refuse an embedding without a row for every token; a wider one is padded, and its padding is never drawn."""
    width, tokens = decoder.config.vocab_size, token_count(tokenizer)
    if width < tokens:
        raise ModelError(f"{directory}: vocab_size {width} is below the tokenizer's {tokens} tokens")


def check_same_tokens(target: Any, draft: Any, directory: Path) -> None:
    """Compare two tokenizers by their token strings, id by id: equal sizes prove nothing.

    Raises:
        ModelError: naming the first id that means something else to the draft model.
    """
    ours, theirs = (
        {id_: token for token, id_ in tokenizer.get_vocab().items()} for tokenizer in (target, draft)
    )
    for id_ in sorted(ours.keys() | theirs.keys()):
        if ours.get(id_) != theirs.get(id_):
            raise ModelError(
                f"{directory}: the draft's tokenizer differs from the target's at id {id_}: "
                f"{theirs.get(id_)!r} instead of {ours.get(id_)!r}"
            )
