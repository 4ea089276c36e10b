"""The law of the exact grade on the default model: the same bits at every depth, batch size, mix and history."""

import pytest
import torch

from worker.build import build_engine
from worker.config import WorkerConfig
from worker.models.attention import Segment
from worker.models.fetch import ensure_default_model
from worker.models.loader import load_decoder
from worker.models.tree_attention import TreeSegment
from worker.protocol import PlanEntry, SpecPlan
from worker.request import Request, SamplingParams
from worker.spec.tree import Topology

pytestmark = pytest.mark.model

SLOTS, ROWS = 16, 9
LENGTHS = [40, 63, 64, 60, 57, 100, 119, 3, 126, 127, 1, 62, 90, 56, 65, 120]
"""Tokens in each slot: the next rows cross a KV length's edge in some, at several rows, and in others not."""


@pytest.mark.parametrize("packing", ["int4", "int8"])
def test_logits_are_bitwise_the_same_at_every_depth_batch_size_and_mix(packing):
    torch.set_num_threads(1)
    decoder = load_decoder(
        ensure_default_model(), dtype=torch.bfloat16, device=torch.device("cpu"), packing=packing
    )
    generator = torch.Generator().manual_seed(5)
    kv = decoder.new_kv_cache(SLOTS, 192)
    past = torch.randint(0, 49152, (127,), generator=generator)
    decoder.forward(past, [Segment(0, 0, 127)], kv, phase="prefill")
    for slot in range(1, SLOTS):
        kv.copy(0, slot, LENGTHS[slot])
    texts = torch.randint(0, 49152, (SLOTS, ROWS), generator=generator)

    def logits(counts: dict[int, int]) -> dict[int, torch.Tensor]:
        segments = [Segment(slot, LENGTHS[slot], count) for slot, count in counts.items()]
        rows = torch.cat([texts[slot, :count] for slot, count in counts.items()])
        hidden = decoder.forward(rows, segments, kv, phase="decode")
        return dict(zip(counts, decoder.logits(hidden).split(list(counts.values())), strict=True))

    # Plain decoding, one request at a time, is the truth.
    plain = {}
    for slot in range(SLOTS):
        steps = [
            decoder.logits(
                decoder.forward(
                    texts[slot, i : i + 1], [Segment(slot, LENGTHS[slot] + i, 1)], kv, phase="decode"
                )
            )
            for i in range(ROWS)
        ]
        plain[slot] = torch.cat(steps)
    alone = [{slot: 1 + depth} for slot in (0, 3) for depth in (1, 2, 3, 5, 8)]
    together = [
        dict.fromkeys(range(batch_size), 1 + depth)
        for batch_size, depth in [(2, 8), (3, 5), (5, 2), (8, 0), (8, 3), (16, 0), (16, 1)]
    ]
    ragged = [{9: 1, 3: 9, 14: 4}, {slot: 1 + slot % 4 for slot in range(15, -1, -1)}]
    for counts in alone + together + ragged:
        for slot, rows in logits(counts).items():
            assert torch.equal(rows, plain[slot][: counts[slot]]), (slot, counts)


PARENTS = [0, 0, 0, 1, 1, 2, 4, 4, 6, 7, 8]
"""Of rows 1, 2, …: five levels of a tree, the deepest path 1, 4, 7, 10."""


def test_a_trees_logits_and_its_compacted_kv_are_bitwise_those_of_plain_decoding():
    torch.set_num_threads(1)
    decoder = load_decoder(
        ensure_default_model(), dtype=torch.bfloat16, device=torch.device("cpu"), packing="int4"
    )
    generator = torch.Generator().manual_seed(6)
    topology = Topology.tree(PARENTS, max_depth=9)
    rows, spare = len(PARENTS) + 1, 5
    lengths = [60, 61, 62, 90, 1]  # the rows of a tree lie on both sides of a KV length's edge in some
    kv = decoder.new_kv_cache(spare + 1, 192)
    past = torch.randint(0, 49152, (100,), generator=generator)
    decoder.forward(past, [Segment(0, 0, 100)], kv, phase="prefill")
    for slot in range(1, spare):
        kv.copy(0, slot, lengths[slot])
    texts = torch.randint(0, 49152, (spare, rows), generator=generator)
    segments: list[Segment] = [
        TreeSegment(slot, length, rows, trunk=length, paths=topology.paths(length))
        for slot, length in enumerate(lengths)
    ]
    segments[3] = Segment(3, lengths[3], rows)  # a chain among trees
    hidden = decoder.forward(texts.flatten(), segments, kv, phase="decode")
    logits = decoder.logits(hidden).view(spare, rows, -1)

    for slot, length in enumerate(lengths):
        leaf = 10 if slot % 2 else 11
        path = list(range(rows))
        if slot != 3:
            path = [cell - length for cell in topology.paths(length)[leaf]]
        kv.copy(slot, spare, length)
        for depth, row in enumerate(path):
            alone = Segment(spare, length + depth, 1)
            plain = decoder.logits(decoder.forward(texts[slot, row : row + 1], [alone], kv, phase="decode"))
            assert torch.equal(logits[slot, row], plain[0]), (slot, row)
        kv.compact(slot, length, [length + row for row in path])
        stop = length + len(path)
        assert all(torch.equal(layer[:, slot, :, :stop], layer[:, spare, :, :stop]) for layer in kv.layers)


PROMPT = [(7 * i + i // 5) % 3000 + 200 for i in range(40)] * 2
"""80 tokens, of which the drafter can make something."""
PARAMS = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0},
    {"temperature": 1.0, "seed": 8},
]


def test_tokens_are_the_same_after_prefix_hits_and_preemption():
    config = WorkerConfig(
        model={"dtype": "int4", "device": "cpu", "threads": 1},
        spec={"candidate_steps": [0, 3], "num_steps": 0},
        engine={
            "max_running_requests": 4,
            "max_context_tokens": 256,
            "prefill_chunk_tokens": 32,
            "max_kv_tokens": 330,
            "profile_seconds": 0,
        },
    )
    thread = build_engine(config)
    prompts = [PROMPT, [*PROMPT[:64], 500, 501, 502], PROMPT[:70], [900, *PROMPT[1:60]]]

    def submit(index: int) -> Request:
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, **PARAMS[index])
        request = Request(f"request-{index}", list(prompts[index]), sampling, lambda chunk: None)
        thread.submit(request)
        return request

    expected = []
    for index in range(len(prompts)):
        request = submit(index)
        thread.run_until_idle()
        expected.append(list(request.output_ids))
    thread.put_plan(
        SpecPlan(
            controller_epoch=1,
            version=1,
            boot_id=thread.info.boot_id,
            ttl_seconds=3600.0,
            entries=[PlanEntry(max_batch_size=4, num_steps=3)],
        )
    )
    requests = [submit(index) for index in range(len(prompts))]
    thread.run_until_idle()
    assert [request.output_ids for request in requests] == expected
    assert thread._scheduler.num_preemptions > 0
    assert max(request.cached_tokens for request in requests) > 0
    assert sum(request.spec.proposed_drafts for request in requests) > 0
