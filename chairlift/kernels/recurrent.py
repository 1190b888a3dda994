"""Recurrent layers over ragged batches. The cell computes, and this module selects the states.

A *cell* is the arithmetic of one recurrent layer. A cell processes tokens one after another. States are stored in
blocks, as K and V are. A step is divided into *pieces*: a piece is a run of tokens of one row after which the state is
written to a block. A row whose first token has position 0 starts from a state of zeros, so blocks are never cleared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Cell", "StatePart", "StatePiece", "panel_width", "plan_pieces", "recur_packed", "recur_paged"]


@dataclasses.dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of the state that a recurrent layer keeps for each request."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """Dtype in which this part of the state is stored; None means the model's dtype."""


def panel_width(columns: int) -> int:
    """Number of columns of a head's state that are stored together, as [columns / width, rows, width]. The native scan
    reads such a panel in one piece."""
    return next(width for width in (32, 16, columns) if columns % width == 0)


class Cell(Protocol):
    """The arithmetic of a recurrent layer, with its weights."""

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """Parts of which the state of this layer consists, for one request."""
        ...

    def width(self, *widths: int) -> int:
        """Width of the result if the inputs have the widths ``widths``. Raises ValueError for wrong widths."""
        ...

    def scan(self, inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Process B sequences of n tokens. ``inputs`` are [B, n, ...], ``state`` [B, ...] are the states before these
        tokens. Returns (results [B, n, width], states after these tokens)."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class StatePiece:
    """Tokens ``start`` to ``end`` (excluded) of the flat batch, which all belong to one row."""

    start: int
    end: int
    read: int
    """Index of the block that holds the state before the piece; -1 for the first piece of a sequence."""
    write: int
    """Index of the block that receives the state after the piece."""
    alone: bool = False
    """Whether the piece is the only token of its row in this step."""


def plan_pieces(
    cu_seqlens: Sequence[int], seq_lens: Sequence[int], tables: Sequence[Sequence[int]], span: int
) -> list[StatePiece]:
    """Divide a step into pieces. ``tables`` [N] are block tables in which an entry covers ``span`` positions.

    Pieces of a row are in order: each piece reads the block that the previous piece of the row writes.
    """
    pieces = []
    for (begin, end), length, table in zip(pairwise(cu_seqlens), seq_lens, tables, strict=True):
        offset = begin - (length - (end - begin))  # place in the batch, less the position
        at = begin
        while at < end:
            position = at - offset
            upto = min(end, (position // span + 1) * span + offset)
            read = int(table[(position - 1) // span]) if position else -1
            pieces.append(StatePiece(at, upto, read, int(table[position // span]), end - begin == 1))
            at = upto
    return pieces


def recur_paged(
    cell: Cell, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], pieces: Sequence[StatePiece]
) -> Tensor:
    """Run a cell over a step: ``inputs`` [T, ...] -> [T, width]. ``states`` [blocks, ...] are read and updated.

    Rows that have only one token are computed together. Not differentiable.
    """
    out = inputs[0].new_empty(inputs[0].shape[0], cell.width(*(each.shape[1] for each in inputs)))
    together = [piece for piece in pieces if piece.alone]
    groups = [together] if together else []
    groups += [[piece] for piece in pieces if not piece.alone]
    for group in groups:
        places = torch.tensor([list(range(each.start, each.end)) for each in group], device=out.device)
        fresh = torch.tensor([each.read < 0 for each in group], device=out.device)
        reads = torch.tensor([max(each.read, 0) for each in group], device=out.device)
        writes = torch.tensor([each.write for each in group], device=out.device)
        before = tuple(_kept(part[reads], fresh) for part in states)
        result, after = cell.scan(tuple(each[places] for each in inputs), before)
        out[places] = result
        for part, value in zip(states, after, strict=True):
            part[writes] = value.to(part.dtype)
    return out


def _kept(part: Tensor, fresh: Tensor) -> Tensor:
    """States before a step, [B, ...]: ``part``, with zeros for the sequences that begin in this step (``fresh`` [B] is
    true). The memory of new sequences may still have states of other requests."""
    return part.masked_fill(fresh.view(-1, *[1] * (part.dim() - 1)), 0)


def recur_packed(cell: Cell, inputs: tuple[Tensor, ...], cu_seqlens: Sequence[int]) -> Tensor:
    """Run a cell over whole sequences of a packed batch, [T, ...] -> [T, width]. Each sequence begins with a state of
    zeros.

    Differentiable. Sequences do not influence each other.
    """
    outputs = []
    for start, end in pairwise(cu_seqlens):
        if start == end:
            continue
        own = tuple(each[start:end].unsqueeze(0) for each in inputs)
        zeros = tuple(own[0].new_zeros(1, *part.shape, dtype=part.dtype or own[0].dtype) for part in cell.parts)
        outputs.append(cell.scan(own, zeros)[0].squeeze(0))
    return torch.cat(outputs)
