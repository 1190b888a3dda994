"""One step as flat numpy arrays (the input of every model runner), and its sampled tokens (the output)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Masks", "PromptLogprobs", "SampledTokens", "StepBatch", "mask_bits"]

_Int32 = npt.NDArray[np.int32]

Masks = Mapping[int, npt.NDArray[np.uint32]]
"""Sample position -> allowed token ids, contiguous uint32 [ceil(V / 32)]: bit i % 32 of word i // 32 is set where id i
is allowed. A position without an entry allows every id."""


def mask_bits(token_ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.uint32]:
    """A mask that allows exactly ``token_ids``, as in :data:`Masks`."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    allowed[list(token_ids)] = True
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def _none() -> _Int32:
    return np.zeros(0, dtype=np.int32)


@dataclasses.dataclass(slots=True)
class StepBatch:
    """N rows, each with the newest tokens of one sequence; T tokens and G cache groups in total; no padding.

    A sample position is a token of the step after which a token is drawn. P of the T tokens are sample positions.

    All arrays are C-contiguous. The first six are the arrays of ``cl_batch``: the C struct points to them. If the next
    step decodes the same rows, the InputBatch changes these arrays in place. So they are valid only until the next step
    is prepared.
    """

    token_ids: _Int32
    """[T] token ids. A negative entry means the last token of its row: an earlier step sampled it, and it is still on
    the device."""
    positions: _Int32
    """[T] index of each token in its sequence."""
    cu_seqlens: _Int32
    """[N + 1] offsets of the rows in the flat batch."""
    seq_lens: _Int32
    """[N] length of each sequence after this step."""
    block_tables: _Int32
    """[G, N, M] block ids. Entries after the end of the sequence, or before its sliding window, are meaningless."""
    slot_mapping: npt.NDArray[np.int64]
    """[G, T]: ``block * block_size + offset``, the cache position of each token's KV. In a group of recurrent states:
    the block that holds the state after the row's newest token."""
    axes: _Int32 | None = None
    """[3, T] position of each token in time, height and width, for rotary embeddings with three axes. None if all three
    equal ``positions``."""
    adapters: _Int32 | None = None
    """[T] ``adapter_id`` of each token, 0 for no adapter. None if no token has an adapter."""
    seen_ends: _Int32 | None = None
    """[T] number of leading positions that each token may attend to. It is larger than the token's position plus one
    inside an image that attends both ways. None if all tokens are causal."""
    image_rows: list[tuple[int, int, bytes, int]] = dataclasses.field(default_factory=list)
    """One entry per run of tokens whose input vectors are rows of an encoded image tile: (index of the first token in
    the flat batch, number of tokens, key of the tile, first row of the tile)."""
    slots: _Int32 = dataclasses.field(default_factory=_none)
    """[N] for each row of the step, its permanent row in the InputBatch."""
    tokens: _Int32 = dataclasses.field(default_factory=_none)
    """[num_slots, L] prompt and output tokens of every slot so far. An entry is negative while its token is still on
    the device."""
    sampling: list[Any] = dataclasses.field(default_factory=list)
    """[N] sampling parameters of each row, as passed at admission. It is the same list object as in the previous step
    if both steps only decode the same rows."""
    sample_rows: _Int32 = dataclasses.field(default_factory=_none)
    """[P] row of each sample position. Results have this order: decode rows, then chunks."""
    sample_tokens: _Int32 = dataclasses.field(default_factory=_none)
    """[P] index of each sample position in the flat batch, ascending. The last one of a row is the row's last token."""
    swap_out: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """One entry per block to save in host memory before all other work of the step: (cache group, block, host
    block)."""
    copies: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """One entry per block to copy after ``swap_out``, before the step writes KV: (cache group, source block,
    destination block)."""
    swap_in: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """One entry per block to load from host memory after ``copies``: (cache group, host block, block)."""
    verifies: list[tuple[int, int, Any]] = dataclasses.field(default_factory=list)
    """One entry per row with drafts: (first sample position, slot of the row, chunk). The tokens of the chunk after the
    first are drafts."""
    prompt_rows: list[tuple[int, int, _Int32]] = dataclasses.field(default_factory=list)
    """One entry per chunk whose request asked for prompt log-probabilities: (row, first position, prompt tokens)."""

    @property
    def sample_slots(self) -> _Int32:
        """[P] for each sample position, the permanent row in the InputBatch."""
        return self.slots[self.sample_rows]

    @property
    def sample_lengths(self) -> _Int32:
        """[P] number of tokens up to and including each sample position. It is also the position of the token drawn
        there."""
        return self.positions[self.sample_tokens] + 1

    @property
    def histories(self) -> list[_Int32]:
        """For each of the P sample positions: a view of the row's tokens up to that position. It is valid until the
        tokens of this step are stored.

        A view is complete if all tokens of the row were sampled on the host. Tokens that a device sampled may still be
        missing.
        """
        ends = zip(self.sample_slots.tolist(), self.sample_lengths.tolist(), strict=True)
        return [self.tokens[slot, :length] for slot, length in ends]

    @property
    def moves_blocks(self) -> bool:
        """Whether blocks must be moved before the step is computed."""
        return bool(self.swap_out or self.copies or self.swap_in)

    def sampled_at(self, position: int) -> StepBatch:
        """The step with only one of its sample positions, for sampling. The tokens stay the same."""
        kept = slice(position, position + 1)
        return dataclasses.replace(
            self,
            sampling=list(self.sampling),  # another list, because other rows are sampled than in the step before
            sample_rows=self.sample_rows[kept],
            sample_tokens=self.sample_tokens[kept],
        )

    def part(self, first: int, end: int) -> StepBatch:
        """A step of the rows ``first`` to ``end - 1`` alone. It moves no blocks: the whole step has done that."""
        begin, stop = int(self.cu_seqlens[first]), int(self.cu_seqlens[end])
        sample, last = self.sample_range(first, end)
        return StepBatch(
            token_ids=self.token_ids[begin:stop],
            positions=self.positions[begin:stop],
            cu_seqlens=self.cu_seqlens[first : end + 1] - begin,
            seq_lens=self.seq_lens[first:end],
            block_tables=np.ascontiguousarray(self.block_tables[:, first:end]),
            slot_mapping=np.ascontiguousarray(self.slot_mapping[:, begin:stop]),
            axes=None if self.axes is None else np.ascontiguousarray(self.axes[:, begin:stop]),
            adapters=None if self.adapters is None else self.adapters[begin:stop],
            seen_ends=None if self.seen_ends is None else self.seen_ends[begin:stop],
            image_rows=[(at - begin, count, key, row) for at, count, key, row in self.image_rows if begin <= at < stop],
            slots=self.slots[first:end],
            tokens=self.tokens,
            sampling=self.sampling[first:end],
            sample_rows=self.sample_rows[sample:last] - first,
            sample_tokens=self.sample_tokens[sample:last] - begin,
            prompt_rows=[(row - first, start, known) for row, start, known in self.prompt_rows if first <= row < end],
        )

    def sample_range(self, first: int, end: int) -> tuple[int, int]:
        """(first, end) of the sample positions of the rows ``first`` to ``end - 1``."""
        begin, stop = np.searchsorted(self.sample_rows, (first, end)).tolist()
        return begin, stop

    def only(self, kept: npt.NDArray[np.intp]) -> StepBatch:
        """The step reduced to its tokens ``kept`` [K], for attention. ``kept`` is ascending. The kept tokens of a row
        are its last tokens, without gaps."""
        rows, counts = np.unique(np.searchsorted(self.cu_seqlens, kept, side="right") - 1, return_counts=True)
        return StepBatch(
            self.token_ids[kept],
            self.positions[kept],
            np.concatenate(([0], np.cumsum(counts)), dtype=np.int32),
            self.seq_lens[rows],
            np.ascontiguousarray(self.block_tables[:, rows]),
            np.ascontiguousarray(self.slot_mapping[:, kept]),
            None if self.axes is None else np.ascontiguousarray(self.axes[:, kept]),
            None if self.adapters is None else self.adapters[kept],
            None if self.seen_ends is None else self.seen_ends[kept],
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens that one chunk computed, or the reason why the chunk failed."""

    slot: int
    first: int
    """Position of the first token reported."""
    entries: list[Any]
    """One entry per position, beginning at ``first``; see ``logprobs`` of :class:`SampledTokens` for the type."""
    error: str = ""
    """Reason why there are no entries, or why the chunk could not be computed. Only this request ends with an error."""


@dataclasses.dataclass(slots=True)
class SampledTokens:
    """Tokens of a step, one per sample position, in the order of ``StepBatch.sample_tokens``."""

    token_ids: list[int]
    """One token id per sample position; -1 if no token could be drawn."""
    logprobs: Sequence[Any] | None = None
    """One entry per sample position: a record with ``token_ids``, ``logprobs`` (drawn token first) and ``rank``, or
    None. The list is None if no request asked for log-probabilities."""
    errors: dict[int, str] = dataclasses.field(default_factory=dict)
    """Sample position -> reason why it has no token."""
    prompt_logprobs: list[PromptLogprobs] = dataclasses.field(default_factory=list)
    vectors: Sequence[npt.NDArray[np.float32] | None] | None = None
    """One vector per sample position, of any length, for a model that computes vectors instead of tokens; None for a
    row without a vector. The list is None for a model that generates tokens."""

    @classmethod
    def joined(cls, parts: Sequence[SampledTokens]) -> SampledTokens:
        """Tokens of consecutive parts of a step, as the tokens of the whole step."""
        whole = cls([])
        logprobs: list[Any] = []
        for part in parts:
            first = len(whole.token_ids)
            whole.token_ids += part.token_ids
            whole.errors |= {first + position: reason for position, reason in part.errors.items()}
            whole.prompt_logprobs += part.prompt_logprobs
            logprobs += part.logprobs or [None] * len(part.token_ids)
        if any(entry is not None for entry in logprobs):
            whole.logprobs = logprobs
        return whole
