"""Functions and classes that several makers of drafts share: measured durations, block tables, and the input of the
sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.step_batch import StepBatch

__all__ = ["DraftTimes", "block_tables", "drawing_batch", "take_rows"]

_Int32 = npt.NDArray[np.int32]

_MEMORY: Final = 0.1
"""Weight of the newest measurement in the mean seconds per draft; older measurements have the rest."""


class DraftTimes:
    """Measured mean seconds in which a drafter makes one draft for every row of a step. There is one mean per range of
    row counts."""

    def __init__(self) -> None:
        self.known: dict[int, float] = {}
        """Bit length of a batch's number of rows -> mean seconds to draft one token for every row of the batch. Batches
        of similar size share an entry."""

    def seconds(self, num_rows: int) -> float:
        """Expected seconds in which one draft for each of ``num_rows`` rows is made; 0 before the first measurement."""
        size = num_rows.bit_length()
        nearest = min(self.known, key=lambda each: abs(each - size), default=None)
        return 0.0 if nearest is None else self.known[nearest]

    def note(self, num_rows: int, seconds: float) -> None:
        """Learn from a measurement: one draft for each of ``num_rows`` rows took ``seconds``."""
        size = num_rows.bit_length()
        self.known[size] = seconds + (self.known.get(size, seconds) - seconds) * (1 - _MEMORY)


def block_tables(tables: Sequence[Sequence[Sequence[int]]], width: int) -> _Int32:
    """Block tables of rows as an array, int32 [G, N, ``width``], padded with 0. ``tables`` has, for each row, a list of
    block ids per cache group."""
    found = np.zeros((len(tables[0]), len(tables), width), dtype=np.int32)
    for row, groups in enumerate(tables):
        for group, table in enumerate(groups):
            used = table[:width]
            found[group, row, : len(used)] = used
    return found


def take_rows(tensor: Tensor, *index: Any) -> Tensor:
    """Copy of ``tensor[index]`` for whole rows; the last dimension must not be indexed.

    numpy copies the rows. Indexing in torch would start threads that spin on the processors of the model's threads.
    """
    return torch.from_numpy(tensor.view(torch.uint8).numpy()[index]).view(tensor.dtype)


def drawing_batch(tokens: _Int32, slots: _Int32, lengths: _Int32, sampling: Sequence[Any]) -> StepBatch:
    """Input of the sampler for R rows. Each row has one sample position, after the first ``lengths`` [R] tokens of its
    slot in ``slots`` [R].

    ``tokens`` [num_slots, L] are the tokens of every slot. ``sampling`` are the rows' sampling parameters.
    """
    every = np.arange(len(slots), dtype=np.int32)
    none = np.zeros((0, 0, 0), dtype=np.int32)
    return StepBatch(
        token_ids=tokens[slots, lengths - 1],
        positions=lengths - 1,
        cu_seqlens=np.arange(len(slots) + 1, dtype=np.int32),
        seq_lens=lengths,
        block_tables=none,
        slot_mapping=none.astype(np.int64),
        slots=slots,
        tokens=tokens,
        sampling=list(sampling),
        sample_rows=every,
        sample_tokens=every,
    )
