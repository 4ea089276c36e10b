"""One forward with its graphs: captured for every shape of its grid, looked up by what a round asks for, replayed.

Inputs and outputs have one buffer each for the largest shape, and every graph works on the first rows of it: buffers
never move, whatever depth is in force. Where requests are missing up to the bucket, ones without rows stand in.
Knows nothing about what the forward computes, and nothing about CUDA.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from worker.graphs.capture import Capture, Run
from worker.graphs.shapes import Shape, ShapeGrid
from worker.models.attention import Segment
from worker.models.padded_attention import PaddedInputs
from worker.transfer import to_device

Forward = Callable[[PaddedInputs], Sequence[Tensor]]
"""Computes padded rows; each result has the same number of rows per request: one, or `width`."""


class GraphedForward:
    """Replays a forward. Used by the engine thread only."""

    def __init__(
        self,
        forward: Forward,
        grid: ShapeGrid,
        *,
        padding_slot: int,
        device: torch.device,
        hidden: Tensor | None = None,
    ) -> None:
        """Make the buffers; nothing is captured yet.

        Args:
            forward: what is captured.
            grid: its shapes.
            padding_slot: of the caches it writes to.
            device: where they are.
            hidden: an empty tensor `[0, hidden_size]` of the dtype of what a draft head reads beside the tokens.
        """
        self._forward = forward
        self._grid = grid
        self._device = device
        self._padding = (padding_slot, 0, 0)
        most = grid.buckets[-1]
        # One per width: a smaller bucket is its beginning.
        self._tokens = {
            width: torch.zeros(most, width, dtype=torch.long, device=device) for width in grid.widths
        }
        self._spans = to_device([self._padding] * most, device, torch.int64).clone()  # [most, 3]
        rows = most * grid.widths[-1]
        self._hidden = None if hidden is None else hidden.new_zeros(rows, hidden.shape[1])
        self._outputs: list[Tensor] | None = None
        self._replays: dict[Shape, Run] = {}

    @torch.inference_mode()
    def capture(self, capture: Capture) -> int:
        """Capture every shape; return how many. The cache's padding slot is written to, and nothing else of it."""
        for shape in self._grid.shapes():
            inputs = self._inputs(shape)
            if self._outputs is None:  # the first shape is the largest
                self._outputs = [value.clone() for value in self._forward(inputs)]
            self._replays[shape] = capture(partial(self._run, inputs))
        return len(self._replays)

    @property
    def captured(self) -> list[Shape]:
        """The shapes that have a graph."""
        return list(self._replays)

    def shape_of(self, segments: Sequence[Segment]) -> Shape | None:
        """Return the captured shape that segments get; None: they run without a graph."""
        shape = self._grid.fit(segments)
        return shape if shape in self._replays else None

    @torch.inference_mode()
    def rerun(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Run the forward once more over what the replay of these segments read, without the graph: it gives the same.

        Only right after that replay.
        """
        shape = self._grid.fit(segments)
        if shape is None:
            raise ValueError("these segments were not replayed")
        places = _places(segments, shape.width, self._device)
        return _without_fill(self._forward(self._inputs(shape)), len(segments), shape, places)

    @torch.inference_mode()
    def replay(
        self,
        token_ids: Tensor,  # [rows] int64, rows = Σ count of the segments
        segments: Sequence[Segment],
        hidden: Tensor | None = None,  # [rows, hidden_size]
    ) -> list[Tensor] | None:
        """Run the rows in the smallest shape that holds them; None where there is none.

        Returns each of the forward's results for these rows (or requests) only; the next replay overwrites them.
        """
        shape = self.shape_of(segments)
        if shape is None:
            return None
        places = _places(segments, shape.width, self._device)
        self._write_spans(shape, segments)
        _put(self._tokens[shape.width].view(-1), token_ids, places)
        if self._hidden is not None and hidden is not None:
            _put(self._hidden, hidden, places)
        return _without_fill(self._replays[shape](), len(segments), shape, places)

    def _inputs(self, shape: Shape) -> PaddedInputs:
        hidden = None
        if self._hidden is not None:
            rows = self._hidden[: shape.bucket * shape.width]
            hidden = rows.view(shape.bucket, shape.width, -1)
        return PaddedInputs(
            self._tokens[shape.width][: shape.bucket], self._spans[: shape.bucket], shape.context, hidden
        )

    def _run(self, inputs: PaddedInputs) -> Sequence[Tensor]:
        """Run the forward and leave its results at the beginning of the output buffers."""
        results = self._forward(inputs)
        outputs = [buffer[: len(value)] for buffer, value in zip(self._outputs or (), results, strict=True)]
        for output, value in zip(outputs, results, strict=True):
            output.copy_(value)
        return outputs

    def _write_spans(self, shape: Shape, segments: Sequence[Segment]) -> None:
        spans = [(segment.slot, segment.start, segment.count) for segment in segments]
        spans += [self._padding] * (shape.bucket - len(segments))
        self._spans[: shape.bucket].copy_(to_device(spans, self._device, torch.int64))


def _places(segments: Sequence[Segment], width: int, device: torch.device) -> Tensor | None:
    """Return where the rows lie among the padded ones; None: they are the first ones, in order."""
    if all(segment.count == width for segment in segments):
        return None
    ranges = (range(i * width, i * width + segment.count) for i, segment in enumerate(segments))
    return to_device(list(chain.from_iterable(ranges)), device)


def _put(buffer: Tensor, rows: Tensor, places: Tensor | None) -> None:
    if places is None:
        buffer[: len(rows)].copy_(rows)
    else:
        buffer.index_copy_(0, places, rows)


def _without_fill(
    results: Sequence[Tensor], num_requests: int, shape: Shape, places: Tensor | None
) -> list[Tensor]:
    """Leave the rows out that only fill up."""
    found = []
    for result in results:
        if len(result) == shape.bucket:  # one row per request
            found.append(result[:num_requests])
        elif places is None:
            found.append(result[: num_requests * shape.width])
        else:
            found.append(result.index_select(0, places))
    return found
