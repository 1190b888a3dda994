"""A permanent row per running request, updated by differences, read as flat arrays (vLLM V1's persistent batch)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chairlift.models.flat_batch import FlatBatch
from chairlift.sampling.row import SamplingRow
from chairlift.scheduler.output import NewRow, SchedulerOutput

__all__ = ["InputBatch"]


class InputBatch:
    """Numpy mirrors of what each running request is: its tokens, its progress, its block tables, how it samples.

    ``apply`` takes one step's differences and returns that step's flat batch; ``store`` takes the tokens it sampled.
    Steps must be applied in order. Where a step is applied before the tokens of the one before it are stored, those
    must be expected: placeholders, which no token id is, stand in their places until they come.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self.block_size = block_size
        self.num_slots = num_slots
        max_blocks = -(-max_model_len // block_size)
        # np.zeros takes pages only when they are touched, so rows cost what they use.
        self.tokens = np.zeros((num_slots, max_model_len + 1), dtype=np.int32)
        self.num_computed = np.zeros(num_slots, dtype=np.int32)
        self.block_tables = [np.zeros((num_slots, max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self.sampling: list[SamplingRow | None] = [None] * num_slots
        self.num_prompt_tokens = np.zeros(num_slots, dtype=np.int32)
        self._decodes = np.zeros(0, dtype=np.int32)
        self._steady: FlatBatch | None = None
        self._untaken: list[SchedulerOutput] = []
        """This step, behind those that failed before the rows were up to date: it builds on them."""
        self._ticket = 0

    def apply(self, out: SchedulerOutput) -> FlatBatch:
        """Bring the rows up to date, and lay the step's tokens side by side: decode rows first, then the chunks."""
        self._untaken.append(out)
        last, self._steady = self._steady, None  # where this step fails, the next is laid out anew
        while self._untaken:
            self.take(self._untaken[0])
            del self._untaken[0]
        changed = out.left or out.joined or out.chunks or out.decode_slots is not None
        batch = self._flatten(out) if changed or last is None else self._advance(last, out)
        self._steady = None if out.chunks else batch
        return batch

    def take(self, out: SchedulerOutput) -> None:
        """Bring the rows to where one step leaves them. Where that fails it may be begun again."""
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
        self.num_computed[self._decodes] += 1  # the last: all else may be done twice

    def expect(self, batch: FlatBatch) -> int:
        """Tokens for the rows that sample are on their way. Returns the placeholder that stands for them: below 0."""
        self._ticket = self._ticket % -(2**30) - 1
        self.tokens[batch.slots[batch.sample_rows], batch.seq_lens[batch.sample_rows]] = self._ticket
        return self._ticket

    def store(self, batch: FlatBatch, token_ids: list[int], ticket: int | None = None) -> None:
        """Append the sampled tokens to their rows. A failed row gets a harmless id; it is about to leave.

        With the ``ticket`` that :meth:`expect` returned: only where it still stands. A row may have changed hands, or
        begun to compute the same place again.
        """
        slots = batch.slots[batch.sample_rows]
        ends = batch.seq_lens[batch.sample_rows]
        known = np.maximum(np.array(token_ids, dtype=np.int32), 0)
        if ticket is not None:
            wanted = self.tokens[slots, ends] == ticket
            slots, ends, known = slots[wanted], ends[wanted], known[wanted]
        self.tokens[slots, ends] = known

    def _join(self, row: NewRow) -> None:
        slot, count = row.slot, len(row.token_ids)
        self._clear(slot)
        self.tokens[slot, :count] = row.token_ids
        self.num_computed[slot] = row.num_computed_tokens
        self.num_prompt_tokens[slot] = row.num_prompt_tokens
        for table, blocks in zip(self.block_tables, row.block_ids, strict=True):
            table[slot, : len(blocks)] = blocks
        self.sampling[slot] = row.sampling

    def _clear(self, slot: int) -> None:
        self.num_computed[slot] = self.num_prompt_tokens[slot] = 0
        for table in self.block_tables:
            table[slot] = 0
        self.sampling[slot] = None

    def _advance(self, last: FlatBatch, out: SchedulerOutput) -> FlatBatch:
        """What :meth:`_flatten` returns where exactly the rows of ``last`` decode again, from it alone."""
        slots, positions = last.slots, last.seq_lens
        seq_lens = positions + 1
        tables, mappings = last.block_tables, [mapping + 1 for mapping in last.slot_mapping]
        if not (positions % self.block_size).all():  # a row begins a block
            tables, mappings = self._tables(slots, seq_lens), self._slot_mapping(slots, positions)
        return FlatBatch(
            token_ids=self.tokens[slots, positions],
            positions=positions,
            cu_seqlens=last.cu_seqlens,
            seq_lens=seq_lens,
            slots=slots,
            block_tables=tables,
            slot_mapping=mappings,
            sampling=last.sampling,
            sample_rows=last.sample_rows,
            tokens=self.tokens,
            swap_out=out.swap_out,
            copies=out.copies,
            swap_in=out.swap_in,
            prompt_rows=[],
        )

    def _flatten(self, out: SchedulerOutput) -> FlatBatch:
        decodes = self._decodes
        starts = self.num_computed[decodes] - 1
        slots: list[npt.NDArray[np.int32]] = [decodes]
        token_ids, positions = [self.tokens[decodes, starts]], [starts]
        lengths = [np.ones(len(decodes), dtype=np.int32)]
        sample_rows = list(range(len(decodes)))
        prompt_rows = []
        for index, chunk in enumerate(out.chunks, start=len(decodes)):
            token_ids.append(self.tokens[chunk.slot, chunk.start : chunk.end])
            positions.append(np.arange(chunk.start, chunk.end, dtype=np.int32))
            if chunk.samples:
                sample_rows.append(index)
            row = self.sampling[chunk.slot]
            if row is not None and row.wants_prompt_logprobs and chunk.start < self.num_prompt_tokens[chunk.slot] - 1:
                known = self.tokens[chunk.slot, : self.num_prompt_tokens[chunk.slot]]
                prompt_rows.append((index, chunk.start, known))
        if out.chunks:
            slots.append(np.array([chunk.slot for chunk in out.chunks], dtype=np.int32))
            lengths.append(np.array([chunk.num_tokens for chunk in out.chunks], dtype=np.int32))
        all_slots, all_lengths = np.concatenate(slots), np.concatenate(lengths)
        all_positions = np.concatenate(positions)
        cu_seqlens = np.zeros(len(all_slots) + 1, dtype=np.int32)
        np.cumsum(all_lengths, out=cu_seqlens[1:])
        seq_lens = self.num_computed[all_slots]
        return FlatBatch(
            token_ids=np.concatenate(token_ids),
            positions=all_positions,
            cu_seqlens=cu_seqlens,
            seq_lens=seq_lens,
            slots=all_slots,
            block_tables=self._tables(all_slots, seq_lens),
            slot_mapping=self._slot_mapping(np.repeat(all_slots, all_lengths), all_positions),
            sampling=[self.sampling[slot] for slot in all_slots.tolist()],
            sample_rows=np.array(sample_rows, dtype=np.int32),
            tokens=self.tokens,
            swap_out=out.swap_out,
            copies=out.copies,
            swap_in=out.swap_in,
            prompt_rows=prompt_rows,
        )

    def _tables(self, slots: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        width = -(-int(seq_lens.max(initial=1)) // self.block_size)
        return [table[slots, :width] for table in self.block_tables]

    def _slot_mapping(
        self, slots: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]
    ) -> list[npt.NDArray[np.int64]]:
        blocks, offsets = positions // self.block_size, positions % self.block_size
        return [table[slots, blocks].astype(np.int64) * self.block_size + offsets for table in self.block_tables]
