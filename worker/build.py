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
from worker.device import available_cores, choose_device, choose_precision, cpu_name
from worker.engine import Engine
from worker.engine_thread import EngineThread
from worker.graphs.capture import Capture, CudaCapture
from worker.graphs.networks import capture_graphs
from worker.memory import Placed, PlacedHead, available_bytes, check_budget, plan_memory
from worker.model_runner import ModelRunner
from worker.models.config import read_config
from worker.models.loader import load_tokenizer, token_count
from worker.models.locate import locate_model, model_name
from worker.pairing import (
    build_drafter,
    check_width,
    draft_cache_tokens,
    head_directory,
    load_model,
    target_cache_tokens,
)
from worker.profile import PROFILE_TOKENS, Profiler, load_or_measure, profile_path, sources_digest
from worker.protocol import LatencyProfile, SpecInfo
from worker.scheduler import Scheduler
from worker.self_check import check_every_tier
from worker.spec.draft import Drafter
from worker.spec.eagle_layouts import read_head_sizes
from worker.spec.plan import PlanTable
from worker.spec.runtime_state import SpecRuntimeState, build_runtime_states
from worker.spec.stats import StatsRecorder

logger = logging.getLogger(__name__)


def model_directory(path: str) -> Path:
    """Return the directory of a `path` setting, fetching or converting the model where that is to be done."""
    return locate_model(path)


