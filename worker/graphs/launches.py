"""How the decode forwards of rounds were launched: by a captured graph, or operation by operation."""


class Launches:
    """Counts; shared by all networks of an engine, written by its thread only."""

    def __init__(self) -> None:
        self.replayed = 0
        """Forwards replayed from a graph."""
        self.eager = 0
        """Forwards without one: none was captured (a CPU has none), or no captured shape held the rows."""
        self.eager_rounds = 0
        """Rounds with at least one forward of that kind."""
        self._eager_before = 0

    def end_round(self) -> None:
        """Count the round that has ended."""
        self.eager_rounds += self.eager > self._eager_before
        self._eager_before = self.eager
