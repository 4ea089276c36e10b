"""Building an engine from a configuration: models, caches, tiers, self-check. Slow; done once, before serving.

The only module that knows how the parts fit together; none of them knows the configuration.
"""

import logging
import time
import uuid
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from worker.config import SpecConfig, WorkerConfig
from worker.device import available_cores, choose_device, choose_precision
from worker.engine import Engine
from worker.engine_thread import EngineThread
from worker.memory import Placed, available_bytes, check_budget, plan_memory
from worker.model_runner import ModelRunner
from worker.models.config import ModelError, read_config
from worker.models.decoder import Decoder
from worker.models.loader import load_decoder, load_tokenizer, token_count
from worker.models.locate import locate_model, model_name
from worker.profile import PROFILE_CONTEXT_TOKENS, Profiler, load_or_measure, profile_path
from worker.protocol import LatencyProfile, SpecInfo
from worker.scheduler import Scheduler
from worker.self_check import check_every_tier
from worker.spec.draft import Drafter
from worker.spec.model_draft import ModelDrafter
from worker.spec.ngram import NgramDrafter
from worker.spec.plan import PlanTable
from worker.spec.runtime_state import SpecRuntimeState, build_runtime_states
from worker.spec.stats import StatsRecorder

logger = logging.getLogger(__name__)


def model_directory(path: str) -> Path:
    """Return the directory of a `path` setting, fetching or converting the model where that is to be done."""
    return locate_model(path)


def build_engine(config: WorkerConfig, *, clock: Callable[[], float] = time.monotonic) -> EngineThread:
    """Load, size, warm up and check everything.

    Raises:
        ModelError: a model cannot be loaded, or the two do not fit together.
        ValueError: a setting does not fit the machine, its memory or the model.
        SelfCheckFailed: a tier does not give plain decoding's tokens.
    """
    torch.set_num_threads(config.model.threads or available_cores())
    device = choose_device(config.model.device)
    directory = model_directory(config.model.path)
    _check_memory(config, directory, device)
    tokenizer = load_tokenizer(directory)
    parts = _load_parts(config, directory, tokenizer, device)
    info = _describe(config, directory, parts, device)
    check_every_tier(
        lambda num_steps: _assemble(config, info, parts, fallback_num_steps=num_steps, clock=clock),
        parts.states,
        parts.runner,
        parts.drafter,
    )
    if config.engine.profile_seconds:
        info = info.model_copy(update={"profile": _profile(config, info, directory, parts)})
    return _assemble(config, info, parts, fallback_num_steps=config.spec.num_steps, clock=clock)


def _check_memory(config: WorkerConfig, directory: Path, device: torch.device) -> None:
    """Tell what models and caches will take, and refuse what does not fit, before anything is loaded."""
    engine, deepest = config.engine, config.spec.candidate_steps[-1]
    slots = engine.max_running_requests
    draft = None
    if config.spec.drafter == "model":
        draft_config = read_config(model_directory(config.spec.draft_model_path or ""))
        draft = Placed(draft_config, slots, _draft_tokens(config))
    precision = choose_precision(config.model.dtype, device)
    budget = plan_memory(
        Placed(read_config(directory), slots, engine.max_context_tokens),
        draft,
        dtype=precision.dtype,
        packed=precision.packed,
        device=device,
        verify_rows=slots * (deepest + 1),
        step_rows=engine.max_num_batched_tokens,
    )
    logger.info("memory: %s", budget)
    check_budget(budget, max_kv_bytes=engine.max_kv_bytes, available=available_bytes(device))


def _draft_tokens(config: WorkerConfig) -> int:
    """Room per slot of the draft's cache: a row near its end still runs the round's whole depth.

    What it drafts past its budget is not verified.
    """
    return config.engine.max_context_tokens + config.spec.candidate_steps[-1] + 1


def _load(config: WorkerConfig, directory: Path, device: torch.device) -> Decoder:
    precision = choose_precision(config.model.dtype, device)
    return load_decoder(directory, dtype=precision.dtype, device=device, packed=precision.packed)


class _Parts(NamedTuple):
    """What is loaded once, whoever assembles an engine over it."""

    runner: ModelRunner
    drafter: Drafter | None
    states: dict[int, SpecRuntimeState]


def _load_parts(config: WorkerConfig, directory: Path, tokenizer: Any, device: torch.device) -> _Parts:
    engine = config.engine
    decoder = _load(config, directory, device)
    limit = decoder.config.max_position_embeddings
    if engine.max_context_tokens > limit:
        raise ValueError(
            f"engine.max_context_tokens {engine.max_context_tokens} is above the model's limit {limit}"
        )
    _check_width(decoder, tokenizer, directory)
    runner = ModelRunner(
        decoder,
        num_slots=engine.max_running_requests,
        max_tokens=engine.max_context_tokens,
        num_tokens=token_count(tokenizer),
    )
    states = build_runtime_states(
        config.spec.candidate_steps, max_batch_size=engine.max_running_requests, device=device
    )
    return _Parts(runner, _build_drafter(config, tokenizer, device), states)


