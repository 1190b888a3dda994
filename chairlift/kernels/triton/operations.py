"""Operations that have a Triton kernel. This list needs no Triton, so that reports can name them on any machine."""

from __future__ import annotations

from typing import Any, Final

from chairlift.kernels import ops
from chairlift.kernels.delta_rule import DeltaRule
from chairlift.kernels.mamba2 import Mamba2
from chairlift.kernels.recording import Op, add, attention, recurrence
from chairlift.kernels.short_conv import ShortConv

__all__ = ["CELLS", "LINEARS", "OPERATIONS"]

CELLS: Final[frozenset[type]] = frozenset({DeltaRule, Mamba2, ShortConv})
"""Types of the recurrent cells for which :mod:`~chairlift.kernels.triton.recurrences` has a function."""

LINEARS: Final[tuple[Op[..., Any], ...]] = (ops.linear, ops.fp8_linear, ops.coded_linear)
"""Operations that are linear layers, one for each format of weights."""
OPERATIONS: Final[frozenset[Op[..., Any]]] = frozenset(
    {
        add,
        attention,
        recurrence,
        ops.embedding,
        ops.experts,
        ops.latent_experts,
        ops.rms_norm,
        ops.rotary_heads,
        ops.rotary_table,
        ops.silu_and_mul,
        *LINEARS,
    }
)
"""Operations for which :mod:`~chairlift.kernels.triton.program` has a function."""
