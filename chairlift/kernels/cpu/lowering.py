"""From recorded nodes to fused operations and the buffers they share. Plain data; nothing here calls the library.

Three patterns cover what decoder layers are made of, each where the product in it has no other reader: a product whose
halves are gated is one operation, a product added to something is one, and a product split into heads goes through
norm and rotation into the KV cache without being stored.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels import recording as r
from chairlift.kernels.cpu.packing import PackedWeight
from chairlift.kernels.reference import silu_and_mul

__all__ = ["FusedOp", "OpKind", "Plan", "lower", "narrow_at"]


class OpKind(enum.IntEnum):
    """``cl_op_kind``."""

    CALL = 0
    EMBED = 1
    ROTARY = 2
    RMS_NORM = 3
    LINEAR = 4
    LINEAR_SILU = 5
    QKV = 6
    ATTENTION = 7
    ADD = 8


@dataclasses.dataclass(slots=True, eq=False)
class FusedOp:
    """One ``cl_op`` before it has addresses. ``fields`` are its plain members by the header's names."""

    kind: OpKind
    out: r.Value
    inputs: tuple[r.Value, ...]
    """Activations it reads: ``in``, then ``aux``; for a call-out all arguments."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight: Tensor | PackedWeight | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    rotary: r.Value | None = None
    call: r.Call | None = None


@dataclasses.dataclass(slots=True)
class Plan:
    """Fused operations in order, and where their activations lie."""

    ops: list[FusedOp]
    buffer_of: dict[r.Value, int]
    widths: list[int]
    """Columns of each buffer. A buffer is shared only by activations as wide, so that its padding stays zero."""


def lower(nodes: Sequence[r.Node], output: r.Value) -> Plan:
    """Fuse ``nodes`` and lay out buffers such that ``output`` outlives the run."""
    ops = _Fuser(nodes, output).fuse()
    return _place(ops, output)


def narrow_at(ops: Sequence[FusedOp], output: r.Value) -> tuple[int, set[r.Value]]:
    """From which operation on a token no longer matters to others, and the activations that are read from there on."""
    shared = (OpKind.EMBED, OpKind.ROTARY, OpKind.QKV)
    at = max((i for i, op in enumerate(ops) if op.kind in shared), default=-1) + 1
    read = {value for op in ops[at:] for value in op.inputs} | {output}
    return at, read & {op.out for op in ops[:at] if op.out.role == "rows"}


class _Fuser:
    """Every node becomes an operation of its own, or part of the one that reads it."""

    def __init__(self, nodes: Sequence[r.Node], output: r.Value) -> None:
        self.nodes = nodes
        self.producer = {node.out: node for node in nodes}
        self.readers = collections.Counter(value for node in nodes for value in set(node.inputs))
        self.readers[output] += 1
        self.absorbed: dict[r.Value, r.Linear] = {}
        """Products that their reader computes."""
        self.ones: dict[int, PackedWeight] = {}
        """Identity matrices by size."""

    def fuse(self) -> list[FusedOp]:
        for node in self.nodes:
            self._absorb(node)
        ops: list[FusedOp] = []
        for node in self.nodes:
            if node.out not in self.absorbed:
                ops += self._lower(node)
        return ops

    def _absorb(self, node: r.Node) -> None:
        """Claim the product that ``node`` can compute itself."""
        # Of a sum with two products the later one is claimed: the earlier may be long done, and its input gone.
        candidates = reversed(node.inputs) if isinstance(node, r.Add) else node.inputs[:1]
        if not isinstance(node, (r.Add, r.SiluAndMul, r.RotaryHeads)):
            return
        for value in candidates:
            product = self.producer.get(value)
            if not isinstance(product, r.Linear) or self.readers[value] > 1 or node.inputs.count(value) > 1:
                continue
            if product.weight.interleaved == isinstance(node, r.SiluAndMul):
                self.absorbed[value] = product
                return

    def _lower(self, node: r.Node) -> Iterable[FusedOp]:
        match node:
            case r.Embedding(weight=weight):
                rows, width = (weight.out_features, weight.k) if isinstance(weight, PackedWeight) else weight.shape
                flags = int(isinstance(weight, PackedWeight))
                yield FusedOp(OpKind.EMBED, node.out, (), {"n": rows, "k": width, "flags": flags}, weight)
            case r.RotaryTable():
                fields = {"head_dim": node.out.width, "scale": node.factor}
                yield FusedOp(OpKind.ROTARY, node.out, (), fields, node.frequencies)
            case r.RMSNorm():
                fields = {"k": node.out.width, "eps": node.eps}
                yield FusedOp(OpKind.RMS_NORM, node.out, node.inputs, fields, node.weight)
            case r.Linear():
                if node.weight.interleaved:
                    raise InvariantError(
                        "the product of gate and up may only be read by ops.silu_and_mul; "
                        "make them two layers, or one that does not pair its rows"
                    )
                yield _product(OpKind.LINEAR, node, node.out)
            case r.SiluAndMul():
                product = self.absorbed.get(node.inputs[0])
                if product is not None:
                    yield _product(OpKind.LINEAR_SILU, product, node.out)
                else:
                    yield from self._lower(r.Call(node.out, node.inputs, silu_and_mul))
            case r.Add():
                yield self._add(node)
            case r.RotaryHeads():
                pass  # computed by the attention that reads it
            case r.Attention():
                yield from self._attention(node)
            case r.Call():
                yield FusedOp(OpKind.CALL, node.out, node.inputs, call=node)
            case _:
                raise InvariantError(f"no operation for {type(node).__name__}")

    def _add(self, node: r.Add) -> FusedOp:
        for value, other in (node.inputs, node.inputs[::-1]):
            product = self.absorbed.get(value)
            if product is not None:
                return _product(OpKind.LINEAR, product, node.out, other)
        return FusedOp(OpKind.ADD, node.out, node.inputs, {"n": node.out.width})

    def _attention(self, node: r.Attention) -> Iterable[FusedOp]:
        heads = node.heads
        sizes = {"heads": heads.num_heads, "kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
        sizes["layer"] = node.layer
        qkv = heads.inputs[0]
        product = self.absorbed.get(qkv)
        if product is None:
            # Only products are split into heads natively; and one times a number is that number.
            if qkv.width not in self.ones:
                self.ones[qkv.width] = PackedWeight(qkv.width, qkv.width, qkv.dtype)
                self.ones[qkv.width].pack_rows(torch.eye(qkv.width))
            product = r.Linear(qkv, (qkv,), self.ones[qkv.width])
        q = r.Value(node.out.recorder, "rows", node.out.width)
        op = _product(OpKind.QKV, product, q)
        op.fields |= {**sizes, "eps": heads.eps}
        op.q_norm, op.k_norm = heads.q_norm, heads.k_norm
        op.rotary = heads.inputs[1] if len(heads.inputs) == 2 else None
        yield op
        yield FusedOp(OpKind.ATTENTION, node.out, (q,), {**sizes, "scale": node.scale, "window": node.window or 0})


def _product(kind: OpKind, product: r.Linear, out: r.Value, *aux: r.Value) -> FusedOp:
    weight = product.weight
    return FusedOp(kind, out, (*product.inputs, *aux), {"n": weight.n, "k": weight.k}, weight)


def _place(ops: list[FusedOp], output: r.Value) -> Plan:
    """Give every activation a buffer, taking over those whose last reader has run (linear-scan allocation)."""
    last_read: dict[r.Value, int] = {}
    for index, op in enumerate(ops):
        last_read[op.out] = index
        last_read.update((value, index) for value in op.inputs)
    last_read[output] = len(ops)
    plan = Plan(ops, {}, [])
    free: dict[int, list[int]] = collections.defaultdict(list)
    for index, op in enumerate(ops):
        dying = [value for value in dict.fromkeys(op.inputs) if last_read[value] == index and value in plan.buffer_of]
        if op.out.role == "rows":
            aux = op.inputs[1] if op.kind == OpKind.LINEAR and len(op.inputs) == 2 else None
            if aux in dying and aux != op.inputs[0]:  # the one operation that may write where it reads
                dying.remove(aux)
                plan.buffer_of[op.out] = plan.buffer_of[aux]
            elif free[op.out.width]:
                plan.buffer_of[op.out] = free[op.out.width].pop()
            else:
                plan.buffer_of[op.out] = len(plan.widths)
                plan.widths.append(op.out.width)
            if last_read[op.out] == index:
                dying.append(op.out)
        for value in dying:
            free[value.width].append(plan.buffer_of[value])
    return plan