def build_engine(
    config: WorkerConfig, *, clock: Callable[[], float] = time.monotonic, capture: Capture | None = None
) -> EngineThread:
    """Load, size, warm up and check everything.

    Args:
        config: what is to be served.
        clock: monotonic seconds.
        capture: captures the forwards of rounds; None: CUDA graphs on a GPU, else none.

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
    _capture_graphs(config, parts, device, capture)
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


def _graph_batch_size(config: WorkerConfig) -> int:
    """Return the largest batch that can run and is to have graphs."""
    return min(config.engine.cuda_graph_max_batch_size, config.engine.max_running_requests)


def _capture_graphs(
    config: WorkerConfig, parts: "_Parts", device: torch.device, capture: Capture | None
) -> None:
    """Capture before anything is stored; shapes that cannot be captured are run without, and counted."""
    if not _graph_batch_size(config) or (capture is None and device.type != "cuda"):
        return
    began = time.perf_counter()
    try:
        count = capture_graphs(
            parts.runner,
            parts.drafter,
            capture or CudaCapture(),
            candidate_steps=config.spec.candidate_steps,
            max_batch_size=_graph_batch_size(config),
        )
    except Exception:
        logger.exception("capturing failed: rounds of the shapes that are missing run without a graph")
    else:
        logger.info("%d graphs captured in %.1f s", count, time.perf_counter() - began)


def _check_memory(config: WorkerConfig, directory: Path, device: torch.device) -> None:
    """Tell what models and caches will take, and refuse what does not fit, before anything is loaded."""
    engine = config.engine
    has_graphs = device.type == "cuda" and _graph_batch_size(config) > 0
    slots = engine.max_running_requests + has_graphs  # graphs fill batches up from a slot of their own
    target = read_config(directory)
    draft: Placed | PlacedHead | None = None
    if config.spec.has_head:
        sizes = read_head_sizes(head_directory(config), target)
        draft = PlacedHead(sizes.num_weights, slots, draft_cache_tokens(config), sizes.numbers_per_token)
    if config.spec.drafter == "model":
        draft_config = read_config(model_directory(config.spec.draft_model_path or ""))
        draft = Placed(draft_config, slots, draft_cache_tokens(config))
    precision = choose_precision(config.model.dtype, device)
    budget = plan_memory(
        Placed(target, slots, target_cache_tokens(config)),
        draft,
        dtype=precision.dtype,
        packing=precision.packing,
        device=device,
        verify_rows=engine.max_running_requests * config.spec.most_draft_tokens,
        step_rows=engine.max_num_batched_tokens,
    )
    logger.info("memory: %s", budget)
    check_budget(budget, max_kv_bytes=engine.max_kv_bytes, available=available_bytes(device))


class _Parts(NamedTuple):
    """What is loaded once, whoever assembles an engine over it."""

    runner: ModelRunner
    drafter: Drafter | None
    states: dict[int, SpecRuntimeState]


def _load_parts(config: WorkerConfig, directory: Path, tokenizer: Any, device: torch.device) -> _Parts:
    engine = config.engine
    decoder = load_model(config, directory, device)
    limit = decoder.config.max_position_embeddings
    if engine.max_context_tokens > limit:
        raise ValueError(
            f"engine.max_context_tokens {engine.max_context_tokens} is above the model's limit {limit}"
        )
    check_width(decoder, tokenizer, directory)
    runner = ModelRunner(
        decoder,
        num_slots=engine.max_running_requests,
        max_tokens=target_cache_tokens(config),
        num_tokens=token_count(tokenizer),
    )
    states = build_runtime_states(
        config.spec.candidate_steps,
        max_batch_size=engine.max_running_requests,
        device=device,
        num_draft_tokens=config.spec.draft_tokens_at,
    )
    return _Parts(runner, build_drafter(config, tokenizer, runner, directory), states)


def _describe(config: WorkerConfig, directory: Path, parts: _Parts, device: torch.device) -> SpecInfo:
    engine, spec = config.engine, config.spec
    obstacle = _why_not_adapted(spec)
    return SpecInfo(
        boot_id=uuid.uuid4().hex,
        version=version("slipstream"),
        model=config.model.name or model_name(config.model.path),
        drafter=spec.drafter,
        topk=spec.topk,
        device=_device_name(device),
        dtype=choose_precision(config.model.dtype, device).name,
        candidate_steps=spec.candidate_steps,
        num_draft_tokens=[spec.draft_tokens_at(num_steps) for num_steps in spec.candidate_steps],
        fallback_num_steps=spec.num_steps,
        fast_path=parts.drafter.fast_path if parts.drafter else "not applicable",
        max_running_requests=engine.max_running_requests,
        max_context_tokens=engine.max_context_tokens,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        adaptation=obstacle is None,
        adaptation_off_reason=obstacle,
    )


def _why_not_adapted(spec: SpecConfig) -> str | None:
    """Return why a controller must not choose the depth; None where it may."""
    if len(spec.candidate_steps) == 1:
        return "spec.candidate_steps has one tier only"
    if spec.topk > 1:
        # A position's acceptance is comparable across depths only while every depth drafts the same there.
        return f"spec.topk is {spec.topk}: how wide a tree is at a position depends on its depth"
    return None


def _assemble(
    config: WorkerConfig,
    info: SpecInfo,
    parts: _Parts,
    *,
    fallback_num_steps: int,
    clock: Callable[[], float],
) -> EngineThread:
    engine, num_draft_tokens = config.engine, config.spec.most_draft_tokens
    whole = engine.max_running_requests * (engine.max_context_tokens + num_draft_tokens)
    max_kv_tokens = engine.max_kv_tokens or whole
    scheduler = Scheduler(
        parts.runner.kv,
        max_running_requests=engine.max_running_requests,
        max_waiting_requests=engine.max_waiting_requests,
        max_context_tokens=engine.max_context_tokens,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        num_draft_tokens=num_draft_tokens,
        max_kv_tokens=max_kv_tokens,
    )
    plans = PlanTable(
        boot_id=info.boot_id,
        candidate_steps=config.spec.candidate_steps,
        fallback_num_steps=fallback_num_steps,
        num_draft_tokens=info.num_draft_tokens,
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
    deepest = spec.candidate_steps[-1]
    room = min(PROFILE_TOKENS, engine.max_context_tokens - 1)
    if parts.drafter and parts.drafter.max_context_tokens:
        room = min(room, parts.drafter.max_context_tokens)
    context_tokens = max(2, room - deepest)
    key = {
        "model": str(directory.resolve()),
        "draft_model": str(head_directory(config)) if spec.has_head else spec.draft_model_path,
        "drafter": info.drafter,
        "device": info.device,
        "cpu": cpu_name(),
        "dtype": info.dtype,
        "graphs": _graph_batch_size(config) if parts.runner.graphs is not None else 0,
        "threads": torch.get_num_threads(),
        "tiers": info.candidate_steps,
        "num_draft_tokens": info.num_draft_tokens,
        "topk": info.topk,
        "batch_sizes": batch_sizes,
        "context_tokens": context_tokens,
        "versions": [sources_digest(), torch.__version__],
    }

    def measure() -> LatencyProfile:
        profiler = Profiler(parts.runner, parts.drafter, parts.states, context_tokens=context_tokens)
        return profiler.measure(batch_sizes, engine.profile_seconds)

    return load_or_measure(profile_path(engine.profile_dir, key), measure)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
