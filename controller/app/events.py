"""The event stream: `GET /v1/events` as server-sent events over the `Feed`."""

from collections.abc import AsyncIterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import EventSourceResponse

from controller.app.feed import BeginView, Feed, LiveView, TooManyStreams
from controller.app.problems import Problem, refusals
from controller.app.views import DecisionView

MAX_CURSOR = 2**62


def add_events(router: APIRouter, feed: Feed) -> None:
    """Add the route."""

    async def place() -> Any:
        try:
            with feed.place():
                yield
        except TooManyStreams as error:
            raise Problem(503, f"{error}; close one, or read GET /v1/workers instead") from error

    @router.get(
        "/v1/events",
        response_class=EventSourceResponse,
        responses=refusals(422, 503),
        dependencies=[Depends(place)],
    )
    async def events(
        last_event_id: Annotated[int | None, Header(ge=0, le=MAX_CURSOR)] = None,
        after: Annotated[int | None, Query(ge=0, le=MAX_CURSOR)] = None,
        recent: Annotated[int, Query(ge=0, le=1000)] = 0,
    ) -> AsyncIterable[BeginView | LiveView | DecisionView]:
        """Server-sent events: the workers once a second, and decisions as they happen.

        `begin` comes first: the last minutes in samples, and where the journal stands. `workers` is every worker's
        state; a reader that is slow gets the newest one only. `decision` is a record of the journal with its cursor as
        the event's id: nothing is left out, and `Last-Event-ID` (or `after`) goes on behind a cursor, also after a
        restart of the controller. Without either, `recent` asks for so many of the newest decisions first.
        """
        start = last_event_id if last_event_id is not None else after
        async for event in feed.events(after=start, recent=recent):
            item: Any = event
            yield item
