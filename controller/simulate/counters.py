"""Counters of a simulated worker, in the wire's own meaning, kept as histograms because rounds are many."""

from worker.protocol import StatsBucket


class Bucket:
    """Sums over the rounds of one (executed num_steps, batch-size bucket); twin of `StatsBucket`."""

    __slots__ = (
        "accept", "context", "correct", "correct_squared", "draft", "emitted", "max_batch_size", "num_steps",
        "prefill_rounds", "proposed", "reached", "request_rounds", "round", "round_squared", "rounds", "verify",
        "verify_rows",
    )  # fmt: skip

    def __init__(self, num_steps: int, max_batch_size: int) -> None:
        self.num_steps, self.max_batch_size = num_steps, max_batch_size
        # How many request-rounds had exactly i of them; index 0 … num_steps.
        self.proposed, self.reached, self.correct = ([0] * (num_steps + 1) for _ in range(3))
        self.rounds = self.request_rounds = self.correct_squared = self.prefill_rounds = 0
        self.accept = self.emitted = self.verify_rows = self.context = 0
        self.draft = self.verify = self.round = self.round_squared = 0.0

    def to_wire(self) -> StatsBucket:
        """Return the sums as the wire carries them."""
        return StatsBucket.model_construct(
            num_steps=self.num_steps,
            max_batch_size=self.max_batch_size,
            rounds=self.rounds,
            request_rounds=self.request_rounds,
            proposed=_at_least(self.proposed),
            reached=_at_least(self.reached),
            correct=_at_least(self.correct),
            correct_squared=self.correct_squared,
            accept_tokens=self.accept,
            emitted_tokens=self.emitted,
            verify_rows=self.verify_rows,
            context_tokens=self.context,
            prefill_rounds=self.prefill_rounds,
            draft_seconds=self.draft,
            draft_seconds_squared=0.0,
            verify_seconds=self.verify,
            verify_seconds_squared=0.0,
            round_seconds=self.round,
            round_seconds_squared=self.round_squared,
            catch_up_seconds=0.0,
            catch_up_seconds_squared=0.0,
        )


def _at_least(histogram: list[int]) -> list[int]:
    """Turn counts of "exactly i" into counts of "i or more", for i from 1 on."""
    counts = []
    total = 0
    for count in reversed(histogram[1:]):
        total += count
        counts.append(total)
    return counts[::-1]


class Counted:
    """The counts of one round, until it ends."""

    __slots__ = (
        "accept", "draft", "emitted", "finished", "joined", "num_steps", "per_row", "proposed", "reached",
        "seconds", "size",
    )  # fmt: skip

    def __init__(self, num_steps: int, size: int) -> None:
        self.num_steps, self.size = num_steps, size
        self.proposed: list[int] = []
        self.reached: list[int] = []
        self.per_row: list[int] = []
        self.accept = self.emitted = self.finished = self.joined = 0
        self.seconds = self.draft = 0.0

    @property
    def verify_rows(self) -> int:
        """Rows the target computed."""
        return self.size + sum(self.proposed)

    def add_to(self, bucket: Bucket, context_tokens: int) -> None:
        """Add the round to its bucket."""
        for histogram, values in (
            (bucket.proposed, self.proposed),
            (bucket.reached, self.reached),
            (bucket.correct, self.per_row),
        ):
            for value in values:
                histogram[value] += 1
        bucket.rounds += 1
        bucket.request_rounds += self.size
        bucket.correct_squared += sum(value * value for value in self.per_row)
        bucket.accept += self.accept
        bucket.emitted += self.emitted
        bucket.verify_rows += self.verify_rows
        bucket.context += context_tokens * self.size
        if self.joined:
            bucket.prefill_rounds += 1
            return
        bucket.draft += self.draft
        bucket.verify += self.seconds - self.draft
        bucket.round += self.seconds
        bucket.round_squared += self.seconds * self.seconds
