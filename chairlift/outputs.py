"""What a caller gets back: plain records, with vLLM's field names."""

from __future__ import annotations

import dataclasses
import enum
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, SupportsIndex, TypeVar, overload

__all__ = [
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "FinishReason",
    "FlatLogprobs",
    "Logprob",
    "OutputKind",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "ScoringOutput",
]


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


class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """Log-probabilities of many tokens, in arrays: 12 bytes per entry instead of 300. It reads like a list, and equals
    one with the same entries; these are made when they are looked at. A token that is not scored (the first of a
    prompt) has None. Slices, and what is pickled, are independent.

    ``text`` gives the text of a token id; None leaves ``decoded_token`` at None.
    """

    __slots__ = ("_ends", "_ids", "_logprobs", "_ranks", "_text")

    def __init__(self, text: Callable[[int], str] | None = None) -> None:
        self._text: Final = text
        self._ids = array("i")
        self._logprobs = array("d")
        self._ends = array("q")
        """Per token, where its entries end."""
        self._ranks = array("i")
        """Ranks of the chosen tokens. The other entries have ranks 1, 2, ... in order."""

    @property
    def num_entries(self) -> int:
        """Log-probabilities held, over all tokens."""
        return len(self._ids)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float], rank: int) -> None:
        """One more token: itself first, with its ``rank``, then the most likely ones. Empty: it is not scored.
        Raises ValueError where there are not as many ids as log-probabilities."""
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} token ids have {len(logprobs)} log-probabilities")
        self._ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._ends.append(len(self._ids))
        self._ranks.append(rank)

    def truncate(self, length: int) -> None:
        """Keep so many tokens at most."""
        if length < len(self._ends):
            del self._ends[length:], self._ranks[length:]
            end = self._ends[-1] if self._ends else 0
            del self._ids[end:], self._logprobs[end:]

    def chosen(self) -> Iterator[Logprob | None]:
        """Yield the chosen token's entry at each position. It is the first entry of its position."""
        start = 0
        for end, rank in zip(self._ends, self._ranks, strict=True):
            yield self._entry(start, rank) if end > start else None
            start = end

    def __len__(self) -> int:
        return len(self._ranks)  # appended last: a token is there as a whole, or not

    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._slice(index)
        place = range(len(self))[index]
        start, end = self._ends[place - 1] if place else 0, self._ends[place]
        if start == end:
            return None
        found = {self._ids[start]: self._entry(start, self._ranks[place])}
        for rank, at in enumerate(range(start + 1, end), start=1):
            if (token_id := self._ids[at]) not in found:
                found[token_id] = self._entry(at, rank)
        return found

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        for place in range(len(self)):
            yield self[place]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> Any:
        return list, (list(self),)

    def _entry(self, at: int, rank: int) -> Logprob:
        return Logprob(self._logprobs[at], rank, None if self._text is None else self._text(self._ids[at]))

    def _slice(self, wanted: slice) -> FlatLogprobs:
        begin, end, step = wanted.indices(len(self._ends))
        found = FlatLogprobs(self._text)
        if step != 1:
            raise ValueError(f"log-probabilities are cut in steps of 1, got {step}; make a list of them first")
        first = self._ends[begin - 1] if begin else 0
        last = self._ends[end - 1] if end > begin else first
        found._ids, found._logprobs = self._ids[first:last], self._logprobs[first:last]
        found._ends = array("q", [each - first for each in self._ends[begin:end]])
        found._ranks = self._ranks[begin:end]
        return found


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    """One dict per generated token: the chosen one and the ``logprobs`` most likely."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the answer; None for end of sequence and for length."""
    weight_versions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(first token, version): the weights that it and those after it were sampled from, up to the next entry. One entry
    unless weights were replaced while it ran. Tokens count from 0 at the answer's beginning, also in deltas, which have
    the entries that begin with their tokens: mostly none."""
    accepted_prediction_tokens: int = 0
    """Tokens so far that were drafted from :attr:`SamplingParams.prediction`, and were right; also in deltas."""
    rejected_prediction_tokens: int = 0
    """Tokens that were drafted from it in vain."""

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
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """One entry per prompt token; the first is None because nothing precedes it."""
    metrics: RequestMetrics | None = None
    error: str | None = None
    """What went wrong, when a finish reason is ``error``."""


@dataclasses.dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclasses.dataclass(slots=True)
class ClassificationOutput:
    """A number for each class: probabilities, unless the model's files ask for its raw scores."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclasses.dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together: the cosine of their embeddings, or what a cross encoder says of the pair."""

    score: float


_Result = TypeVar("_Result")


@dataclasses.dataclass(slots=True)
class PoolingRequestOutput(Generic[_Result]):
    """One text, or pair of texts, and what the model made of it."""

    request_id: str
    outputs: _Result
    prompt_token_ids: list[int]
    finished: bool = True
