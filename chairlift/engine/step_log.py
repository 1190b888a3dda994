"""One record per step. All charts, and the explanations of slow requests, are made from these records."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from chairlift.core.kv_cache.manager import BlockCounts
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.output import Chunk, SchedulerOutput, StepResult

__all__ = ["RowRecord", "StepLog", "StepRecord"]


@dataclasses.dataclass(frozen=True, slots=True)
class RowRecord:
    """The work of one row in one step."""

    request_id: str
    slot: int
    num_tokens: int
    why: str
    """Reason for the row's work: ``decode``, or the reason for the prompt chunk."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. All decode rows share one tuple, so that a steady step adds no object per row."""

    step: int
    start: float
    """Time at which the step was scheduled, in seconds on the engine's clock."""
    end: float
    """Time at which the step's tokens were known."""
    decodes: tuple[tuple[str, int], ...]
    """(request id, slot) of each row that computed one token."""
    chunks: tuple[tuple[str, Chunk], ...]
    num_tokens: int
    context_tokens: int
    """Number of positions that the decode rows attended to, summed over the rows."""
    shared_tokens: int
    """Number of these positions whose KV the step had read already for another row. 0 if the executor reads the KV of
    each row separately."""
    num_waiting: int
    """Number of requests without a row, also those whose grammar, adapter or images are not ready."""
    held_up_by: str
    """Resource that the first waiting request lacks, such as blocks; empty if no request waits."""
    num_held: int
    finished: tuple[str, ...]
    preempted: tuple[str, ...]
    blocks: BlockCounts
    unused_slots: int
    """Number of KV positions in allocated blocks that hold nothing (internal fragmentation)."""
    padding_avoided: int
    """Number of additional tokens that an engine with padding would have computed."""
    accepted: dict[str, int]
    """Request id -> number of tokens from a row with drafts: accepted drafts plus one."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that the requests that joined found in the prefix cache. The next fields: those of them
    whose KV came back from host memory, and from disk."""
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    adapter_bytes: int = 0
    """Bytes of the adapters of all rows, each adapter counted once."""
    num_tiles_encoded: int = 0
    """Number of image tiles that were encoded since the previous step ended. The next two fields: tiles whose rows were
    given up for other images since then, and such tiles that were encoded again."""
    num_tiles_given_up: int = 0
    num_tiles_reencoded: int = 0
    image_bytes: int = 0
    """Bytes of encoded image rows in memory at the step's end; 0 if the model reads no images."""

    @classmethod
    def of(
        cls,
        out: SchedulerOutput,
        result: StepResult,
        start: float,
        end: float,
        images: tuple[int, int, int, int] = (0, 0, 0, 0),
    ) -> StepRecord:
        """Record of a step that was scheduled at ``start`` and whose result was known at ``end``. ``images``: tiles
        encoded, given up and encoded again, and bytes of rows."""
        encoded, given_up, reencoded, num_bytes = images
        return cls(
            step=out.step,
            start=start,
            end=end,
            decodes=out.decode_rows,
            chunks=tuple(zip(out.chunk_ids, out.chunks, strict=True)) if out.chunks else (),
            num_tokens=out.num_tokens,
            context_tokens=out.context_tokens,
            shared_tokens=out.shared_tokens,
            num_waiting=out.num_waiting,
            held_up_by=out.held_up_by,
            num_held=out.num_held,
            finished=tuple([request.request_id for request in result.finished]) if result.finished else (),
            preempted=tuple(out.preempted) if out.preempted else (),
            blocks=out.blocks or BlockCounts(0, 0, 0),
            unused_slots=out.unused_slots,
            padding_avoided=out.padding_avoided,
            accepted=_accepted(out, result),
            num_cached_tokens=out.num_cached_tokens,
            num_host_tokens=out.num_host_tokens,
            num_disk_tokens=out.num_disk_tokens,
            adapter_bytes=out.kind_bytes,
            num_tiles_encoded=encoded,
            num_tiles_given_up=given_up,
            num_tiles_reencoded=reencoded,
            image_bytes=num_bytes,
        )

    @property
    def rows(self) -> list[RowRecord]:
        """Every row of the step, decodes first."""
        rows = [RowRecord(request_id, slot, 1, "decode") for request_id, slot in self.decodes]
        rows += [RowRecord(name, chunk.slot, chunk.num_tokens, chunk.why) for name, chunk in self.chunks]
        return rows

    @property
    def features(self) -> StepFeatures:
        """Features of the step for the cost model."""
        chunks = [chunk for _, chunk in self.chunks]
        return StepFeatures.of(len(self.decodes), self.context_tokens, chunks, self.adapter_bytes, self.shared_tokens)

    def to_json(self) -> str:
        """One line of a step log file. It has the number of decode rows, not their list, so that its length is
        limited."""
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["decodes"]
        fields["chunks"] = [(name, chunk.start, chunk.num_tokens, chunk.why) for name, chunk in self.chunks]
        fields["blocks"] = dataclasses.asdict(self.blocks)
        return json.dumps({**fields, **self.features._asdict()}, separators=(",", ":"))


def _accepted(out: SchedulerOutput, result: StepResult) -> dict[str, int]:
    """Request id -> number of tokens that its row with drafts got: accepted drafts plus one."""
    found: dict[str, int] = {}
    position = len(result.sampled)
    for name, chunk in zip(reversed(out.chunk_ids), reversed(out.chunks), strict=True):
        if not chunk.drafts:  # chunks with drafts come last
            break
        position -= chunk.samples
        found[name] = sum(request is not None for request in result.sampled[position : position + chunk.samples])
    return found if position >= 0 else {}


class StepLog:
    """Records of the last ``capacity`` steps."""

    def __init__(self, capacity: int = 4096) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)
        self.landed: Callable[[StepRecord], None] = self._records.append
        """Adds a record; called when a step has ended."""

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records)

    def __getitem__(self, index: int) -> StepRecord:
        return self._records[index]
