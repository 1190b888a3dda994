"""Recurrent layers with Triton kernels: which function computes which cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.delta_rule import DeltaRule
from chairlift.kernels.mamba2 import Mamba2
from chairlift.kernels.recurrent import Cell
from chairlift.kernels.short_conv import ShortConv
from chairlift.kernels.triton.delta_rule import delta_rule
from chairlift.kernels.triton.mamba2 import mamba2
from chairlift.kernels.triton.short_conv import short_conv
from chairlift.kernels.triton.states import StateRows

__all__ = ["CellLaunch", "cell_launch"]

CellLaunch = Callable[[Sequence[Tensor], Sequence[Tensor], StateRows], Tensor]
"""Function of a layer's inputs [T, ...], the parts of its states [blocks, ...], which it updates, and the rows of a
step: the layer's result [T, width]."""


def cell_launch(cell: Cell, device: torch.device) -> CellLaunch:
    """Function that launches the kernels of ``cell``. The weights of the cell are read at each launch; constants that
    the kernels need are made here once. Raises InvariantError for a cell without kernels."""
    make = _LAUNCHES.get(type(cell))
    if make is None:
        raise InvariantError(f"there are no Triton kernels for the recurrent cell {type(cell).__name__}")
    return make(cell, device)


def _short_conv(cell: ShortConv, device: torch.device) -> CellLaunch:
    factors = cell.channel_factors(device)
    return lambda given, states, rows: short_conv(cell, given[0], states[0], rows, factors=factors)


def _mamba2(cell: Mamba2, device: torch.device) -> CellLaunch:
    factors = cell.conv.channel_factors(device)
    return lambda given, states, rows: mamba2(cell, given[0], (states[0], states[1]), rows, factors=factors)


def _delta_rule(cell: DeltaRule, device: torch.device) -> CellLaunch:
    return lambda given, states, rows: delta_rule(cell, (given[0], given[1]), (states[0], states[1]), rows)


_LAUNCHES: dict[type, Callable[[Any, torch.device], CellLaunch]] = {
    ShortConv: _short_conv,
    Mamba2: _mamba2,
    DeltaRule: _delta_rule,
}
