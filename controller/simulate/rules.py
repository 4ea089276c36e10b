"""Rules that decide inside the engine, round by round: fixed depths. The rivals' rules are in `rivals`."""

from collections.abc import Sequence


class FixedDepth:
    """One depth throughout."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def depth(self, batch_size: int) -> int:
        """See `EngineRule.depth`."""
        return self._num_steps

    def verified(self, batch_size: int, num_steps: int, correct: Sequence[int]) -> None:
        """See `EngineRule.verified`."""
