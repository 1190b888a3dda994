"""Turns recorded nodes into fused operations. Nothing here calls the native library.

Four patterns cover decoder layers. In each pattern, no other operation reads the result of the linear layer.
- A linear layer and the activation that follows it, with or without a gate, become one operation.
- A linear layer whose result (perhaps times a number) is added to something becomes one operation with the addition.
- A linear layer for q, k and v is normalised, rotated and written to the KV cache; its result is not stored.
- An embedding times a number becomes part of the look-up.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from chairlift.errors import InvariantError
from chairlift.kernels import ops
from chairlift.kernels.cpu.division import divide
from chairlift.kernels.cpu.fused_op import Activation, FusedOp, OpFlag, OpKind
from chairlift.kernels.cpu.packing import PANEL, PackedMatrix
from chairlift.kernels.cpu.placing import LoweringPlan, place
from chairlift.kernels.delta_rule import DeltaRule
from chairlift.kernels.mamba2 import Mamba2
from chairlift.kernels.recording import Node, Op, Value, add, attention, recurrence
from chairlift.kernels.short_conv import ShortConv

__all__ = ["CELLS", "FUSED", "OPERATIONS", "lower", "narrow_at", "scan_heads"]


def lower(nodes: Sequence[Node], *outputs: Value) -> LoweringPlan:
    """Fuse ``nodes`` into operations, reduce them to this process's columns if the weights are divided, and assign
    buffers. The buffers of ``outputs`` keep their contents after the run."""
    division = divide(_Fuser(nodes, outputs).fuse(), outputs)
    return place(division.ops, outputs, division.shared)


def narrow_at(ops: Sequence[FusedOp], output: Value) -> tuple[int, set[Value]]:
    """Where the program can stop computing tokens that are no longer needed: (index of the first operation after all
    operations that need every token; activations that later operations read and do not compute)."""
    rows = (OpKind.EMBED, OpKind.ROTARY, OpKind.QKV, OpKind.HEADS)
    shared = (*rows, OpKind.SHORT_CONV, OpKind.MAMBA_SCAN, OpKind.DELTA_SCAN)
    recurrent = [op.call is not None and op.call.op is recurrence for op in ops]
    at = max((i for i, op in enumerate(ops) if op.kind in shared or recurrent[i]), default=-1) + 1
    read = {value for op in ops[at:] for value in op.inputs if value.role == "rows"} | {output}
    return at, read - {op.out for op in ops[at:]}


def scan_heads(cell: object) -> int:
    """Number of heads in the scan of a recurrent layer. 0 if the layer has no scan, or if no kernel supports its
    sizes."""
    if isinstance(cell, Mamba2):
        shape = cell.shape
        group = shape.inner // shape.norm_groups
        odd = shape.head_dim % LANES or shape.state_size % 2 or shape.state_size > MOST_STATE or group % LANES
        return 0 if odd or not _convolves(cell.conv) else shape.heads
    if isinstance(cell, DeltaRule):
        odd = cell.value_dim % LANES or cell.key_dim % LANES or cell.key_dim > MOST_STATE
        return 0 if odd or not _convolves(ShortConv(cell.conv, None, silu=True)) else cell.value_heads
    return 0


def _convolves(cell: ShortConv) -> bool:
    """Whether the convolution kernel supports the sizes of a layer."""
    return cell.channels % PANEL == 0 and cell.taps <= MOST_TAPS


class _Fuser:
    """Makes operations from nodes. A node becomes an operation of its own, or is fused into the operation that reads
    it."""

    def __init__(self, nodes: Sequence[Node], outputs: Sequence[Value]) -> None:
        self.nodes = nodes
        self.readers = collections.Counter(value for node in nodes for value in set(node.inputs))
        self.readers.update(outputs)
        self.absorbed: dict[Value, Node] = {}
        """Result that is fused into the operation that reads it -> node that computes the result."""

    def fuse(self) -> list[FusedOp]:
        for node in self.nodes:
            self._absorb(node)
        rest = [node for node in self.nodes if node.out not in self.absorbed]
        return [op for node in rest for op in _KERNELS.get(node.op, _call)(self, node)]

    def _absorb(self, node: Node) -> None:
        """Fuse an input of ``node``, such as a linear layer, into ``node``, if the operation of ``node`` can compute
        it."""
        if node.op not in _CLAIMED:
            return
        # In a sum of two linear layers, the later one is fused: the input of the earlier one may be overwritten before
        # the sum. For ``sigmoid_gate``, the gate is the second input, and is tried first.
        candidates = reversed(node.inputs) if node.op in (add, ops.sigmoid_gate) else node.inputs[:1]
        for value in candidates:
            claimed = value.node
            if claimed is None or claimed.op not in _CLAIMED[node.op] or not self._only_reader(node, value):
                continue
            if claimed.op is ops.scale:  # a scaled product in a sum
                inner = claimed.inputs[0]
                if inner.node is None or not self._is_product(inner.node) or not self._only_reader(claimed, inner):
                    continue
                self.absorbed[inner] = inner.node
            elif claimed.op is ops.native_linear:
                if not self._is_product(claimed, gated=node.op in _GATED):
                    continue
            elif claimed.op is ops.embedding and claimed.inputs[0].role != "token_ids":
                continue
            self.absorbed[value] = claimed
            return

    def _only_reader(self, node: Node, value: Value) -> bool:
        return self.readers[value] == 1 and node.inputs.count(value) == 1

    @staticmethod
    def _is_product(node: Node, *, gated: bool = False) -> bool:
        return node.op is ops.native_linear and node.attributes["weight"].interleaved == gated


def _call(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    """An operation without a native kernel. The native run stops before it, and Python computes it."""
    yield FusedOp(OpKind.CALL, node.out, node.inputs, call=node)


def _embedding(fuser: _Fuser, node: Node, out: Value | None = None, factor: float = 1.0) -> Iterator[FusedOp]:
    weight = node.attributes["weight"]
    packed = isinstance(weight, PackedMatrix)
    rows, width = (weight.out_features, weight.k) if packed else weight.shape
    flags = (OpFlag.PACKED if packed else 0) | (OpFlag.POSITIONS if node.inputs[0].role == "positions" else 0)
    fields = {"n": rows, "k": width, "flags": int(flags), "scale": factor}
    if packed and weight.kept is not None:
        fields |= {"flags": int(flags | OpFlag.OWN_ROWS), "window": weight.kept.first}
    yield FusedOp(OpKind.EMBED, out or node.out, (), fields, weight)


def _scale(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    embedding = fuser.absorbed.get(node.inputs[0])
    factor = node.attributes["factor"]
    if embedding is None:
        yield FusedOp(OpKind.SCALE, node.out, node.inputs, {"n": node.out.width, "scale": factor})
    else:
        yield from _embedding(fuser, embedding, node.out, factor)


def _rotary_table(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    fields = {"head_dim": node.out.width, "scale": node.attributes["factor"]}
    yield FusedOp(OpKind.ROTARY, node.out, (), fields, node.attributes["frequencies"], bias=node.attributes.get("axes"))


def _rms_norm(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    fields = {"k": node.out.width, "eps": node.attributes["eps"]}
    offset = node.attributes.get("offset", 0.0)
    yield FusedOp(OpKind.RMS_NORM, node.out, node.inputs, fields, node.attributes["weight"], norm_offset=offset)


def _layer_norm(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    fields = {"k": node.out.width, "eps": node.attributes["eps"]}
    weight = node.attributes["weight"]
    bias = node.attributes["bias"]
    yield FusedOp(OpKind.LAYER_NORM, node.out, node.inputs, fields, weight, bias=bias)


def _linear(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    if node.attributes["weight"].interleaved:
        raise InvariantError(
            "the result of a gate and up layer may only be read by ops.silu_and_mul or another gate; "
            "make them two layers, or one that does not pair its rows"
        )
    yield _product(OpKind.LINEAR, node, node.out)


def _gated(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    product = fuser.absorbed.get(node.inputs[0])
    if product is None:
        yield from _call(fuser, node)
    else:
        op = _product(_GATED[node.op], product, node.out)
        op.fields["scale"] = node.attributes.get("factor", 1.0)
        yield op


def _sigmoid_gate(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    gate = fuser.absorbed.get(node.inputs[1])
    if gate is None or node.out.width % LANES:
        yield from () if gate is None else _call(fuser, gate)
        yield from _call(fuser, node)
        return
    fields = {"n": node.out.width, "heads": 1, "flags": int(OpFlag.SIGMOID_GATE), "window": gate.attributes["first"]}
    yield FusedOp(OpKind.GATED_NORM, node.out, (node.inputs[0], gate.inputs[0]), fields)


def _silu(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    """x * sigmoid(x): a gate that opens itself."""
    if node.out.width % LANES:
        yield from _call(fuser, node)
        return
    fields = {"n": node.out.width, "heads": 1, "flags": int(OpFlag.SIGMOID_GATE)}
    yield FusedOp(OpKind.GATED_NORM, node.out, (node.inputs[0], node.inputs[0]), fields)


def _activation(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    product = fuser.absorbed.get(node.inputs[0])
    if product is None:
        yield from _call(fuser, node)
    else:
        op = _product(OpKind.LINEAR, product, node.out)
        op.fields["flags"] = int(_ACTIVATIONS[node.op])
        yield op


def _add(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    for value, other in (node.inputs, node.inputs[::-1]):
        found = fuser.absorbed.get(value)
        if found is None:
            continue
        scaled = found.op is ops.scale
        op = _product(OpKind.LINEAR, fuser.absorbed[found.inputs[0]] if scaled else found, node.out, other)
        op.fields["scale"] = found.attributes["factor"] if scaled else 1.0
        yield op
        return
    yield FusedOp(OpKind.ADD, node.out, node.inputs, {"n": node.out.width})


def _experts(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    weight = node.attributes["gate_up"]
    if not isinstance(weight, PackedMatrix):
        yield from _call(fuser, node)
        return
    fields = {"n": weight.n, "k": weight.k}
    yield FusedOp(OpKind.EXPERTS, node.out, node.inputs, fields, weight, experts=_experts_of(node))


def _experts_of(node: Node) -> dict[str, Any]:
    """Attributes of a node that computes experts, and ``routed_width``: the width of the router's input if the experts
    have another input, otherwise 0."""
    routed = node.inputs[1].width if node.op is ops.latent_experts else 0
    return {**node.attributes, "routed_width": routed}


def _attention(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    """Two operations: the linear layer for q, k and v with the split into heads, then attention."""
    heads = node.inputs[0].node
    if heads is None:
        raise InvariantError("attention reads heads that no operation made")
    given = heads.attributes
    attended = node.attributes
    qkv = heads.inputs[0]
    sizes = {"heads": given["num_heads"], "kv_heads": given["num_kv_heads"], "head_dim": given["head_dim"]}
    sizes["layer"] = attended["layer"]
    found = fuser.absorbed.get(qkv)
    q = Value(qkv.recorder, "rows", node.out.width)
    if found is None:
        op = FusedOp(OpKind.HEADS, q, (qkv,))
    elif found.op is ops.columns:
        op = FusedOp(OpKind.HEADS, q, found.inputs, {"window": found.attributes["first"]})
    elif found.op is ops.norm_all_heads:
        op = FusedOp(OpKind.HEADS, q, found.inputs, {"flags": int(OpFlag.ALL_HEADS)})
        given = given | found.attributes
    else:
        op = _product(OpKind.QKV, found, q)
    op.fields |= {**sizes, "eps": given.get("eps", 0.0)}
    op.q_norm, op.k_norm = given.get("q_norm"), given.get("k_norm")
    op.norm_offset = given.get("norm_offset", 0.0)
    op.rotary = heads.inputs[1] if len(heads.inputs) == 2 else None
    yield op
    fields = {**sizes, "scale": attended["scale"], "window": attended["window"] or 0, "cap": attended["cap"] or 0.0}
    fields["flags"] = int(OpFlag.BOTH_WAYS) if attended["both_ways"] else 0
    yield FusedOp(OpKind.ATTENTION, node.out, (q,), fields, sinks=attended["sinks"])


def _recurrence(fuser: _Fuser, node: Node) -> Iterator[FusedOp]:
    """The operations of a recurrent layer. A cell without a native kernel is computed in plain torch, which reads and
    writes the same states."""
    make = _CELLS.get(type(node.attributes["cell"]))
    yield from (None if make is None else make(node, node.attributes["cell"], node.out)) or _call(fuser, node)


def _short_conv(node: Node, cell: ShortConv, out: Value, column: int = 0) -> list[FusedOp]:
    """The operation that convolves the columns of the input from ``column`` on. Empty if no kernel supports its
    sizes."""
    if not _convolves(cell):
        return []
    channels = cell.channels
    taps = cell.taps
    flags = (OpFlag.GATED if cell.gated else 0) | (OpFlag.SILU if cell.silu else 0)
    fields = {"n": channels, "k": taps, "layer": node.attributes["layer"], "flags": int(flags), "window": column}
    weight = cell.weight.detach().view(channels, taps).t()
    factors = cell.channel_factors(weight.device)
    return [FusedOp(OpKind.SHORT_CONV, out, node.inputs[:1], fields, weight, bias=cell.bias, q_norm=factors)]


def _mamba2(node: Node, cell: Mamba2, out: Value) -> list[FusedOp]:
    """The operations of a Mamba-2 layer: the convolution, the scan, and the gate with its norm. Empty if no kernel
    supports the layer's sizes."""
    shape = cell.shape
    recorder = out.recorder
    given = node.inputs[0]
    mixed = Value(recorder, "rows", shape.channels)
    scanned = Value(recorder, "rows", shape.inner)
    if not scan_heads(cell):
        return []
    conv = _short_conv(node, cell.conv, mixed, shape.inner)
    min_step, max_step = shape.time_limit
    scan = FusedOp(
        OpKind.MAMBA_SCAN,
        scanned,
        (mixed, given),
        {
            **{"n": shape.inner, "k": shape.state_size, "heads": shape.heads, "kv_heads": shape.groups},
            **{"head_dim": shape.head_dim, "window": shape.inner + shape.channels, "layer": node.attributes["layer"]},
            **{"scale": min_step, "cap": max_step, "eps": shape.step_factor},
            **_own_heads(cell.own_heads),
        },
        cell.a_log,
        bias=cell.dt_bias,
        q_norm=cell.skip,
        part=1,
    )
    flags = int(OpFlag.NORM_FIRST) if shape.norm_first else 0
    fields = {"n": shape.inner, "heads": shape.norm_groups, "eps": shape.norm_eps, "flags": flags}
    fields["scale"] = shape.gate_factor
    return [*conv, scan, FusedOp(OpKind.GATED_NORM, out, (scanned, given), fields, cell.norm)]


