"""Messages between scheduler and executor. Steps go to the executor as differences; token ids come back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from chairlift.base.image_spans import ImageSpan
from chairlift.core.kv_cache.manager import BlockCounts, NewBlocks
from chairlift.core.request import Request

__all__ = ["FAILED_ROW", "Chunk", "NewRow", "SchedulerOutput", "StepResult"]

FAILED_ROW = -1
"""Value in place of a token id for a row without a token, because its logits were not finite."""


@dataclasses.dataclass(frozen=True, slots=True)
class NewRow:
    """A request that gets a row of the executor's InputBatch."""

    slot: int
    request_id: str
    token_ids: list[int]
    """All known tokens: the prompt and, after a preemption, also the tokens generated so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[list[int]]
    """Block tables: one list of block ids per cache group."""
    sampling: Any
    """Sampling parameters of the row, for the executor. The scheduler does not read them."""
    adapter_id: int = 0
    """Number of the request's adapter; 0 for no adapter."""
    images: tuple[ImageSpan, ...] = ()
    """Spans of the prompt whose input vectors come from an encoded image instead of token embeddings."""

    @classmethod
    def of(cls, request: Request) -> NewRow:
        """The row of a request that has just got it."""
        return cls(
            slot=request.slot,
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=[list(table) for table in request.block_ids],
            sampling=request.sampling,
            adapter_id=request.adapter_id,
            images=request.images,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens of one row that a step computes: ``num_tokens`` tokens from position ``start`` on."""

    slot: int
    start: int
    num_tokens: int
    samples: int
    """Number of sample positions: each of the last ``samples`` tokens of the chunk yields a sampled token. 0 means
    none."""
    why: str
    """Reason for the chunk: ``prefill``, ``recompute`` (after a preemption), ``stalled`` (a decode that had to wait for
    a block, or whose recurrent state went back), or ``verify`` (a decode with drafts)."""
    drafts: tuple[int, ...] = ()
    """Proposed tokens at the end of the chunk. The token before the drafts, and each draft, is a sample position."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def num_accepted(self, tokens: Sequence[int]) -> int:
        """Number of right drafts. ``tokens`` are the tokens sampled at the chunk's sample positions.

        Drafts are right up to the first draft that differs from the token sampled at its position. That sampled token
        is right too, so the row gets one token more than the result.
        """
        for index, draft in enumerate(self.drafts):
            if tokens[index] != draft:
                return index
        return len(self.drafts)


@dataclasses.dataclass(slots=True)
class SchedulerOutput:
    """One step, as differences from the previous step. The executor applies the fields in their order.

    Sample positions, and the token ids that come back for them, have this order: first the decode rows in the order of
    the newest ``decode_slots``, then the sample positions of the chunks.
    """

    step: int
    left: list[int] = dataclasses.field(default_factory=list)
    """Rows from which requests were removed since the previous step."""
    joined: list[NewRow] = dataclasses.field(default_factory=list)
    new_blocks: list[tuple[int, NewBlocks]] = dataclasses.field(default_factory=list)
    """One entry per block table that grows: (slot of the row, blocks appended to its table)."""
    swap_out: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """One entry per block to save in host memory before this step writes anything: (cache group, block, host block)."""
    copies: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """One entry per block to copy before this step writes anything else: (cache group, source block, destination
    block)."""
    swap_in: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """One entry per block to copy back from host memory before this step computes anything: (cache group, host block,
    block). Applied after ``copies``, because a block may be the source of a copy and also the destination of a
    swap-in."""
    decode_slots: tuple[int, ...] | None = None
    """Rows that compute their newest token and sample the next one, in this step and in later steps. None: the same
    rows as in the previous step."""
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    num_decodes: int = 0
    num_tokens: int = 0
    """Number of tokens computed in this step; 0 means that there is nothing to execute."""
    num_recomputed: int = 0
    """Number of tokens in this step that were computed before, but lost by a preemption."""

    # The fields below are for the step log and the cost model. A real executor does not read them.
    decode_rows: tuple[tuple[str, int], ...] = ()
    """(request id, slot) of every decode row."""
    chunk_ids: list[str] = dataclasses.field(default_factory=list)
    preempted: list[str] = dataclasses.field(default_factory=list)
    preempted_for: dict[str, str] = dataclasses.field(default_factory=dict)
    """Id of a request preempted since the previous step -> id of the request that needed its row or blocks; "" if there
    is none."""
    stalled: tuple[str, ...] = ()
    """Ids of decoding requests that begin to wait for a block in this step."""
    held_up_by: str = ""
    """Resource that the first waiting request lacks: ``slots``, ``blocks``, ``tokens``, ``reservation`` (the free rows
    are reserved for another class), ``adapter`` (the step has the maximum number of adapters) or ``batch`` (a closed
    batch runs).

    The value is ``grammar``, ``adapter`` or ``image`` if the queue is empty and a request waits until its grammar is
    compiled, its adapter is read, or its images are encoded. ``image`` is also the value if images of the first waiting
    request must be encoded again. It is empty if no request waits. It is also set in a step that has nothing to
    execute.
    """
    context_tokens: int = 0
    """Number of positions that the decode rows attend to, summed over the rows. The cost of decoding grows with it."""
    shared_tokens: int = 0
    """Number of these positions whose KV the step reads only for another row. 0 if the executor reads the KV of each
    row separately."""
    kind_bytes: int = 0
    """Bytes that the step reads because of the kinds of its rows, for example adapters, each counted once."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that the requests that joined found in the prefix cache. The next fields: those of them
    whose KV came back from host memory, and from disk."""
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_waiting: int = 0
    """Number of requests without a row, also those whose grammar, adapter or images are not ready."""
    num_held: int = 0
    """Number of finished decode rows that compute on until their static batch ends (``batching="static"``)."""
    blocks: BlockCounts | None = None
    unused_slots: int = 0
    """Number of positions in allocated blocks that are not computed (internal fragmentation)."""
    padding_avoided: int = 0
    """Number of additional tokens that an engine with padding would compute for the rows of this step."""

    @property
    def keeps_rows(self) -> bool:
        """Whether the step has the rows and blocks of the previous step, and no blocks are copied or swapped."""
        return not (self.joined or self.left or self.new_blocks or self.copies or self.swap_in or self.swap_out)


@dataclasses.dataclass(slots=True)
class StepResult:
    """Result of :meth:`Scheduler.update`."""

    sampled: Sequence[Request | None]
    """One entry per sample position: the request that got the token, or None if the token was dropped."""
    finished: list[Request]
    """Requests that have ended; their output may be delivered."""
