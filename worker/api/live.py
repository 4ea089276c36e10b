"""The requests in flight by the ids that their clients know, so that they can be aborted by them.

An id is matched exactly: an empty one, or the beginning of another, matches nothing. Lives on the event loop.
"""

from collections.abc import Iterable

from worker.api.errors import ApiError
from worker.api.generation import Generation


class LiveRequests:
    """Generations by id; a body with several prompts has several under one id."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[Generation]] = {}

    def add(self, generations: Iterable[Generation]) -> None:
        """Enter generations under each of their `names`.

        Raises:
            ApiError: 409, a request of that id is in flight; nothing is entered then.
        """
        entered: dict[str, list[Generation]] = {}
        for generation in generations:
            for name in generation.names:
                entered.setdefault(name, []).append(generation)
        taken = sorted(entered.keys() & self._by_id.keys())
        if taken:
            raise ApiError(409, f"a request with the id {taken[0]!r} is in flight", code="duplicate_id")
        self._by_id |= entered

    def remove(self, generations: Iterable[Generation]) -> None:
        """Take generations out; one that was never entered is no error."""
        for generation in generations:
            for name in generation.names:
                if generation in self._by_id.get(name, ()):
                    self._by_id[name].remove(generation)
                    if not self._by_id[name]:
                        del self._by_id[name]

    def abort(self, name: str) -> bool:
        """End what runs under exactly this id; False if nothing does."""
        ended = [generation.abort() for generation in self._by_id.get(name, ())]
        return any(ended)
