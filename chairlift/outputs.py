"""What a caller gets back: plain records, with vLLM's field names."""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["CompletionOutput", "FinishReason", "Logprob", "OutputKind", "RequestMetrics", "RequestOutput"]


class FinishReason(enum.StrEnum):
    """Why a request ended; the strings are the OpenAI API's, plus ``abort``, ``error`` and ``deadline``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"
    """It could not keep its deadline any more, and such requests are dropped."""


class OutputKind(enum.Enum):
    """What a stream yields."""

    DELTA = "delta"
    """What is new, of the answers that have news."""
    CUMULATIVE = "cumulative"
    """All there is so far, whenever there is more."""
    FINAL = "final"
    """One output, at the end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the raw logits, before penalties, temperature and masks."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token."""
    decoded_token: str | None = None


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict per generated token: the chosen one and the ``logprobs`` most likely."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the answer; None for end of sequence and for length."""
    weight_versions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(first token, version): the weights that it and those after it were sampled from, up to the next entry. One entry
    unless weights were replaced while it ran. Tokens count from 0 at the answer's beginning, also in deltas, which have
    the entries that begin with their tokens: mostly none."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the engine's clock."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    causes: dict[str, float] | None = None
    """Seconds from arrival to the end, by what they went on: docs/why-slow.md. Of ``n`` answers, of the last to end."""
    preempted_by: list[str] = dataclasses.field(default_factory=list)
    """Sequences that it had to give way to: the last three at most, the newest at the end."""
    preempted_during: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """From when until when it was preempted: the last eight times at most."""


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """The state of one request: all text so far, and whether every answer has ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens that were read from the prefix cache instead of being computed."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry per prompt token; the first is None because nothing precedes it."""
    metrics: RequestMetrics | None = None
    error: str | None = None
    """What went wrong, when a finish reason is ``error``."""
