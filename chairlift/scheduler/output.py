"""Messages between scheduler and executor: steps as differences one way, token ids the other way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from chairlift.kv_cache.manager import BlockCounts, NewBlocks
from chairlift.request import Request
from chairlift.vision.spans import ImageSpan

__all__ = ["FAILED_ROW", "Chunk", "NewRow", "SchedulerOutput", "StepResult"]

FAILED_ROW = -1
"""Token id that stands for 'this row has no token': its logits were not finite."""


@dataclasses.dataclass(frozen=True, slots=True)
class NewRow:
    """A request that takes a row of the InputBatch."""

    slot: int
    request_id: str
    token_ids: list[int]
    """All tokens known: the prompt, and after a preemption what was generated as well."""
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[list[int]]
    """Block table per cache group."""
    sampling: Any
    """The executor's own description of how this row samples. The scheduler does not read it."""
    adapter_id: int = 0
    """Number of the adapter that its tokens are computed with; 0: none."""
    images: tuple[ImageSpan, ...] = ()
    """Positions of its prompt that are rows of images."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """``num_tokens`` known tokens of one row, from position ``start`` on."""

    slot: int
    start: int
    num_tokens: int
    samples: int
    """Number of sample positions: the last ``samples`` of the tokens yield a token each. 0: none, 1: only the last."""
    why: str
    """``prefill``, ``recompute`` (after a preemption), ``stalled`` (a decode that had to wait for a block), or
    ``verify`` (a decode with drafts)."""
    drafts: tuple[int, ...] = ()
    """Proposed tokens at the end of the chunk. Each of them, and the known token before them, is a sample position."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def num_accepted(self, tokens: Sequence[int]) -> int:
        """Number of right drafts, when ``tokens`` were drawn at the sample positions.

        Drafts are right up to the first that differs from the token drawn in its place. That token is right too, so
        one more token than the result is known.
        """
        for place, draft in enumerate(self.drafts):
            if tokens[place] != draft:
                return place
        return len(self.drafts)


@dataclasses.dataclass(slots=True)
class SchedulerOutput:
    """One step, as differences from the step before. Applied in the order of the fields.

    Sample positions, and so the token ids that come back, are numbered: first the decode rows in the order of the last
    ``decode_slots`` sent, then the sample positions of the chunks.
    """

    step: int
    left: list[int] = dataclasses.field(default_factory=list)
    """Rows given up since the last step."""
    joined: list[NewRow] = dataclasses.field(default_factory=list)
    new_blocks: list[tuple[int, NewBlocks]] = dataclasses.field(default_factory=list)
    """(slot, blocks appended to its table)."""
    swap_out: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """(group, block, host block) to save in host memory, before anything of this step is written."""
    copies: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """(group, source block, destination block), copied before this step writes anything else."""
    swap_in: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """(group, host block, block) to copy back from host memory before this step computes anything. Applied after
    ``copies``, because a block may be the source of a copy and then the destination of a swap-in."""
    decode_slots: tuple[int, ...] | None = None
    """Rows that compute their newest token and sample, from this step on. None if they are the same as before."""
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    num_decodes: int = 0
    num_tokens: int = 0
    """Tokens computed in this step; 0 means there is nothing to execute."""
    num_recomputed: int = 0
    """Tokens in this step that had been computed before and were lost to a preemption."""

    # The fields below are for the step log and the cost model. An executor that computes does not read them.
    decode_rows: tuple[tuple[str, int], ...] = ()
    """(request id, slot) of every decode row."""
    chunk_ids: list[str] = dataclasses.field(default_factory=list)
    preempted: list[str] = dataclasses.field(default_factory=list)
    preempted_for: dict[str, str] = dataclasses.field(default_factory=dict)
    """Request preempted since the step before -> request that needed its row or blocks; "" for none in particular."""
    stalled: tuple[str, ...] = ()
    """Ids of decoding requests that wait for a block from this step on."""
    held_up_by: str = ""
    """What the first waiting request lacks: ``slots``, ``blocks``, ``tokens``, ``reservation`` (rows reserved for
    another class), ``adapter`` (the step has as many adapters as it may) or ``batch``.

    ``grammar``, ``adapter`` or ``image`` if all waiting requests have a grammar that is being compiled, an adapter that
    is being read, or images that are being encoded. Empty if no request waits. Set also in a step that has nothing to
    execute.
    """
    context_tokens: int = 0
    """Positions that all decode rows attend to together. The cost of a decode grows with it."""
    adapter_bytes: int = 0
    """Bytes of the adapters of all rows, each adapter counted once."""
    num_waiting: int = 0
    num_held: int = 0
    """Finished decode rows that compute until their static batch ends (``batching="static"``)."""
    blocks: BlockCounts | None = None
    unused_slots: int = 0
    """Positions allocated in block tables but not computed: internal fragmentation."""
    padding_avoided: int = 0
    """Tokens a padded engine would have computed beyond ``num_tokens`` in a batch of these rows."""


@dataclasses.dataclass(slots=True)
class StepResult:
    """Result of an update."""

    sampled: Sequence[Request | None]
    """Per sample position: the request whose token was accepted, or None where it was dropped."""
    finished: list[Request]
    """Requests that left for good, and may be delivered."""
