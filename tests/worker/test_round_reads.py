"""A round has one read from the device. On a CPU reads cost nothing, so they are counted instead of timed."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import worker.models.attention as attention_module
import worker.spec.verify as verify_module
from worker.graphs.tape import makes_host_wait

PROMPT = [5, 9, 7] * 8


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if makes_host_wait(func, args):  # bool(), int(), item(), a boolean index, …
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch):
    counted = Reads()
    tolist, plan = torch.Tensor.tolist, attention_module.DecodePlan.__init__
    in_plan = False

    def counting(tensor):
        counted.counts["tolist"] += not in_plan
        return tolist(tensor)

    def planning(
        *args, **kwargs
    ):  # the plan is laid out in host memory before anything of it goes to the device
        nonlocal in_plan
        in_plan, before = True, counted.counts.copy()
        try:
            plan(*args, **kwargs)
        finally:
            in_plan = False
            counted.counts = before

    monkeypatch.setattr(torch.Tensor, "tolist", counting)
    monkeypatch.setattr(attention_module.DecodePlan, "__init__", planning)
    monkeypatch.setattr(verify_module, "DEVICES_READ_FOR_FREE", ())
    return counted


@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "eagle", "ngram+eagle"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3, "top_p": 0.9, "min_tokens": 40}])
def test_a_round_reads_the_device_once(make_rig, reads, drafter, sampling):
    depths = [0] if drafter == "none" else [0, 1, 3]
    rig = make_rig(drafter=drafter, spec={"candidate_steps": depths})
    streams = [rig.submit([*PROMPT, i], max_tokens=60, **sampling) for i in range(3)]
    while any(len(stream.tokens) < 2 for stream in streams):
        rig.step()
    for depth in depths * 2:
        rig.set_depth(depth)
        rig.step()  # the way back up stores what the drafter missed
        reads.counts.clear()
        with reads:
            rig.step()
        assert reads.counts == {"tolist": 1}, f"depth {depth}"


def test_one_read_gives_the_tokens_of_many(make_rig, monkeypatch):
    """A GPU draws all rows at once, a CPU a sampled request's only while its drafts hold."""

    def generate():
        rig = make_rig(draft={"noise": 0.1})
        rig.set_depth(3)
        streams = [
            rig.submit([*PROMPT, i], temperature=0.9 * (i % 2), seed=i, max_tokens=30) for i in range(4)
        ]
        rig.thread.run_until_idle()
        return [stream.tokens for stream in streams], rig.thread.stats().buckets[-1].correct

    expected = generate()
    monkeypatch.setattr(verify_module, "DEVICES_READ_FOR_FREE", ())
    assert generate() == expected