def _own_heads(own: tuple[int, int] | None) -> dict[str, int]:
    """Fields of a scan that say which heads this process computes."""
    return {} if own is None else {"first_head": own[0], "own_heads": own[1]}


def _delta_rule(node: Node, cell: DeltaRule, out: Value) -> list[FusedOp]:
    """The operations of a gated delta net: the convolution, the scan, and the gate with its norm. Empty if no kernel
    supports the layer's sizes."""
    given, rates = node.inputs
    width = cell.value_heads * cell.value_dim
    mixed = Value(out.recorder, "rows", cell.channels)
    scanned = Value(out.recorder, "rows", width)
    if not scan_heads(cell):
        return []
    conv = _short_conv(node, ShortConv(cell.conv, None, silu=True), mixed)
    fields = {"n": width, "k": cell.key_dim, "heads": cell.value_heads, "kv_heads": cell.key_heads}
    fields |= {"head_dim": cell.value_dim, "layer": node.attributes["layer"], **_own_heads(cell.own_heads)}
    scan = FusedOp(OpKind.DELTA_SCAN, scanned, (mixed, rates), fields, cell.decay_log, bias=cell.step_bias, part=1)
    gate = {"n": width, "heads": cell.value_heads, "eps": cell.eps, "flags": int(OpFlag.NORM_FIRST)}
    gate["window"] = cell.channels
    weight = cell.norm.detach().expand(cell.value_heads, -1)
    return [*conv, scan, FusedOp(OpKind.GATED_NORM, out, (scanned, given), gate, weight)]


