"""The stand-in for CUDA graphs has the traps of the real thing, or the tests over it would prove nothing."""

import pytest
import torch

from worker.graphs.tape import CaptureRefused, TapeCapture


def test_a_replay_reads_what_its_inputs_hold_now_and_writes_where_it_wrote() -> None:
    values = torch.arange(4.0)
    replay = TapeCapture()(lambda: [values.view(2, 2).softmax(dim=1).sum(dim=0) * 2])
    (first,) = replay()
    address = first.data_ptr()
    values.copy_(torch.tensor([3.0, 1.0, 0.5, 9.0]))
    (second,) = replay()
    assert second.data_ptr() == address
    assert torch.equal(second, values.view(2, 2).softmax(dim=1).sum(dim=0) * 2)


def test_python_is_not_repeated() -> None:
    values, factor = torch.ones(3), [2.0]
    replay = TapeCapture()(lambda: [values * factor[0]])
    factor[0] = 5.0
    assert replay()[0].tolist() == [2.0, 2.0, 2.0]


def test_in_place_work_is_repeated() -> None:
    total = torch.zeros(2)
    replay = TapeCapture()(lambda: [total.add_(1)])
    replay()
    replay()
    assert total.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    "work",
    [lambda x: x * float(x.sum()), lambda x: x[x > 0], lambda x: x if bool(x.any()) else x + 1],
    ids=["float", "mask", "branch"],
)
def test_what_makes_the_host_wait_is_refused(work) -> None:
    with pytest.raises(CaptureRefused, match="cannot be captured"):
        TapeCapture()(lambda: [work(torch.ones(3))])
