"""Keeps one permanent row of arrays per running request. The scheduler sends only the changes of each step. They are
applied to the rows, and the step's flat arrays are read from the rows (vLLM V1's persistent batch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from chairlift.base.image_spans import ImageSpan, axes_of
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.step_batch import StepBatch
from chairlift.core.scheduler.output import Chunk, NewRow, SchedulerOutput
from chairlift.errors import InvariantError

__all__ = ["Awaited", "InputBatch"]

_Int32 = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class Awaited:
    """Positions in the InputBatch whose tokens are not known yet, because a step still computes them."""

    ticket: int
    """Placeholder (a number below 0) that is stored in place of each token until the token arrives."""
    slots: _Int32
    ends: _Int32
    """Per sample position: index in its sequence of the token that is sampled there."""
    verifies: list[tuple[int, int, Chunk]] = dataclasses.field(default_factory=list)
    """(first sample position, slot, chunk) of each row with drafts, as in :attr:`StepBatch.verifies`."""


class InputBatch:
    """State of each running request in numpy arrays: tokens, progress, block tables, sampling parameters.

    ``apply`` applies the differences of one step and returns the step's arrays. ``store`` stores the sampled tokens.
    Steps must be applied in order. If a step is applied before the tokens of the previous step are stored, call
    ``expect`` first: it stores placeholders, which are replaced when the tokens arrive.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        state_spans: Sequence[int | None] = (),
    ) -> None:
        """``state_spans`` has :attr:`CacheGroup.state_span` per cache group; empty if no group holds recurrent
        states."""
        self.block_size = block_size
        spans = list(state_spans) or [None] * num_groups
        self._spans = np.array([span or block_size for span in spans], dtype=np.int32)[:, None]
        # Number of cache positions per block: one per token in groups of K and V; one in all if the block holds a
        # recurrent state.
        self._places = np.array([1 if span else block_size for span in spans], dtype=np.int32)[:, None]
        self._advances = np.array([0 if span else 1 for span in spans], dtype=np.int64)[:, None]
        self.num_slots = num_slots
        max_blocks = -(-max_model_len // block_size)
        # np.zeros allocates a page when it is first used, so a row takes only the memory that it uses.
        self.tokens = np.zeros((num_slots, max_model_len + 1), dtype=np.int32)
        self.num_computed = np.zeros(num_slots, dtype=np.int32)
        self.block_tables = np.zeros((num_groups, num_slots, max_blocks), dtype=np.int32)
        self._groups = np.arange(num_groups)[:, None]
        self.sampling: list[SamplingRow | None] = [None] * num_slots
        self.num_prompt_tokens = np.zeros(num_slots, dtype=np.int32)
        self.adapters = np.zeros(num_slots, dtype=np.int32)
        self.images: dict[int, tuple[ImageSpan, ...]] = {}
        """Slot -> spans of the images in the row's prompt, for rows with images."""
        self._axes: dict[int, _Int32] = {}
        """Slot -> positions on three axes, for rows whose images need them; see :func:`axes_of`."""
        self._shifts = np.zeros(num_slots, dtype=np.int32)
        """Per slot: number to add to the index of a token after the images, to get the token's rotary position."""
        self._decodes = np.zeros(0, dtype=np.int32)
        self._steady: StepBatch | None = None
        self._unapplied: list[SchedulerOutput] = []
        """Steps whose changes are not applied yet: the newest step, after any earlier steps that failed before their
        changes were applied. All are applied in order."""
        self._ticket = 0

    def apply(self, out: SchedulerOutput) -> StepBatch:
        """Apply a step's changes to the rows. Returns the step's tokens as flat arrays: decode rows first, then the
        chunks."""
        self._unapplied.append(out)
        # if this step fails, the next one is built from the rows
        last = self._steady
        self._steady = None
        while self._unapplied:
            self.take(self._unapplied[0])
            del self._unapplied[0]
        changed = out.left or out.joined or out.chunks or out.decode_slots is not None
        step = self._flatten(out) if changed or last is None else self._advance(last, out)
        self._steady = None if out.chunks else step
        return step

    def take(self, out: SchedulerOutput) -> None:
        """Apply a step's changes to the rows, before the forward pass of the step. If this call fails, it is safe to
        call it again with the same ``out``."""
        for slot in out.left:
            self._clear(slot)
        for row in out.joined:
            self._join(row)
        for slot, blocks in out.new_blocks:
            end = blocks.first + len(blocks.block_ids)
            self.block_tables[blocks.group][slot, blocks.first : end] = blocks.block_ids
        if out.decode_slots is not None:
            self._decodes = np.array(out.decode_slots, dtype=np.int32)
        for chunk in out.chunks:
            self.num_computed[chunk.slot] = chunk.end
            if chunk.drafts:
                self.tokens[chunk.slot, chunk.end - len(chunk.drafts) : chunk.end] = chunk.drafts
        self.num_computed[self._decodes] += 1  # comes last, because only the operations above may be repeated

    def expect(self, step: StepBatch) -> Awaited:
        """Mark the tokens of the sample positions as pending. :meth:`arrived` stores them later."""
        self._ticket = self._ticket % -(2**30) - 1
        slots, ends = self._ends(step)
        self.tokens[slots, ends] = self._ticket
        return Awaited(self._ticket, slots, ends, step.verifies)

    def arrived(self, awaited: Awaited, token_ids: list[int]) -> None:
        """Store tokens that were pending, at the positions that still wait for them. Meanwhile a row may have a new
        request, or may compute the same position again; such positions are skipped."""
        waiting = self.tokens[awaited.slots, awaited.ends] == awaited.ticket
        self.tokens[awaited.slots[waiting], awaited.ends[waiting]] = _known(token_ids)[waiting]
        self._settle(awaited.verifies, token_ids)

    def store(self, step: StepBatch, token_ids: list[int]) -> None:
        """Append the sampled tokens to their rows. A row with several sample positions gets the last token."""
        self.tokens[self._ends(step)] = _known(token_ids)  # if a position occurs twice, numpy keeps the last value
        self._settle(step.verifies, token_ids)

    def _settle(self, verifies: list[tuple[int, int, Chunk]], token_ids: list[int]) -> None:
        """Store, for rows with drafts, the token sampled after the accepted drafts."""
        for first, slot, chunk in verifies:
            own = token_ids[first : first + chunk.samples]
            accepted = chunk.num_accepted(own)
            end = chunk.start + 1 + accepted
            self.tokens[slot, end] = max(own[accepted], 0)
            self.num_computed[slot] = end

    def _ends(self, step: StepBatch) -> tuple[_Int32, _Int32]:
        """(slots, indices of the new tokens in their sequences): two arrays with one entry per sample position."""
        return step.sample_slots, step.seq_lens[step.sample_rows]

    def _join(self, row: NewRow) -> None:
        slot = row.slot
        count = len(row.token_ids)
        self._clear(slot)
        self.tokens[slot, :count] = row.token_ids
        self.num_computed[slot] = row.num_computed_tokens
        self.num_prompt_tokens[slot] = row.num_prompt_tokens
        for table, blocks in zip(self.block_tables, row.block_ids, strict=True):
            table[slot, : len(blocks)] = blocks
        self.sampling[slot] = row.sampling
        self.adapters[slot] = row.adapter_id
        if row.images:
            self.images[slot] = row.images
            axes, self._shifts[slot] = axes_of(row.images)
            if axes.size:
                self._axes[slot] = axes

    def _clear(self, slot: int) -> None:
        self.num_computed[slot] = self.num_prompt_tokens[slot] = self.adapters[slot] = 0
        self.block_tables[:, slot] = 0
        self.sampling[slot] = None
        self.images.pop(slot, None)
        self._axes.pop(slot, None)
        self._shifts[slot] = 0

    def _advance(self, step: StepBatch, out: SchedulerOutput) -> StepBatch:
        """Arrays of the next step, if exactly the rows of ``step`` decode again. It changes ``step`` in place, which is
        faster than :meth:`_flatten` and gives the same arrays."""
        for array in (step.positions, step.seq_lens):
            array += 1
        if step.axes is not None:
            step.axes += 1  # a decoding row is at a position after its images
        step.slot_mapping += self._advances
        begin = np.flatnonzero(step.positions % self.block_size == 0)
        if len(begin):  # rows that begin a block
            blocks = step.positions[begin] // self._spans
            if blocks.max() >= step.block_tables.shape[2]:
                step = dataclasses.replace(step, block_tables=self._tables(step.slots, step.seq_lens))
            numbers = self.block_tables[self._groups, step.slots[begin], blocks]
            step.block_tables[self._groups, begin, blocks] = numbers
            step.slot_mapping[:, begin] = numbers.astype(np.int64) * self._places
        step.token_ids[:] = self.tokens[step.slots, step.positions]
        step.swap_out = out.swap_out
        step.copies = out.copies
        step.swap_in = out.swap_in
        return step

    def _flatten(self, out: SchedulerOutput) -> StepBatch:
        decodes = self._decodes
        chunks = out.chunks
        slots = np.concatenate((decodes, np.array([chunk.slot for chunk in chunks], dtype=np.int32)))
        seq_lens = self.num_computed[slots]
        lengths = np.array([1] * len(decodes) + [chunk.num_tokens for chunk in chunks], dtype=np.int32)
        samples = np.array([1] * len(decodes) + [chunk.samples for chunk in chunks], dtype=np.int32)
        cu_seqlens = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        positions = _last_of_each(seq_lens, lengths)
        token_slots = np.repeat(slots, lengths)
        rows = np.arange(len(slots), dtype=np.int32)
        return StepBatch(
            token_ids=self.tokens[token_slots, positions],
            positions=positions,
            cu_seqlens=cu_seqlens,
            seq_lens=seq_lens,
            block_tables=self._tables(slots, seq_lens),
            slot_mapping=self._slot_mapping(token_slots, positions),
            axes=self._token_axes(token_slots, positions) if self._axes else None,
            adapters=self.adapters[token_slots] if self.adapters[slots].any() else None,
            seen_ends=self._seen_ends(chunks, positions, len(decodes)) if self.images else None,
            image_rows=self._image_rows(chunks, len(decodes)) if self.images else [],
            slots=slots,
            tokens=self.tokens,
            sampling=[self.sampling[slot] for slot in slots.tolist()],
            sample_rows=np.repeat(rows, samples),
            sample_tokens=_last_of_each(cu_seqlens[1:], samples),
            swap_out=out.swap_out,
            copies=out.copies,
            swap_in=out.swap_in,
            verifies=self._verifies(chunks, len(decodes)),
            prompt_rows=self._prompt_rows(chunks, len(decodes)),
        )

    def _image_rows(self, chunks: list[Chunk], at: int) -> list[tuple[int, int, bytes, int]]:
        """(index in the flat batch, count, tile key, first row) of the tokens that are image embeddings, as in
        :attr:`StepBatch.image_rows`. ``at`` is the index of the first chunk's first token in the flat batch."""
        found = []
        for chunk in chunks:
            for span in self.images.get(chunk.slot, ()):
                first = max(span.position, chunk.start)
                end = min(span.end, chunk.end)
                if first < end:
                    row = span.first + first - span.position
                    found.append((at + first - chunk.start, end - first, span.key, row))
            at += chunk.num_tokens
        return found

    def _seen_ends(self, chunks: list[Chunk], positions: _Int32, at: int) -> _Int32 | None:
        """Number of leading positions that each token may attend to, as in :attr:`StepBatch.seen_ends`; None if all
        tokens are causal. ``at`` is the index of the first chunk's first token in the flat batch. Raises InvariantError
        if a chunk contains only a part of an image whose tokens must be computed together."""
        found = None
        for chunk in chunks:
            for span in self.images.get(chunk.slot, ()):
                if span.whole and span.position < chunk.end and span.end > chunk.start:
                    if span.position < chunk.start or span.end > chunk.end:
                        raise InvariantError(f"{chunk} cuts an image at {span.position} to {span.end}")
                    if found is None:
                        found = positions + 1
                    first = at + span.position - chunk.start
                    found[first : first + span.length] = span.end
            at += chunk.num_tokens
        return found

    def _token_axes(self, slots: _Int32, positions: _Int32) -> _Int32:
        """[3, T] time, height and width of each token, as in :attr:`StepBatch.axes`. The tokens are at ``positions`` of
        the rows in ``slots``."""
        found = np.repeat((positions + self._shifts[slots])[None], 3, axis=0)
        for slot, axes in self._axes.items():
            inside = np.flatnonzero((slots == slot) & (positions < axes.shape[1]))
            found[:, inside] = axes[:, positions[inside]]
        return found

    @staticmethod
    def _verifies(chunks: list[Chunk], num_decodes: int) -> list[tuple[int, int, Chunk]]:
        """(first sample position, slot, chunk) of each row with drafts, as in :attr:`StepBatch.verifies`."""
        found = []
        position = num_decodes
        for chunk in chunks:
            if chunk.drafts:
                found.append((position, chunk.slot, chunk))
            position += chunk.samples
        return found

    def _prompt_rows(self, chunks: list[Chunk], first_row: int) -> list[tuple[int, int, _Int32]]:
        """(row, first position, prompt tokens) of chunks that need prompt log-probabilities, as in
        :attr:`StepBatch.prompt_rows`. ``first_row`` is the index of the first chunk's row in the step."""
        found = []
        for index, chunk in enumerate(chunks, first_row):
            row = self.sampling[chunk.slot]
            count = self.num_prompt_tokens[chunk.slot]
            if row is not None and row.wants_prompt_logprobs and chunk.start < count - 1:
                found.append((index, chunk.start, self.tokens[chunk.slot, :count]))
        return found

    def _tables(self, slots: _Int32, seq_lens: _Int32) -> _Int32:
        width = -(-int(seq_lens.max(initial=1)) // self.block_size)
        return self.block_tables[self._groups, slots, :width]

    def _slot_mapping(self, slots: _Int32, positions: _Int32) -> npt.NDArray[np.int64]:
        blocks = positions // self._spans
        offsets = positions % self._places
        found: npt.NDArray[np.int64] = self.block_tables[self._groups, slots, blocks].astype(np.int64)
        return found * self._places + offsets


def _known(token_ids: list[int]) -> _Int32:
    """Token ids with -1 (no token was sampled) replaced by 0. The request of such a row has failed and will leave the
    batch, so any valid id will do."""
    return np.maximum(np.array(token_ids, dtype=np.int32), 0)


def _last_of_each(ends: _Int32, counts: _Int32) -> _Int32:
    """For each (end, count): the ``count`` numbers before ``end``, ascending. The results are concatenated, int32."""
    shifts = ends - np.cumsum(counts, dtype=np.int32)
    return np.arange(counts.sum(), dtype=np.int32) + np.repeat(shifts, counts)
