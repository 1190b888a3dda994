"""File 4 of 8. A step as flat arrays: all tokens of all rows behind one another, without padding.

A row may have 1 token (decode) or 200 (a chunk of a prompt). To the model this makes no difference: most of its work
treats every token alone. Only attention must know which tokens belong together, and ``cu_seqlens`` says it. Example:
row A decodes, row B computes a chunk of 3 tokens, block_size is 4::

    token_ids      [ 57 |  8  9  4]     A's newest token, three tokens of B's prompt
    positions      [  6 |  0  1  2]     index of each token in its own sequence
    cu_seqlens     [0, 1, 4]            row i has the tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1
    seq_lens       [7, 3]               length of each sequence after this step: what its last token attends to
    block_tables   [[5, 2], [9, 0]]     A's positions 0-3 are in block 5, 4-7 in block 2 (the 0 is only filling)
    slot_mapping   [10 | 36 37 38]      where the KV of each token is written: block * 4 + offset
    sample_tokens  [0, 3]               tokens of the flat batch after which a token is sampled

The engine's versions are ``chairlift/base/step_batch.py`` (the arrays) and ``chairlift/executor/input_batch.py``, which
changes them in place from step to step instead of building them anew.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from request import Request
from scheduler import SchedulerOutput

__all__ = ["StepBatch", "build_step_batch"]

_Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """N rows with T tokens in total. P of the tokens are sample positions."""

    token_ids: _Ints
    """[T]"""
    positions: _Ints
    """[T]"""
    cu_seqlens: _Ints
    """[N + 1]"""
    seq_lens: _Ints
    """[N]"""
    block_tables: _Ints
    """[N, M] with M the length of the longest table. Entries after the end of a table are meaningless."""
    slot_mapping: _Ints
    """[T]"""
    sample_tokens: _Ints
    """[P]"""
    sampling: list[Request]
    """[P] the request of each sample position: its parameters, and the number of its tokens."""


def build_step_batch(out: SchedulerOutput, block_size: int) -> StepBatch:
    """The arrays of a step. Each chunk becomes a row."""
    token_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    cu_seqlens = [0]
    sample_tokens: list[int] = []
    longest = max(len(chunk.request.block_ids) for chunk in out.chunks)
    block_tables = np.zeros((len(out.chunks), longest), dtype=np.int64)
    for row, chunk in enumerate(out.chunks):
        blocks = chunk.request.block_ids
        block_tables[row, : len(blocks)] = blocks
        token_ids += chunk.request.token_ids[chunk.start : chunk.end]
        for position in range(chunk.start, chunk.end):
            positions.append(position)
            slot_mapping.append(blocks[position // block_size] * block_size + position % block_size)
        cu_seqlens.append(len(token_ids))
        if chunk.samples:
            sample_tokens.append(len(token_ids) - 1)
    return StepBatch(
        token_ids=np.array(token_ids),
        positions=np.array(positions),
        cu_seqlens=np.array(cu_seqlens),
        seq_lens=np.array([chunk.end for chunk in out.chunks]),
        block_tables=block_tables,
        slot_mapping=np.array(slot_mapping),
        sample_tokens=np.array(sample_tokens, dtype=np.int64),
        sampling=[chunk.request for chunk in out.chunks if chunk.samples],
    )
