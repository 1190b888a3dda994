"""Runs a recorded model with the Triton kernels, from the same nodes as the CPU's step programs, in few launches.

The launches of a layer are: QKV matmul | norm, rotation and KV write | attention | output matmul | addition and norm |
gate-up matmul | SwiGLU | down matmul | addition and norm. Matmuls of few rows use
:mod:`~chairlift.kernels.triton.linear_small`. Larger matmuls use torch's library, with activations in fp8 if the weight
is fp8. Functions passed to ``ops.call_out`` run unchanged, so they must not wait for the device.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from chairlift.errors import ConfigError, InvariantError
from chairlift.kernels import ops
from chairlift.kernels.fp8 import Fp8Weight
from chairlift.kernels.recording import Node, Op, Value, add, attention
from chairlift.kernels.triton.launch import AttentionLaunch, gemm_launch
from chairlift.kernels.triton.linear_small import linear_small
from chairlift.kernels.triton.norms import add_rms_norm, rms_norm, silu_and_mul
from chairlift.kernels.triton.paged_attention import paged_attention
from chairlift.kernels.triton.rope_cache import rope_and_cache, rotary_table
from chairlift.kernels.triton.scaled import scaled_linear

__all__ = ["SMALL_ROWS", "PagedKV", "StepTensors", "TritonProgram"]

SMALL_ROWS = 64
"""Maximum number of rows for the matmul kernel for few rows. On an H200, on the layers of Qwen3-0.6B, it takes 0.7 to
0.97 of cuBLAS's time up to 64 rows, and the same time at 128."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's inputs on the device: N rows with T tokens in all. See :class:`~chairlift.step_batch.StepBatch`."""

    token_ids: Tensor
    """int32 [T], the token ids."""
    positions: Tensor
    """int32 [T], the position of each token."""
    seq_lens: Tensor
    """int32 [N], the number of tokens in each sequence after this step; 0 in padding rows."""
    cu_seqlens: Tensor | None
    """int32 [N + 1], offsets of the rows in the flat batch; None if every row has one token."""
    table_rows: Tensor
    """int32 [N], the index of each row's line in the block tables."""
    block_tables: Sequence[Tensor]
    """Per cache group, the block tables, int32 [lines, M]."""
    slot_mapping: Sequence[Tensor]
    """Per cache group, int64 [T], the slot where each token's K and V are written; -1: nothing is written."""


@dataclasses.dataclass(frozen=True, slots=True)
class PagedKV:
    """The KV caches of a model."""

    caches: Sequence[tuple[Tensor, ...]]
    """Per layer, K and V, each [num_blocks, block_size, Hkv, Dh]."""
    layer_groups: Sequence[int]
    """Layer index -> index of its cache group."""


