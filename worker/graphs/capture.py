"""The capture of device work: run a function once, get back what repeats its work over the same memory.

The only part of the graphs that knows CUDA; on a CPU `tape.py` stands in.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Run = Callable[[], Sequence[Tensor]]
"""Work of fixed shapes: reads tensors that it finds at the same place every time, returns what it wrote."""

WARM_UPS = 2
"""Runs before a capture: libraries choose kernels and take their work space then, which a capture must not see."""


class Capture(Protocol):
    """Turns a function into a replay."""

    def __call__(self, run: Run) -> Run:
        """Run and record `run`; each call of the result repeats the recorded work and returns the very same tensors.

        Python code is not repeated: numbers that `run` computed on the host are as they were at the capture.
        """


class CudaCapture:
    """CUDA graphs, all captured on one stream and with one pool of memory.

    A stream or a pool of its own for every graph would reserve memory again each time. Graphs that share a pool must
    not run at the same time: the engine's one thread replays them one after another.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """See `Capture`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device meanwhile, say to read how much memory it has.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = run()

        def replay() -> Sequence[Tensor]:
            graph.replay()
            return outputs

        return replay
