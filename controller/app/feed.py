"""Feed: what the event stream tells. Samples the workers once a second, keeps the last minutes, passes decisions on.

Nothing is queued for a subscriber: it holds a cursor and takes, whenever it is ready, the decisions above it and the
newest sample. So a slow one skips samples, misses no decision and costs no memory. What is told is ASCII: a reason may
hold characters that some readers of event streams take for a line's end. Knows nothing about HTTP.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice

from fastapi.sse import ServerSentEvent
from pydantic import BaseModel

from controller.app.history import HistoryView, Sample, SampleHistory
from controller.app.views import decision_view
from controller.app.worker_views import WorkerState, worker_state
from controller.clock import Clock
from controller.journal import Journal, JournalError, Record
from controller.loop import ControlLoop
from controller.types import Mode

logger = logging.getLogger("controller.feed")

SAMPLE_SECONDS = 1.0
MAX_STREAMS = 64
RECENT_DECISIONS = 1000
"""Kept in memory for subscribers; what is older comes from the journal."""
PAGE = 200
BREATH = 16
"""Workers looked at before the loop may do something else."""
RETRY_MILLISECONDS = 2000


class TooManyStreams(Exception):
    """The bound on open event streams is reached."""


class BeginView(BaseModel):
    """`event: begin`, the first one of every stream."""

    controller_epoch: int
    version: str
    newest: int
    """Cursor of the newest decision. Below a cursor that you have: this is another journal, begin anew."""
    interval_seconds: float
    history: HistoryView


class LiveView(BaseModel):
    """`event: workers`, once a second."""

    time: datetime
    mode: Mode
    journal: str
    """`ok`, or why it cannot be written."""
    workers: list[WorkerState]


class Feed:
    """What all subscribers share."""

    def __init__(
        self,
        loop: ControlLoop,
        journal: Journal,
        *,
        clock: Clock,
        version: str,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        self._loop = loop
        self._journal = journal
        self._clock = clock
        self._version = version
        self._sleep = sleep
        self._max_streams = max_streams
        self._streams = 0
        self._history = SampleHistory()
        self._recent: deque[Record] = deque(maxlen=RECENT_DECISIONS)
        self._live = ""
        self._samples = 0
        self._news = asyncio.Event()
        self._runs_on: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        journal.listeners.append(self._decided)

    # ---- filling ----

    async def run(self) -> None:
        """Sample until cancelled."""
        self._runs_on = asyncio.get_running_loop()
        while True:
            began = self._clock.monotonic()
            try:
                await self.sample()
            except Exception:
                logger.exception("a sample for the event stream failed")
            spent = self._clock.monotonic() - began
            await self._sleep(max(SAMPLE_SECONDS - spent, SAMPLE_SECONDS / 10))

    async def sample(self) -> None:
        """Look at all workers once."""
        states = []
        for place, worker in enumerate(self._loop.workers.values()):
            if place % BREATH == BREATH - 1:
                await asyncio.sleep(0)
            states.append(worker_state(self._loop, worker))
        wall = self._clock.wall()
        self._history.add(wall, {state.id: _sample_of(state) for state in states})
        self._live = LiveView(
            time=datetime.fromtimestamp(wall, UTC),
            mode=self._loop.mode,
            journal=self._journal.failure or "ok",
            workers=states,
        ).model_dump_json(ensure_ascii=True)
        self._samples += 1
        self._wake()

    def _decided(self, record: Record) -> None:
        self._recent.append(record)
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        """End all streams, because the controller ends; may be called from a signal handler."""
        self._is_closed = True
        if self._runs_on is not None and not self._runs_on.is_closed():
            self._runs_on.call_soon_threadsafe(self._wake)

    # ---- telling ----

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold one of the bounded places for a stream.

        Raises:
            TooManyStreams: all are taken.
        """
        if self._streams >= self._max_streams:
            raise TooManyStreams(f"{self._streams} event streams are open, which is the limit")
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    async def events(self, *, after: int | None, recent: int) -> AsyncIterator[ServerSentEvent]:
        """Yield events until the controller ends.

        Args:
            after: go on behind this cursor; one of another journal (above the newest): from the beginning.
            recent: without `after`: begin with so many of the newest decisions.
        """
        newest = self._journal.newest
        cursor = max(0, newest - recent) if after is None else after if after <= newest else 0
        begin = BeginView(
            controller_epoch=self._journal.epoch,
            version=self._version,
            newest=newest,
            interval_seconds=SAMPLE_SECONDS,
            history=self._history.view(),
        )
        yield ServerSentEvent(
            event="begin", raw_data=begin.model_dump_json(ensure_ascii=True), retry=RETRY_MILLISECONDS
        )
        told = 0
        while not self._is_closed:
            news = self._news  # taken before looking, so that nothing slips in between
            if self._samples != told:
                told = self._samples
                yield ServerSentEvent(event="workers", raw_data=self._live)
            page = await self._above(cursor)
            for record in page:
                cursor = record.cursor
                body = decision_view(record).model_dump_json(ensure_ascii=True)
                yield ServerSentEvent(event="decision", id=str(cursor), raw_data=body)
            if not page:
                await news.wait()

    async def _above(self, cursor: int) -> list[Record]:
        """Return the next decisions above a cursor, from memory where they are there."""
        if cursor >= self._journal.newest:
            return []
        if not self._recent or self._recent[0].cursor > cursor + 1:
            try:
                found = await asyncio.to_thread(self._journal.read, cursor, PAGE)
            except JournalError as error:
                logger.warning("the event stream goes on without what the journal cannot give: %s", error)
            else:
                return found
        above = (record for record in self._recent if record.cursor > cursor)
        return list(islice(above, PAGE))


def _sample_of(state: WorkerState) -> Sample:
    if not state.reachable:
        return Sample(None, None, None)
    return Sample(state.depth.effective, state.accept_length, state.tokens_per_second)
