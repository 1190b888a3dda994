"""The fused operations of a step program: what ``csrc/cpu/chairlift_cpu.h`` calls ``cl_op``, without addresses."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from torch import Tensor

from chairlift.kernels.cpu.packing import PackedMatrix
from chairlift.kernels.recording import Node, Value

__all__ = ["Activation", "FusedOp", "OpFlag", "OpKind"]


class OpKind(enum.IntEnum):
    """Values of the C enum ``cl_op_kind``."""

    CALL = 0
    EMBED = 1
    ROTARY = 2
    RMS_NORM = 3
    LINEAR = 4
    LINEAR_SILU = 5
    QKV = 6
    ATTENTION = 7
    ADD = 8
    EXPERTS = 9
    LAYER_NORM = 16
    LINEAR_GELU = 17
    SCALE = 18
    HEADS = 19
    SHORT_CONV = 20
    MAMBA_SCAN = 24
    GATED_NORM = 25
    DELTA_SCAN = 26
    GATHER = 27


class OpFlag(enum.IntFlag):
    """Bits of ``cl_op.flags`` other than the activation."""

    PACKED = 1
    POSITIONS = 2
    ALL_HEADS = 4
    GATED = 8
    SILU = 16
    NORM_FIRST = 32
    BOTH_WAYS = 64
    SIGMOID_GATE = 128
    APART = 256
    OWN_ROWS = 512


class Activation(enum.IntEnum):
    """Values of the C enum ``cl_activation``."""

    NONE = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    RELU_SQUARED = 4


@dataclasses.dataclass(slots=True, eq=False)
class FusedOp:
    """One operation of a step program, as the C struct ``cl_op`` describes it, but without addresses. ``fields`` are
    the numeric members of the struct, by name."""

    kind: OpKind
    out: Value
    inputs: tuple[Value, ...]
    """Activations that the operation reads: ``in`` of ``cl_op``, then ``aux``. For an operation that Python computes:
    all arguments."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight: Tensor | PackedMatrix | None = None
    bias: Tensor | None = None
    """Bias of a norm, or the axis of each frequency of a rotation. The bias of a linear layer is stored with its
    weight."""
    sinks: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_offset: float = 0.0
    """Number that is added to a norm's weights before they are multiplied."""
    rotary: Value | None = None
    column: int = 0
    """First column of the result that this process writes: the first of its own, if several processes share the
    operation."""
    part: int = 0
    """Index of the part of the layer's recurrent states that the operation reads and writes."""
    experts: dict[str, Any] | None = None
    """Arguments of the ``ops.experts`` operation that is fused here; None for other operations."""
    call: Node | None = None
