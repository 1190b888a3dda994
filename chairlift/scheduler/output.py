"""What crosses between brain and muscle: differences one way, token ids the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from chairlift.kv_cache.manager import BlockCounts, NewBlocks
from chairlift.request import Request

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
    """The executor's own description of how this row samples; opaque to the brain."""
    adapter_id: int = 0
    """Which adapter its tokens are computed with; 0: none."""


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
    """The last tokens of the chunk, where they are not known but proposed; each of them, and the known one before them,
    is a sample position."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def num_accepted(self, tokens: Sequence[int]) -> int:
        """How many drafts are right when ``tokens`` were drawn at the sample positions: all before the first that
        differs from what was drawn in its place. One more token than that is then known."""
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
    """(group, host block, block) to bring back from host memory, before this step computes anything. It comes after
    ``copies``: a source of theirs may have been given back since, and be where something is brought back to."""
    decode_slots: tuple[int, ...] | None = None
    """Rows that compute their one newest token and sample, from this step on; None when it is as before."""
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    num_decodes: int = 0
    num_tokens: int = 0
    """Tokens computed in this step; 0 means there is nothing to execute."""
    num_recomputed: int = 0
    """Of those, tokens that had been computed before and were lost to a preemption."""

    # For the step log and the cost model; an executor that computes does not read what follows.
    decode_rows: tuple[tuple[str, int], ...] = ()
    """(request id, slot) of every decode row."""
    chunk_ids: list[str] = dataclasses.field(default_factory=list)
    preempted: list[str] = dataclasses.field(default_factory=list)
    preempted_for: dict[str, str] = dataclasses.field(default_factory=dict)
    """Requests preempted since the step before -> who needed what they had; empty where nobody in particular did."""
    stalled: tuple[str, ...] = ()
    """Decodes that rest from this step on, for want of a block."""
    held_up_by: str = ""
    """What the first in line that was not let in waits for: ``slots``, ``blocks``, ``tokens``, ``reservation`` (rows
    kept for another class), ``adapter`` (the step has as many adapters as it may) or ``batch``; ``grammar`` and
    ``adapter`` when only requests wait whose grammar is being compiled, or whose adapter is read, and empty when nobody
    waits. Set also where there is nothing to execute."""
    context_tokens: int = 0
    """Positions that the decode rows attend to, together: what the cost of a decode grows with."""
    num_waiting: int = 0
    num_held: int = 0
    """Decode rows that only compute because their batch has not ended (``batching="static"``)."""
    blocks: BlockCounts | None = None
    unused_slots: int = 0
    """Positions allocated in block tables but not computed: internal fragmentation."""
    padding_avoided: int = 0
    """Tokens a padded engine would have computed beyond ``num_tokens`` in a batch of these rows."""


@dataclasses.dataclass(slots=True)
class StepResult:
    """What an update changed."""

    sampled: Sequence[Request | None]
    """Per sample position: the request whose token was accepted, or None where it was dropped."""
    finished: list[Request]
    """Requests that left for good, and may be delivered."""