MOST_TAPS = 8
"""Maximum number of tokens that the convolution kernel spans: ``MOST_TAPS`` of ``csrc/cpu/recurrent.h``."""
LANES = 16
MOST_STATE = 256
"""Vector width and maximum state size of the scan kernels: ``LANES`` and ``MOST_STATE`` of ``csrc/cpu/scan.h``."""

_CELLS: dict[type, Callable[[Node, Any, Value], list[FusedOp]]] = {
    DeltaRule: _delta_rule,
    Mamba2: _mamba2,
    ShortConv: _short_conv,
}
"""Type of a cell with a native kernel -> function that makes its operations."""

_GATED: dict[Op[..., Any], OpKind] = {
    ops.gelu_tanh_and_mul: OpKind.LINEAR_GELU,
    ops.silu_and_mul: OpKind.LINEAR_SILU,
}
"""Gated activation -> kind of the fused operation that computes a linear layer and then this activation."""

_ACTIVATIONS: dict[Op[..., Any], Activation] = {
    ops.gelu: Activation.GELU,
    ops.gelu_tanh: Activation.GELU_TANH,
    ops.relu: Activation.RELU,
    ops.relu_squared: Activation.RELU_SQUARED,
}

_CLAIMED: dict[Op[..., Any], tuple[Op[..., Any], ...]] = {
    add: (ops.native_linear, ops.scale),
    ops.rotary_heads: (ops.columns, ops.native_linear, ops.norm_all_heads),
    ops.scale: (ops.embedding,),
    ops.sigmoid_gate: (ops.columns,),
    **dict.fromkeys((*_GATED, *_ACTIVATIONS), (ops.native_linear,)),
}
"""Operation -> operations that can be fused into it if they compute its input. Both are then one fused operation."""

