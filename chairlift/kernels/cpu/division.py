"""Divides the operations of a step program among processes that run it together.

Each process computes some output columns of every linear layer, over the whole input. So an element of a result is
summed by one process in the same order as without a division, and the bits do not depend on the number of processes.
Megatron-LM (Shoeybi et al., 2019) divides every second layer along its input instead, and adds partial results; that
needs fewer exchanges, but another order of sums. Results that other processes read are in shared buffers, so an
exchange moves no data: it is a wait, the operation GATHER. Of experts, each process computes some columns of every
expert, so that it has as much work whatever the router chooses. Operations without divided weights are computed by
every process, each for itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from chairlift.errors import InvariantError
from chairlift.kernels.cpu.fused_op import FusedOp, OpKind
from chairlift.kernels.cpu.packing import KeptRows, PackedMatrix
from chairlift.kernels.recording import Value

__all__ = ["Division", "divide"]

_PRODUCTS = (OpKind.LINEAR, OpKind.LINEAR_SILU, OpKind.LINEAR_GELU)


@dataclasses.dataclass(slots=True)
class Division:
    """Operations of one process of several."""

    ops: list[FusedOp]
    shared: set[Value]
    """Activations that every process computes a part of, and that all may read."""


def divide(ops: Sequence[FusedOp], outputs: Sequence[Value]) -> Division:
    """Reduce each operation to the columns that this process computes, as its weight says, and insert the waits. The
    division is empty if no weight is divided. Raises InvariantError for a divided layer that cannot be computed so."""
    if not any(_kept(op) or (op.experts and op.experts["down"].kept) for op in ops):
        return Division(list(ops), set())
    recorder = ops[0].out.recorder
    found = Division([], set())
    inner = Value(recorder, "nothing", 0)
    """Stands for the memory that layers of experts share, of which each reads all and then overwrites a part."""
    unseen = set[Value]()
    """Shared activations that other processes may not have written yet, and ``inner`` while they may read it."""
    heads: dict[Value, tuple[int, int, int]] = {}

    def gather() -> None:
        found.ops.append(FusedOp(OpKind.GATHER, Value(recorder, "nothing", 0), ()))
        unseen.clear()

    gather()  # another process may still read the buffers of the step before
    for op in ops:
        if _reduce(op, heads):
            found.shared.add(op.out)
        in_parts = op.kind == OpKind.EXPERTS and _kept(op) is not None
        if unseen.intersection([*op.inputs, inner] if in_parts else op.inputs):
            gather()
        found.ops.append(op)
        if op.out in found.shared:
            unseen.add(op.out)
        if in_parts:
            unseen.add(inner)
    if unseen.intersection(outputs):
        gather()
    return found


def _reduce(op: FusedOp, heads: dict[Value, tuple[int, int, int]]) -> bool:
    """Reduce ``op`` to its own columns. Returns whether its result is shared. ``heads`` maps the queries of an
    attention to (first head, number of heads, number of KV heads) of this process."""
    if op.experts is not None:
        down = op.experts["down"].kept
        op.column = 0 if down is None else down.first
        return down is not None
    if "own_heads" in op.fields:
        op.column = op.fields["first_head"] * op.fields["head_dim"]
        return True
    kept = _kept(op)
    if op.kind == OpKind.ATTENTION and op.inputs[0] in heads:
        first, count, kv_count = heads[op.inputs[0]]
        op.fields |= {"heads": count, "kv_heads": kv_count}
        op.column = first * op.fields["head_dim"]
        op.sinks = None if op.sinks is None else op.sinks[first : first + count]
        return True
    if kept is None or not isinstance(op.weight, PackedMatrix):
        return False
    if op.kind == OpKind.QKV and len(kept.ranges) == 3:
        size = op.fields["head_dim"]
        counts = [(end - first) // size for first, end in kept.ranges]
        heads[op.out] = (kept.first // size, counts[0], counts[1])
        op.fields |= {"heads": counts[0], "kv_heads": counts[1]}
        return False  # only this process reads its queries
    whole = op.kind == OpKind.EMBED or (op.kind in _PRODUCTS and len(kept.ranges) == 1 + op.weight.interleaved)
    if not whole:
        raise InvariantError(f"{op.kind.name} cannot be divided among processes as its weight is: {kept}")
    if op.kind != OpKind.EMBED:
        op.column = kept.first
    return True


def _kept(op: FusedOp) -> KeptRows | None:
    return op.weight.kept if isinstance(op.weight, PackedMatrix) else None