class TritonProgram:
    """Runs the recorded ``nodes``, from ``start`` (token ids and positions, or activations) to ``output``.

    Weights are read in place, so replaced weights take effect. A run does not wait for the device and uses torch's
    allocator, so it can be captured in a CUDA graph.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        output: Value,
        kv: PagedKV,
        device: torch.device,
        num_multiprocessors: int,
        batch_invariant: bool = False,
    ) -> None:
        """With ``batch_invariant``, one kernel computes matmuls of any number of rows. Raises ConfigError if some
        matmul cannot use that kernel."""
        self._nodes = nodes
        self._output = output
        self._kv = kv
        self._multiprocessors = num_multiprocessors
        self._batch_invariant = batch_invariant
        self.calls = list(dict.fromkeys(node.label for node in nodes if node.op not in _KERNELS))
        """Names of the operations that run in plain torch."""
        if batch_invariant and self.calls:
            raise ConfigError("batch_invariant is on, but PyTorch computes a part of this model; leave it off")
        tables = [node for node in nodes if node.op is ops.rotary_table]
        self._frequencies = {node.out: node.attributes["frequencies"].to(device) for node in tables}
        attentions = [node for node in nodes if node.op is attention]
        self._layer_of = {node.inputs[0]: node.attributes["layer"] for node in attentions}
        heads = collections.Counter(node.inputs[0] for node in attentions)
        if any(heads[node.out] != 1 for node in nodes if node.op is ops.rotary_heads):
            raise InvariantError(
                "queries, keys and values must go to one attention; use kernels='torch' for this model"
            )
        last = {value: i for i, node in enumerate(nodes) for value in node.inputs}
        self._dead: list[list[Value]] = [[] for _ in nodes]
        """Per node, the values that no later node reads. Their memory is released after the node."""
        for value, i in last.items():
            if value is not output:
                self._dead[i].append(value)
        self._in_place = {i for i in range(len(nodes) - 1) if self._adds_in_place(i)}

    @torch.inference_mode()
    def run(
        self, given: dict[Value, Tensor], step: StepTensors | None = None, launch: AttentionLaunch | None = None
    ) -> Tensor:
        """``output`` [T, width], computed from the values in ``given``. ``step`` and ``launch`` are needed for
        attention."""
        values, i = dict(given), 0
        while i < len(self._nodes):
            node = self._nodes[i]
            if i in self._in_place:
                norm = self._nodes[i + 1]
                kept, added = (values[value] for value in node.inputs)
                values[norm.out] = add_rms_norm(added, kept, **norm.attributes)
                values[node.out] = kept
                self._forget(values, i)
                i += 1
            else:
                values[node.out] = self._compute(node, values, step, launch)
            self._forget(values, i)
            i += 1
        return values[self._output]

    def _forget(self, values: dict[Value, Tensor], i: int) -> None:
        for value in self._dead[i]:
            values.pop(value, None)  # keys and values of attention are in the cache

    def _adds_in_place(self, i: int) -> bool:
        """Whether node ``i`` may add in place: the next node is a norm, and this program computed the activations that
        are overwritten, and nothing else reads them."""
        node, norm = self._nodes[i], self._nodes[i + 1]
        if node.op is not add or norm.op is not ops.rms_norm or norm.inputs != (node.out,):
            return False
        kept, added = node.inputs
        # The function of a call-out may keep its result, so its result is not overwritten.
        made = {n.out for n in self._nodes[:i] if n.op in (ops.embedding, add)}
        return kept in made and kept in self._dead[i] and kept is not added

    def _compute(
        self, node: Node, values: dict[Value, Tensor], step: StepTensors | None, launch: AttentionLaunch | None
    ) -> Tensor:
        if node.op is attention:
            return self._attention(node, values[node.inputs[0]], step, launch)
        given = [values[value] for value in node.inputs]
        if node.op is ops.rotary_heads:
            return self._heads(node, given, step)
        kernel = _KERNELS.get(node.op)
        if kernel is not None:
            return kernel(self, node, *given)
        # Functions of token ids and positions expect int64.
        out: Tensor = node.compute(
            *(x if v.role == "rows" else x.long() for x, v in zip(given, node.inputs, strict=True))
        )
        return out

    def _attention(self, node: Node, q: Tensor, step: StepTensors | None, launch: AttentionLaunch | None) -> Tensor:
        if step is None or launch is None:
            raise InvariantError("attention needs a step and its launch")
        layer, scale, window = (node.attributes[name] for name in ("layer", "scale", "window"))
        keys, entries = self._kv.caches[layer]
        group = self._kv.layer_groups[layer]
        out = paged_attention(
            q, keys, entries, step.seq_lens, step.block_tables[group], scale=scale, window=window, launch=launch,
            cu_seqlens=step.cu_seqlens, table_rows=step.table_rows,
        )  # fmt: skip
        return out.flatten(1)

    def _heads(self, node: Node, given: Sequence[Tensor], step: StepTensors | None) -> Tensor:
        """Queries of an attention layer. Keys and values are written to their slots."""
        if step is None:
            raise InvariantError("heads need a step, whose cache they are written to")
        layer, attributes = self._layer_of[node.out], node.attributes
        keys, entries = self._kv.caches[layer]
        q_norm, k_norm = attributes.get("q_norm"), attributes.get("k_norm")
        if offset := attributes.get("norm_offset", 0.0):
            q_norm, k_norm = (None if norm is None else norm.float() + offset for norm in (q_norm, k_norm))
        return rope_and_cache(
            given[0],
            None if len(given) == 1 else (given[1][0], given[1][1]),
            keys,
            entries,
            step.slot_mapping[self._kv.layer_groups[layer]],
            num_heads=attributes["num_heads"],
            q_norm=q_norm,
            k_norm=k_norm,
            eps=attributes.get("eps", 0.0),
        )

    def _table(self, node: Node, positions: Tensor) -> Tensor:
        attributes = node.attributes
        return rotary_table(positions, self._frequencies[node.out], attributes["factor"], attributes["dtype"])

    def _linear(self, x: Tensor, weight: Tensor | Fp8Weight, bias: Tensor | None) -> Tensor:
        any_rows = self._batch_invariant
        if not any_rows and len(x) > SMALL_ROWS:
            if isinstance(weight, Tensor):
                return ops.linear(x, weight, bias)
            if not any(size % 16 for size in weight.values.shape):  # the library accepts no other sizes
                return scaled_linear(x, weight.values, bias, scales=weight.scales)
            any_rows = True
        values, scales = (weight, None) if isinstance(weight, Tensor) else (weight.values, weight.scales)
        num_out, num_in = values.shape
        launch = gemm_launch(
            num_out, num_in, self._multiprocessors, num_rows=len(x), any_rows=any_rows, itemsize=x.element_size()
        )
        return linear_small(x, values, bias, launch=launch, scales=scales)


_KERNELS: dict[Op[..., Any], Callable[..., Tensor]] = {
    add: lambda program, node, a, b: a + b,
    attention: TritonProgram._attention,
    ops.embedding: lambda program, node, ids: torch.nn.functional.embedding(ids, **node.attributes),
    ops.fp8_linear: lambda program, node, x: program._linear(x, **node.attributes),
    ops.linear: lambda program, node, x: program._linear(x, **node.attributes),
    ops.rms_norm: lambda program, node, x: rms_norm(x, **node.attributes),
    ops.rotary_heads: TritonProgram._heads,
    ops.rotary_table: TritonProgram._table,
    ops.silu_and_mul: lambda program, node, x: silu_and_mul(x),
}
"""Operation with a kernel -> function that launches it. The functions for attention also get the step."""
