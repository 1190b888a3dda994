"""Assigns buffers to the activations of a step program."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence

from chairlift.kernels.cpu.fused_op import FusedOp, OpKind
from chairlift.kernels.recording import Value

__all__ = ["LoweringPlan", "place"]


@dataclasses.dataclass(slots=True)
class LoweringPlan:
    """Fused operations in the order of execution, and the buffers of their activations."""

    ops: list[FusedOp]
    buffer_of: dict[Value, int]
    widths: list[int]
    """Columns of each buffer. Activations share a buffer only if they have equal widths, so that the padding columns
    stay zero."""
    shared: set[int] = dataclasses.field(default_factory=set)
    """Buffers to which several processes write, each its own columns."""

    @property
    def calls(self) -> list[str]:
        """Names of the operations without a native kernel, which plain torch computes."""
        return list(dict.fromkeys(op.call.label for op in self.ops if op.call is not None))


def place(ops: list[FusedOp], outputs: Sequence[Value], shared: Collection[Value] = ()) -> LoweringPlan:
    """Assign a buffer to every activation. A buffer is reused after the last operation that reads it (linear-scan
    allocation). An activation that no operation computes is an input, and has a buffer of its own.

    Activations that are ``shared`` with other processes have shared buffers. Another process may be behind by all
    operations since the last GATHER. So a shared buffer is reused only after the GATHER that follows its last reader.
    """
    reads: dict[Value, list[int]] = collections.defaultdict(list)
    for index, op in enumerate(ops):
        for value in op.inputs:
            reads[value].append(index)
    last_read = {op.out: index for index, op in enumerate(ops)}
    last_read.update((value, indices[-1]) for value, indices in reads.items())
    last_read.update((value, len(ops)) for value in outputs)
    plan = LoweringPlan(ops, {}, [])
    computed = {op.out for op in ops}
    for value in dict.fromkeys(value for op in ops for value in op.inputs):
        if value.role == "rows" and value not in computed:
            last_read[value] = len(ops)
            plan.buffer_of[value] = len(plan.widths)
            plan.widths.append(value.width)
    free: dict[tuple[int, bool], list[int]] = collections.defaultdict(list)
    held = list[Value]()
    """Shared activations that no operation reads any more, since the last GATHER."""
    gather = -1
    for index, op in enumerate(ops):
        if op.kind == OpKind.GATHER:
            gather = index
            for value in held:
                free[value.width, True].append(plan.buffer_of[value])
            held.clear()
        dying = [value for value in dict.fromkeys(op.inputs) if last_read[value] == index and value in plan.buffer_of]
        if op.out.role == "rows":
            aux = op.inputs[1] if op.kind == OpKind.LINEAR and len(op.inputs) == 2 else None
            is_shared = op.out in shared
            # The only operation that may write to the buffer that it reads. It reads and writes its own columns.
            in_place = aux in dying and aux != op.inputs[0] and (aux in shared) == is_shared
            if aux is not None and in_place and (not is_shared or _last_before(reads[aux], index) < gather):
                dying.remove(aux)
                plan.buffer_of[op.out] = plan.buffer_of[aux]
            elif free[op.out.width, is_shared]:
                plan.buffer_of[op.out] = free[op.out.width, is_shared].pop()
            else:
                plan.buffer_of[op.out] = len(plan.widths)
                plan.widths.append(op.out.width)
                if is_shared:
                    plan.shared.add(plan.buffer_of[op.out])
            if last_read[op.out] == index:
                dying.append(op.out)
        held += [value for value in dying if value in shared]
        for value in dying:
            if value not in shared:
                free[value.width, False].append(plan.buffer_of[value])
    return plan


def _last_before(indices: Sequence[int], index: int) -> int:
    """The largest of ``indices`` below ``index``; -1 if there is none."""
    return max((each for each in indices if each < index), default=-1)
