"""The nouns of serving: a request, how it samples, what it hands out.

Knows nothing about tensors, HTTP or text: prompts and outputs are token ids.
"""

import enum
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.stopping import StopStrings

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request draws its tokens. Values are checked at the process's edge, not here.

    Filters apply in this order: temperature, top_k, top_p (over what top_k left, renormalised), min_p.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 means greedy, whatever the other filters say."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Drop tokens less likely than `min_p` times the most likely one."""
    seed: int | None = None
    """None draws a fresh seed, which then holds for the whole request."""
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    """EOS and stop tokens cannot be drawn before this many tokens."""
    max_num_steps: int | None = None
    """The request's own cap on drafts per round; 0 decodes plainly. It never changes the tokens."""

    @property
    def is_greedy(self) -> bool:
        """Whether tokens are the argmax."""
        return self.temperature == 0


@dataclass(frozen=True)
class TokenChunk:
    """Tokens handed out together (one round's, or the first after prefill), maybe ending the request."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Set with finish_reason "error": one sentence for the client."""
    matched_stop: int | str | None = None
    """The EOS or stop token that ended the request (the last of `token_ids`), or the stop string."""


class Phase(enum.Enum):
    """Where a request is in its life; only the engine thread moves it."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class RequestSpecStats:
    """Speculation counted for one request; written by the engine thread, read after the end."""

    rounds: int = 0
    """Verify rounds the request took part in (SGLang: spec_verify_ct)."""
    proposed_drafts: int = 0
    correct_drafts: int = 0
    """Drafts accepted and kept."""
    histogram: dict[int, int] = field(default_factory=dict)
    """Rounds by number of correct drafts."""
    proposed_by_round: bytearray = field(default_factory=bytearray)
    """Drafts verified in each round, in order; a depth fits a byte (at most 64)."""
    correct_by_round: bytearray = field(default_factory=bytearray)

    def record(self, *, num_proposed: int, num_correct: int) -> None:
        """Add one round."""
        self.rounds += 1
        self.proposed_drafts += num_proposed
        self.correct_drafts += num_correct
        self.histogram[num_correct] = self.histogram.get(num_correct, 0) + 1
        self.proposed_by_round.append(num_proposed)
        self.correct_by_round.append(num_correct)


@dataclass(eq=False)
class Request:
    """One generation, from submission to its last token.

    Owned by the engine thread after `Engine.submit`; `sink` is called on that thread for every chunk and must
    return at once. The last committed token ("root" of the next round) has no KV entry yet, so while running
    the target's KV length is `committed - 1`.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    sink: Callable[[TokenChunk], None]
    eos_token_ids: frozenset[int] = frozenset()
    stop_strings: StopStrings | None = None
    timeout_seconds: float | None = None
    """The request is ended this long after its arrival, wherever it is."""
    arrival_seconds: float = 0.0
    """Engine clock at submission."""

    output_ids: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    slot: int | None = None
    kv_length: int = 0
    """Tokens whose target KV is stored."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was there already."""
    swapped_kv: list[Any] | None = None
    """KV of a preempted request, in host memory (see `KVCache.swap_out`)."""
    first_token_seconds: float | None = None
    finish_seconds: float | None = None
    finish_reason: FinishReason | None = None
    spec: RequestSpecStats = field(default_factory=RequestSpecStats)
    seed: int = field(init=False)
    aborted: threading.Event = field(default_factory=threading.Event)
    """Set from any thread; the engine ends the request before its next round."""

    def __post_init__(self) -> None:
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed

    @property
    def held_slot(self) -> int:
        """The KV slot; RuntimeError for a request that holds none (a bug, not a client's mistake)."""
        if self.slot is None:
            raise RuntimeError(f"request {self.id} holds no slot")
        return self.slot

    @property
    def committed(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def tokens_left(self) -> int:
        """Tokens that max_tokens still allows."""
        return self.params.max_tokens - len(self.output_ids)

    def token_at(self, position: int) -> int:
        """Return the committed token at an absolute position."""
        prompt = len(self.prompt_ids)
        return self.prompt_ids[position] if position < prompt else self.output_ids[position - prompt]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the committed tokens of the half-open range of absolute positions."""
        prompt = len(self.prompt_ids)
        return self.prompt_ids[start:stop] + self.output_ids[max(0, start - prompt) : max(0, stop - prompt)]

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end the request when emitted."""
        own = self.params.stop_token_ids
        return own if self.params.ignore_eos else own | self.eos_token_ids

    def banned_at(self, position: int) -> frozenset[int]:
        """Tokens that cannot be drawn at an absolute position: the ends, before `min_tokens`."""
        is_early = position - len(self.prompt_ids) < self.params.min_tokens
        return self.end_token_ids if is_early else frozenset()

    def is_overdue(self, now: float) -> bool:
        """Whether its time is over."""
        return self.timeout_seconds is not None and now - self.arrival_seconds >= self.timeout_seconds


class RequestRejected(Exception):
    """A request that the engine will not take; the message is for the client."""


class QueueFull(RequestRejected):
    """The waiting queue is full (429); try again after `retry_after_seconds`."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class PromptTooLong(RequestRejected):
    """The prompt leaves no room for one token within the context (400)."""


class EngineStopped(RequestRejected):
    """The engine is draining or gone (503)."""