def _describe(config: WorkerConfig, directory: Path, parts: _Parts, device: torch.device) -> SpecInfo:
    engine, spec = config.engine, config.spec
    has_choice = len(spec.candidate_steps) > 1
    return SpecInfo(
        boot_id=uuid.uuid4().hex,
        version=version("slipstream"),
        model=config.model.name or model_name(config.model.path),
        drafter=spec.drafter,
        topk=spec.topk,
        device=_device_name(device),
        dtype=choose_precision(config.model.dtype, device).name,
        candidate_steps=spec.candidate_steps,
        fallback_num_steps=spec.num_steps,
        fast_path=parts.drafter.fast_path if parts.drafter else "not applicable",
        max_running_requests=engine.max_running_requests,
        max_context_tokens=engine.max_context_tokens,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        adaptation=has_choice,
        adaptation_off_reason=None if has_choice else "spec.candidate_steps has one tier only",
    )


def _assemble(
    config: WorkerConfig,
    info: SpecInfo,
    parts: _Parts,
    *,
    fallback_num_steps: int,
    clock: Callable[[], float],
) -> EngineThread:
    engine, deepest = config.engine, config.spec.candidate_steps[-1]
    whole = engine.max_running_requests * (engine.max_context_tokens + deepest + 1)
    max_kv_tokens = engine.max_kv_tokens or whole
    scheduler = Scheduler(
        parts.runner.kv,
        max_running_requests=engine.max_running_requests,
        max_waiting_requests=engine.max_waiting_requests,
        max_context_tokens=engine.max_context_tokens,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        deepest_num_steps=deepest,
        max_kv_tokens=max_kv_tokens,
    )
    plans = PlanTable(
        boot_id=info.boot_id,
        candidate_steps=config.spec.candidate_steps,
        fallback_num_steps=fallback_num_steps,
    )
    recorder = StatsRecorder()
    core = Engine(
        info=info,
        runner=parts.runner,
        drafter=parts.drafter,
        states=parts.states,
        scheduler=scheduler,
        plans=plans,
        recorder=recorder,
        clock=clock,
    )
    return EngineThread(
        core,
        scheduler=scheduler,
        plans=plans,
        recorder=recorder,
        max_kv_tokens=max_kv_tokens,
        hang_seconds=engine.hang_seconds,
        clock=clock,
    )


def _profile(config: WorkerConfig, info: SpecInfo, directory: Path, parts: _Parts) -> LatencyProfile:
    """Measure what rounds cost, or read what an earlier start measured under the same conditions."""
    engine, spec = config.engine, config.spec
    edges = [1 << power for power in range(engine.max_running_requests.bit_length())]
    batch_sizes = sorted(
        {min(edge, engine.max_running_requests) for edge in edges} | {engine.max_running_requests}
    )
    room = engine.max_context_tokens - spec.candidate_steps[-1] - 1
    limit = parts.drafter.max_context_tokens if parts.drafter else None
    context_tokens = max(2, min(PROFILE_CONTEXT_TOKENS, room, (limit or room) - spec.candidate_steps[-1]))
    key = {
        "model": str(directory.resolve()),
        "draft_model": spec.draft_model_path,
        "drafter": info.drafter,
        "device": info.device,
        "dtype": info.dtype,
        "threads": torch.get_num_threads(),
        "tiers": info.candidate_steps,
        "batch_sizes": batch_sizes,
        "context_tokens": context_tokens,
        "versions": [info.version, torch.__version__],
    }

    def measure() -> LatencyProfile:
        profiler = Profiler(parts.runner, parts.drafter, parts.states, context_tokens=context_tokens)
        return profiler.measure(batch_sizes, engine.profile_seconds)

    return load_or_measure(profile_path(engine.profile_dir, key), measure)


def _build_drafter(config: WorkerConfig, tokenizer: Any, device: torch.device) -> Drafter | None:
    spec, engine = config.spec, config.engine
    if spec.drafter == "none":
        return None
    if spec.drafter == "ngram":
        return NgramDrafter(ngram_min=spec.ngram_min, ngram_max=spec.ngram_max, device=device)
    return _build_model_drafter(spec, config, tokenizer, device, rows=engine.max_running_requests)


def _build_model_drafter(
    spec: SpecConfig, config: WorkerConfig, tokenizer: Any, device: torch.device, *, rows: int
) -> ModelDrafter:
    directory = model_directory(spec.draft_model_path or "")
    check_same_tokens(tokenizer, load_tokenizer(directory), directory)
    decoder = _load(config, directory, device)
    _check_width(decoder, tokenizer, directory)
    limit = decoder.config.max_position_embeddings
    if limit < config.engine.max_context_tokens:
        logger.warning("the draft model has %d positions: texts beyond are decoded without drafts", limit)
    runner = ModelRunner(
        decoder,
        num_slots=rows,
        max_tokens=_draft_tokens(config),
        num_tokens=token_count(tokenizer),
    )
    return ModelDrafter(
        runner,
        topk=spec.topk,
        max_rows=max(config.engine.cuda_graph_max_batch_size, rows, 1),
        use_fast_path=spec.fast_path == "auto",
        catch_up_chunk_tokens=config.engine.prefill_chunk_tokens,
    )


def _check_width(decoder: Decoder, tokenizer: Any, directory: Path) -> None:
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


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
