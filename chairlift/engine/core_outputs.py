"""What a core returns from its steps, as plain data: tokens, log-probabilities, progress and ends of sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from chairlift.base.outputs import FinishReason
from chairlift.base.turn_cache import ResumedTurn
from chairlift.engine.causes import DecodeSeconds
from chairlift.engine.kv_store.report import StoreNews

__all__ = ["CoreOutputs", "FinishedSequence", "MoveReport", "Progress", "TokenRecord", "renamed"]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRecord:
    """Log-probabilities at one position: first the token at the position, then the most likely tokens, best first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the first entry (the token at the position) among all tokens; 1 is the most likely."""

    @classmethod
    def of(cls, entry: Any) -> TokenRecord:
        """The record of an executor's arrays for one position."""
        return cls(entry.token_ids.tolist(), entry.logprobs.tolist(), int(entry.rank))


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedSequence:
    """A sequence that has ended; its output may be delivered."""

    sequence_id: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    error: str | None = None
    causes: dict[str, float] | None = None
    """Cause -> seconds, over the sequence's time from arrival to end; None if the core did not end the sequence."""
    preempted_by: list[str] = dataclasses.field(default_factory=list)
    """Ids of the sequences that preempted this sequence: at most the last three, the newest at the end."""
    preempted_during: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Intervals (from, until) in which the sequence was preempted, on the core's clock: at most the last eight."""


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a sequence whose next token needs several steps: a long prefill, or a recompute after preemption."""

    sequence_id: str
    num_output_tokens: int
    """Number of output tokens when this record was made. The record is outdated when the sequence has more output
    tokens."""
    num_computed: int
    """Number of leading positions of prompt and answer whose KV is computed."""
    preempted: bool
    seconds_left: float | None = None
    """Forecast of the seconds until the sequence's next token, assuming that later steps take as long as this step.
    None while the sequence pauses."""


@dataclasses.dataclass(frozen=True, slots=True)
class MoveReport:
    """What an engine has done for the move of a sequence to another engine; see
    :mod:`chairlift.engine.kv_moves`."""

    sequence_id: str
    stage: str
    """Stage of the order that this report answers."""
    num_tokens: int = 0
    """Number of leading tokens whose KV is in the files (``write``) or in the cache (``fetch``)."""
    places: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    """(block index, writer, cache group, slot) of each block that another engine needs for these tokens."""
    generation: int = 0
    """That of the order."""
    failure: str = ""
    """Why the order cannot be followed; empty if it was."""


@dataclasses.dataclass(slots=True)
class CoreOutputs:
    """Results of one or more steps. The entries with index i in ``sequence_ids``, ``token_ids`` and ``logprobs`` belong
    to the same token."""

    sequence_ids: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenRecord | None] | None = None
    """One record or None per token; the list is None if no request asked for log-probabilities."""
    joined: list[tuple[str, int, float]] = dataclasses.field(default_factory=list)
    """(sequence, number of prompt tokens found in the prefix cache, time) of each sequence in its first step."""
    prompt_logprobs: list[tuple[str, int, list[TokenRecord]]] = dataclasses.field(default_factory=list)
    """(sequence, first position, one record per position). After a recompute, earlier records may be repeated."""
    finished: list[FinishedSequence] = dataclasses.field(default_factory=list)
    decoding: list[tuple[str, dict[str, float], DecodeSeconds]] = dataclasses.field(default_factory=list)
    """Sequences with stop strings that began to decode: (id, cause -> seconds charged so far, totals of the cause
    ledger at that time)."""
    decode_seconds: DecodeSeconds = (0.0, 0.0, 0.0)
    """Totals of the cause ledger at the time when the step's tokens were known."""
    progress: list[Progress] = dataclasses.field(default_factory=list)
    """Progress of sequences that got no token, but made progress."""
    predicted: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    """(sequence, accepted drafts, rejected drafts): counts since the sequence began, for sequences with new results.
    Only drafts from the request's ``prediction`` are counted."""
    vectors: list[tuple[str, bytes]] = dataclasses.field(default_factory=list)
    """(sequence, its vector as float32 values, little endian) of each sequence that ended after its prompt. Such a
    sequence has no tokens."""
    moves: list[MoveReport] = dataclasses.field(default_factory=list)
    """Reports about sequences that move to another engine. All tokens of this object come before them."""

    stored: list[StoreNews] = dataclasses.field(default_factory=list)
    """What the engine can load from its store, or no longer."""
    fetched: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    """(sequence, prompt tokens whose KV came back from host memory, from disk) of each entry of ``joined`` that has
    such tokens."""
    resumed: list[tuple[str, ResumedTurn]] = dataclasses.field(default_factory=list)
    """(sequence, the turn that it continues) of each entry of ``joined`` that is the first turn after a pause."""

    def merge(self, later: CoreOutputs) -> None:
        """Append the results of later steps to this object, because this object could not be sent yet."""
        if self.logprobs is not None or later.logprobs is not None:
            mine = self.logprobs or [None] * len(self.token_ids)
            self.logprobs = mine + (later.logprobs or [None] * len(later.token_ids))
        self.sequence_ids += later.sequence_ids
        self.token_ids += later.token_ids
        self.joined += later.joined
        self.fetched += later.fetched
        self.resumed += later.resumed
        self.prompt_logprobs += later.prompt_logprobs
        self.finished += later.finished
        self.decoding += later.decoding
        self.progress += later.progress
        self.predicted += later.predicted
        self.vectors += later.vectors
        self.moves += later.moves
        self.stored += later.stored
        self.decode_seconds = max(self.decode_seconds, later.decode_seconds)


def renamed(outputs: CoreOutputs, names: Mapping[str, str | None]) -> CoreOutputs:
    """The results with other ids of sequences. ``names`` maps an id to its new one, or to None: its results are left
    out. Sequences that ``names`` does not have keep their ids. Reports about moves stay as they are."""

    def name(sequence_id: str) -> str | None:
        return names.get(sequence_id, sequence_id)

    def fields(each: Any) -> Any:
        return dataclasses.replace(each, sequence_id=name(each.sequence_id))

    def pairs(entries: list[Any]) -> list[Any]:
        return [(name(each[0]), *each[1:]) for each in entries if name(each[0]) is not None]

    rows = [row for row, each in enumerate(outputs.sequence_ids) if name(each) is not None]
    return dataclasses.replace(
        outputs,
        sequence_ids=[names.get(each) or each for each in map(outputs.sequence_ids.__getitem__, rows)],
        token_ids=[outputs.token_ids[row] for row in rows],
        logprobs=None if outputs.logprobs is None else [outputs.logprobs[row] for row in rows],
        joined=pairs(outputs.joined),
        fetched=pairs(outputs.fetched),
        resumed=pairs(outputs.resumed),
        prompt_logprobs=pairs(outputs.prompt_logprobs),
        finished=[fields(each) for each in outputs.finished if name(each.sequence_id) is not None],
        decoding=pairs(outputs.decoding),
        progress=[fields(each) for each in outputs.progress if name(each.sequence_id) is not None],
        predicted=pairs(outputs.predicted),
        vectors=pairs(outputs.vectors),
    )
