"""A target, a drafter and requests in the middle of their texts: rounds are run one by one, with graphs or without."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu_check.models import Sizes, random_head
from worker.batch import DecodeBatch
from worker.graphs.capture import Capture, CudaCapture
from worker.graphs.forward import GraphedForward
from worker.graphs.networks import capture_graphs
from worker.graphs.tape import TapeCapture
from worker.model_runner import ModelRunner
from worker.models.attention import Segment
from worker.models.decoder import Decoder
from worker.request import Request, SamplingParams
from worker.spec.cached_draft import CachedDrafter
from worker.spec.eagle import EagleDrafter
from worker.spec.model_draft import ModelDrafter
from worker.spec.runtime_state import build_runtime_states
from worker.spec.verify import Verdict, verify
from worker.transfer import to_device

GREEDY = SamplingParams(max_tokens=64, temperature=0)


class Limits(NamedTuple):
    """How much is tried."""

    tiers: Sequence[int]
    max_batch_size: int
    max_tokens: int
    """Room per slot: the longest context that graphs are captured for."""
    seconds: float
    """For each table of times."""


class Rig:
    """Everything that a round needs. Caches hold random numbers, so any length of text is there at once."""

    def __init__(
        self, sizes: Sizes, target: Decoder, draft: Decoder | None, limits: Limits, device: torch.device
    ) -> None:
        """Put a target together with a draft model, or with an EAGLE head where `draft` is None."""
        self.limits, self.device = limits, device
        vocab_size = target.config.vocab_size
        deepest = limits.tiers[-1]
        rows = limits.max_batch_size
        self.runner = ModelRunner(target, num_slots=rows, max_tokens=limits.max_tokens, num_tokens=vocab_size)
        self.drafter: CachedDrafter
        if draft is None:
            self.drafter = EagleDrafter(
                random_head(sizes, target),
                self.runner,
                max_rows=rows,
                max_tokens=limits.max_tokens,
                deepest_num_steps=deepest,
                catch_up_chunk_tokens=256,
            )
        else:
            runner = ModelRunner(draft, num_slots=rows, max_tokens=limits.max_tokens, num_tokens=vocab_size)
            runner.launches = self.runner.launches
            self.drafter = ModelDrafter(runner, max_rows=rows, catch_up_chunk_tokens=256)
        self.states = build_runtime_states(limits.tiers, max_batch_size=rows, device=device)
        self.num_graphs = capture_graphs(
            self.runner,
            self.drafter,
            new_capture(device),
            candidate_steps=limits.tiers,
            max_batch_size=rows,
        )
        self._fill_caches()
        self.requests = [self._request(slot) for slot in range(rows)]

    def graphs(self) -> dict[str, GraphedForward]:
        """Every captured forward by its stage."""
        found = {"verify": self.runner.graphs}
        if isinstance(self.drafter, EagleDrafter):
            found |= {"extend": self.drafter.extend_graphs, "draft step": self.drafter.step_graphs}
        if isinstance(self.drafter, ModelDrafter):
            runner = self.drafter.runner
            found |= {"draft first": runner.last_row_graphs, "draft step": runner.graphs}
        return {name: graphs for name, graphs in found.items() if graphs is not None}

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run without graphs for a while."""
        owners: list[tuple[object, str]] = [(self.runner, "graphs"), (self.runner, "last_row_graphs")]
        if isinstance(self.drafter, EagleDrafter):
            owners += [(self.drafter, "extend_graphs"), (self.drafter, "step_graphs")]
        if isinstance(self.drafter, ModelDrafter):
            owners += [(self.drafter.runner, "graphs"), (self.drafter.runner, "last_row_graphs")]
        kept = [getattr(owner, name) for owner, name in owners]
        for owner, name in owners:
            setattr(owner, name, None)
        try:
            yield
        finally:
            for (owner, name), graphs in zip(owners, kept, strict=True):
                setattr(owner, name, graphs)

    @contextmanager
    def slow_path(self) -> Iterator[None]:
        """Organise drafts the long way for a while."""
        uses_fast_path, self.drafter._use_fast_path = self.drafter._use_fast_path, False
        try:
            yield
        finally:
            self.drafter._use_fast_path = uses_fast_path

    @torch.inference_mode()
    def draft(self, batch_size: int, num_steps: int) -> Tensor:  # [batch_size, num_steps]
        """Run the draft stage of a round behind one that committed one token."""
        requests = self.requests[:batch_size]
        self.drafter.apply_runtime_state(self.states[num_steps])
        for request in requests:
            self.drafter.rewind(request.held_slot, request.committed - 2)
        batch = DecodeBatch(requests, num_steps, [num_steps] * batch_size)
        return self.drafter.draft(batch).draft_tokens

    @torch.inference_mode()
    def verify_logits(self, batch_size: int, num_steps: int, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """Run the target over roots and drafts → (rows, their logits)."""
        requests = self.requests[:batch_size]
        roots = to_device([request.prompt_ids[-1] for request in requests], self.device)
        rows = self.states[num_steps].fill(roots, drafts, [num_steps] * batch_size)
        segments = [Segment(r.held_slot, r.committed - 1, 1 + num_steps) for r in requests]
        return rows, self.runner.decode(rows.clamp(min=0), segments)

    def plain_runner(self) -> ModelRunner:
        """Return the target as a worker without a drafter has it: no features kept, graphs of plain rounds only."""
        kv = self.runner.kv
        plain = ModelRunner(
            self.runner.decoder,
            num_slots=kv.num_slots,
            max_tokens=kv.max_tokens,
            num_tokens=self.runner.vocab_size,
        )
        capture_graphs(
            plain,
            None,
            new_capture(self.device),
            candidate_steps=[0],
            max_batch_size=self.limits.max_batch_size,
        )
        return plain

    @torch.inference_mode()
    def plain_round(self, runner: ModelRunner, batch_size: int) -> list[Verdict]:
        """Run a round at depth 0 on the rig's own target, or on a `plain_runner`."""
        requests = self.requests[:batch_size]
        roots = to_device([request.prompt_ids[-1] for request in requests], self.device)
        segments = [Segment(r.held_slot, r.committed - 1, 1) for r in requests]
        return verify(runner.decode(roots, segments), requests, roots, [0] * batch_size)

    @torch.inference_mode()
    def round(self, batch_size: int, num_steps: int) -> list[Verdict]:
        """Run draft and verify."""
        drafts = torch.zeros(batch_size, 0, dtype=torch.long, device=self.device)
        if num_steps:
            drafts = self.draft(batch_size, num_steps)
        rows, logits = self.verify_logits(batch_size, num_steps, drafts)
        return verify(logits, self.requests[:batch_size], rows, [num_steps] * batch_size)

    def _fill_caches(self) -> None:
        generator = torch.Generator(self.device).manual_seed(1)
        for kv in {id(kv): kv for kv in (self.runner.kv, self.drafter.kv)}.values():
            for stored in (*kv.layers, *([kv.features] if kv.features is not None else [])):
                stored.normal_(generator=generator)

    def _request(self, slot: int) -> Request:
        """Make a request that has its text stored; lengths differ from slot to slot."""
        length = self.limits.max_tokens // 2 - 3 * slot - self.limits.tiers[-1] - 1
        tokens = [(17 * i + slot) % self.runner.vocab_size for i in range(max(4, length))]
        request = Request(f"check-{slot}", tokens, GREEDY, lambda chunk: None)
        request.slot = self.runner.kv.allocate()
        return request


def new_capture(device: torch.device) -> Capture:
    """Return CUDA's capture, or what stands in for it on a CPU."""
    return CudaCapture() if device.type == "cuda" else TapeCapture()
