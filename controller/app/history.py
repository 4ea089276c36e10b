"""The last minutes of every worker in a few figures, so that a chart that opens now has a past. Bounded."""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from pydantic import BaseModel

SAMPLES = 300


class Sample(NamedTuple):
    """A worker at one moment; None while it does not answer, or had no rounds."""

    num_steps: int | None
    accept_length: float | None
    tokens_per_second: float | None


class WorkerHistory(BaseModel):
    """One value per time."""

    num_steps: list[int | None]
    accept_length: list[float | None]
    tokens_per_second: list[float | None]


class HistoryView(BaseModel):
    """What was sampled, oldest first."""

    times: list[float]
    """Unix seconds."""
    workers: dict[str, WorkerHistory]


NOTHING = Sample(None, None, None)


class SampleHistory:
    """The last `SAMPLES` samples."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[str, Sample]]] = deque(maxlen=SAMPLES)

    def add(self, wall_seconds: float, sample: Mapping[str, Sample]) -> None:
        """Keep a sample; the oldest goes."""
        self._samples.append((wall_seconds, sample))

    def view(self) -> HistoryView:
        """Show all, by worker; a worker that was not there at a time has None."""
        ids = dict.fromkeys(name for _, sample in self._samples for name in sample)
        columns = {name: [sample.get(name, NOTHING) for _, sample in self._samples] for name in ids}
        return HistoryView(
            times=[round(wall, 3) for wall, _ in self._samples],
            workers={
                name: WorkerHistory(
                    num_steps=[s.num_steps for s in column],
                    accept_length=[_short(s.accept_length) for s in column],
                    tokens_per_second=[_short(s.tokens_per_second) for s in column],
                )
                for name, column in columns.items()
            },
        )


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
