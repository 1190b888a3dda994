"""Results for the caller: plain records with vLLM's field names."""

from __future__ import annotations

import dataclasses
import enum
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, SupportsIndex, TypeVar, overload

from chairlift.base.turn_cache import ResumedTurn

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
    """Why a request ended: the OpenAI API's values, and ``abort``, ``error`` and ``deadline``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"
    """The request could no longer meet its deadline, and the setting ``late_requests`` is ``drop``."""


class OutputKind(enum.Enum):
    """The text that each output of a stream has."""

    DELTA = "delta"
    """Each output has only the new text."""
    CUMULATIVE = "cumulative"
    """Each output has all text so far."""
    FINAL = "final"
    """There is one output, at the end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the raw logits, before penalties, temperature and masks."""

    logprob: float
    rank: int | None = None
    """Rank among all tokens by probability; 1 is the most likely token."""
    decoded_token: str | None = None


class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """Log-probabilities of many tokens in arrays: 12 bytes per entry instead of 300.

    The object behaves like a list of dictionaries and equals a list with the same entries; a dictionary is made when it
    is read. The entry of a token without scores (the first token of a prompt) is None. Slices and pickled copies do not
    share its arrays.

    ``text`` converts a token id to text; without ``text``, ``decoded_token`` is None.
    """

    __slots__ = ("_ends", "_ids", "_logprobs", "_ranks", "_text")

    def __init__(self, text: Callable[[int], str] | None = None) -> None:
        self._text: Final = text
        self._ids = array("i")
        self._logprobs = array("d")
        self._ends = array("q")
        """Per token: index after the last of its entries in ``_ids``."""
        self._ranks = array("i")
        """Per token: rank of the generated (or prompt) token. The other entries of the token have ranks 1, 2, ... in
        order."""

    @property
    def num_entries(self) -> int:
        """Number of log-probabilities, over all tokens."""
        return len(self._ids)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float], rank: int) -> None:
        """Add one token. The lists begin with the token itself, whose rank is ``rank``; the most likely tokens follow.
        Empty lists: the token has no scores. Raises ValueError when the numbers of ids and log-probabilities differ."""
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
        """Yield, at each position, the entry of the generated (or prompt) token. It is the first entry of the
        position."""
        start = 0
        for end, rank in zip(self._ends, self._ranks, strict=True):
            yield self._entry(start, rank) if end > start else None
            start = end

    def __len__(self) -> int:
        return len(self._ranks)  # append() extends the ranks last, so an interrupted append() adds no token

    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._slice(index)
        position = range(len(self))[index]
        start, end = self._ends[position - 1] if position else 0, self._ends[position]
        if start == end:
            return None
        found = {self._ids[start]: self._entry(start, self._ranks[position])}
        for rank, at in enumerate(range(start + 1, end), start=1):
            if (token_id := self._ids[at]) not in found:
                found[token_id] = self._entry(at, rank)
        return found

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        for position in range(len(self)):
            yield self[position]

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

    def _slice(self, index: slice) -> FlatLogprobs:
        begin, end, step = index.indices(len(self._ends))
        found = FlatLogprobs(self._text)
        if step != 1:
            raise ValueError(f"log-probabilities are cut in steps of 1, got {step}; make a list of them first")
        first = self._ends[begin - 1] if begin else 0
        last = self._ends[end - 1] if end > begin else first
        found._ids = self._ids[first:last]
        found._logprobs = self._logprobs[first:last]
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
    """One dict per generated token: token id -> Logprob, for the generated token and the ``logprobs`` most likely
    tokens."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """Stop token id or stop string that ended the answer. None if an end-of-sequence token or the length limit ended
    it."""
    weight_versions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(index of the first token, version of the weights): this version sampled the token and the later ones, up to the
    token of the next entry.

    There is one entry unless weights were replaced while the answer was generated. Indices count from the beginning of
    the answer, in deltas too. A delta has only the entries whose first token is in the delta; usually it has none.
    """
    accepted_prediction_tokens: int = 0
    """Number of tokens so far that were drafted from :attr:`SamplingParams.prediction` and accepted. In a delta, too,
    it counts from the beginning."""
    rejected_prediction_tokens: int = 0
    """Number of tokens so far that were drafted from :attr:`SamplingParams.prediction` and rejected."""

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
    """Cause -> seconds of the time from arrival to end (docs/why-slow.md). With ``n`` answers, those of the answer that
    ended last."""
    preempted_by: list[str] = dataclasses.field(default_factory=list)
    """Ids of the sequences that preempted the request: at most the last three, the newest at the end."""
    preempted_during: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Intervals (from, until), in seconds, in which the request was preempted: at most the last eight."""
    resumed: ResumedTurn | None = None
    """For the first turn after tools were called: the turn that called them, and what this one found of its cache. None
    for other requests."""


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """State of one request: all text so far, and whether all its answers have ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens that were read from the prefix cache instead of being computed."""
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """One entry per prompt token. The first entry is None because no token precedes the first token."""
    metrics: RequestMetrics | None = None
    error: str | None = None
    """Error message, if an answer has finish reason ``error``."""
    vector: bytes | None = None
    """Vector of a text as float32 values, little endian; None for requests that generate text."""


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
