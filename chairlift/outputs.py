"""Results for the caller: plain records with vLLM's field names."""

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
    """Reason for the end of a request; the OpenAI API's values, and ``abort``, ``error`` and ``deadline``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"
    """The request could no longer meet its deadline, and such requests are dropped."""


class OutputKind(enum.Enum):
    """Contents of a stream's outputs."""

    DELTA = "delta"
    """New parts of the answers."""
    CUMULATIVE = "cumulative"
    """Everything so far, whenever there is something new."""
    FINAL = "final"
    """One output at the end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the raw logits, before penalties, temperature and masks."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token."""
    decoded_token: str | None = None


class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """Log-probabilities of many tokens in arrays: 12 bytes per entry instead of 300.

    It reads like a list of dictionaries, which are made on access, and equals a list with the same entries. A token
    without scores (the first of a prompt) has None. Slices and pickled copies are independent.

    ``text`` gives the text of a token id; without it ``decoded_token`` is None.
    """

    __slots__ = ("_ends", "_ids", "_logprobs", "_ranks", "_text")

    def __init__(self, text: Callable[[int], str] | None = None) -> None:
        self._text: Final = text
        self._ids = array("i")
        self._logprobs = array("d")
        self._ends = array("q")
        """End of each token's entries."""
        self._ranks = array("i")
        """Ranks of the chosen tokens. The other entries have ranks 1, 2, ... in order."""

    @property
    def num_entries(self) -> int:
        """Number of log-probabilities, over all tokens."""
        return len(self._ids)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float], rank: int) -> None:
        """Add a token: itself first, with its ``rank``, then the most likely ones. Empty lists: the token has no
        scores. Raises ValueError when the numbers of ids and log-probabilities differ."""
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} token ids have {len(logprobs)} log-probabilities")
        self._ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._ends.append(len(self._ids))
        self._ranks.append(rank)

    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` tokens."""
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
        return len(self._ranks)  # ranks are appended last, so an interrupted append does not count

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
    """One dict per generated token, with the chosen token and the ``logprobs`` most likely ones."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """Stop token id or stop string that ended the answer; None for end of sequence and for length."""
    weight_versions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(first token, version): the weights that sampled this token and those after it, up to the next entry.

    There is one entry unless weights were replaced while it ran. Tokens count from 0 at the beginning of the answer, in
    deltas too. A delta has only the entries that begin in it, usually none.
    """
    accepted_prediction_tokens: int = 0
    """Tokens so far that were drafted from :attr:`SamplingParams.prediction` and accepted; also in deltas."""
    rejected_prediction_tokens: int = 0
    """Tokens so far that were drafted from it and rejected."""

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
    """Seconds from arrival to end by cause (docs/why-slow.md). With ``n`` answers, those of the last one to end."""
    preempted_by: list[str] = dataclasses.field(default_factory=list)
    """Ids of the sequences that preempted it: at most the last three, the newest at the end."""
    preempted_during: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Intervals (from, until) in which it was preempted: at most the last eight."""


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """State of one request: all text so far, and whether every answer has ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens that were read from the prefix cache instead of being computed."""
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """One entry per prompt token; the first is None because no token precedes it."""
    metrics: RequestMetrics | None = None
    error: str | None = None
    """Error message, when a finish reason is ``error``."""


@dataclasses.dataclass(slots=True)
class EmbeddingOutput:
    """Embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of dimensions."""
        return len(self.embedding)


@dataclasses.dataclass(slots=True)
class ClassificationOutput:
    """One number per class: probabilities, unless the model's files ask for raw scores."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclasses.dataclass(slots=True)
class ScoringOutput:
    """Relevance of a pair of texts: the cosine of their embeddings, or the score of a cross encoder."""

    score: float


_Result = TypeVar("_Result")


@dataclasses.dataclass(slots=True)
class PoolingRequestOutput(Generic[_Result]):
    """Result for one text or one pair of texts."""

    request_id: str
    outputs: _Result
    prompt_token_ids: list[int]
    finished: bool = True