_KERNELS: dict[Op[..., Any], Callable[[_Fuser, Node], Iterable[FusedOp]]] = {
    add: _add,
    attention: _attention,
    recurrence: _recurrence,
    ops.embedding: _embedding,
    ops.experts: _experts,
    ops.latent_experts: _experts,
    ops.layer_norm: _layer_norm,
    ops.native_linear: _linear,
    ops.rms_norm: _rms_norm,
    ops.rms_norm_offset: _rms_norm,
    ops.rotary_heads: lambda fuser, node: (),  # fused into the attention that reads it
    ops.rotary_table: _rotary_table,
    ops.scale: _scale,
    ops.sigmoid_gate: _sigmoid_gate,
    ops.silu: _silu,
    **dict.fromkeys(_ACTIVATIONS, _activation),
    **dict.fromkeys(_GATED, _gated),
}
"""Operation with a native kernel -> function that makes the fused operations of its node."""

CELLS = frozenset(_CELLS)
"""Types of the recurrent cells with native kernels, if their sizes fit."""
OPERATIONS = frozenset(_KERNELS) - {recurrence}
"""Operations with a native kernel."""
FUSED = frozenset(op for claimed in _CLAIMED.values() for op in claimed) - OPERATIONS
"""Operations without a kernel of their own that kernels of other operations can compute."""


def _product(kind: OpKind, product: Node, out: Value, *aux: Value) -> FusedOp:
    weight: PackedMatrix = product.attributes["weight"]
    return FusedOp(kind, out, (*product.inputs, *aux), {"n": weight.n, "k": weight.k}, weight)
