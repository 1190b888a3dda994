"""What every model runner, real or fake, consumes and yields: one step as flat numpy arrays, and its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FlatBatch", "PromptLogprobs", "SampledTokens"]

_Int32 = npt.NDArray[np.int32]


@dataclasses.dataclass(slots=True)
class FlatBatch:
    """N rows, each the newest tokens of one sequence, T tokens in all; no padding anywhere. R of the rows sample.

    Steps share arrays that are the same in both, so nobody writes into one.
    """

    token_ids: _Int32
    """[T]; negative where the token is still on its way from the device: the newest that was drawn for its row, and
    the last of the row's tokens here."""
    positions: _Int32
    """[T]"""
    cu_seqlens: _Int32
    """[N + 1] offsets of the rows in the flat batch."""
    seq_lens: _Int32
    """[N] length of each sequence after this step."""
    slots: _Int32
    """[N] InputBatch row of each."""
    block_tables: list[_Int32]
    """Per cache group, [N, M]: entries past the sequence or behind its window are meaningless."""
    slot_mapping: list[npt.NDArray[np.int64]]
    """Per cache group, [T]: ``block * block_size + offset``, where each token's KV goes."""
    sampling: list[Any]
    """[N] how each row samples, as given at admission. The same list as in the step before where both decode the same
    rows, and nothing else."""
    sample_rows: _Int32
    """[R] rows that sample, in the order in which their tokens are returned."""
    tokens: _Int32
    """[num_slots, L] every slot's sequence so far, prompt and output; a row that samples has ``seq_lens`` of them.
    Negative where a token is on its way."""
    swap_out: list[tuple[int, int, int]]
    """(group, block, host block) to save in host memory, before everything else."""
    copies: list[tuple[int, int, int]]
    """(group, source block, destination block) to copy then, before anything is written."""
    swap_in: list[tuple[int, int, int]]
    """(group, host block, block) to bring back after that."""
    prompt_rows: list[tuple[int, int, _Int32]]
    """(row, first position, prompt tokens) of chunks whose request asked for prompt log-probabilities."""

    @property
    def histories(self) -> list[_Int32]:
        """R views of the sequences so far, prompt and output; valid until the tokens of this step are stored.

        They are complete where all tokens of the row were drawn on the host: those never are on their way.
        """
        ends = zip(self.slots[self.sample_rows].tolist(), self.seq_lens[self.sample_rows].tolist(), strict=True)
        return [self.tokens[slot, :length] for slot, length in ends]


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens that one chunk computed."""

    slot: int
    first: int
    """Position of the first token reported."""
    entries: list[Any]
    """One per position from ``first`` on; see :class:`SampledTokens` for the type."""
    error: str = ""
    """Why there are no entries: the request ends with this error, and no other request does."""


@dataclasses.dataclass(slots=True)
class SampledTokens:
    """What a step yields, in the order of ``FlatBatch.sample_rows``."""

    token_ids: list[int]
    """-1 where no token could be drawn."""
    logprobs: Sequence[Any] | None = None
    """Per row a record of ``token_ids``, ``logprobs`` (chosen first) and ``rank``, or None; None when nobody asked."""
    errors: dict[int, str] = dataclasses.field(default_factory=dict)
    """Row -> why it has no token."""
    prompt_logprobs: list[PromptLogprobs] = dataclasses.field(default_factory=list)
