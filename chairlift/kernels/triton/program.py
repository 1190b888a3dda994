"""A recorded model run by the Triton kernels: the same nodes that the CPU's step programs are made of, few launches.

A layer is: QKV product | norm, rotation and KV write | attention | output product | addition and norm | gate-up product
| SwiGLU | down product | addition and norm. Products of few rows stream the weight, larger ones are the
library's, which takes activations in fp8 where the weight is. What a model computes in a function given to
``ops.call_out`` runs as it is, so it must not wait for the device.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chairlift.errors import ConfigError, InvariantError
from chairlift.kernels import recording as r
from chairlift.kernels import reference
from chairlift.kernels.fp8 import Fp8Weight, fp8_linear
from chairlift.kernels.triton.launch import AttentionLaunch, gemm_launch
from chairlift.kernels.triton.linear_small import linear_small
from chairlift.kernels.triton.norms import add_rms_norm, rms_norm, silu_and_mul
from chairlift.kernels.triton.paged_attention import paged_attention
from chairlift.kernels.triton.rope_cache import rope_and_cache, rotary_table
from chairlift.kernels.triton.scaled import scaled_linear

__all__ = ["SMALL_ROWS", "PagedKV", "StepTensors", "TritonProgram"]

SMALL_ROWS = 32
"""Products of at most this many rows stream their weight; where cuBLAS takes over best is unmeasured."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepTensors:
    """N rows of T tokens in all, on the device; see :class:`~chairlift.step_batch.StepBatch`."""

    token_ids: Tensor
    """int32 [T]"""
    positions: Tensor
    """int32 [T]"""
    seq_lens: Tensor
    """int32 [N]; 0 in rows that only fill up the batch."""
    cu_seqlens: Tensor | None
    """int32 [N + 1]; None: every row has one token."""
    table_rows: Tensor
    """int32 [N], each row's line of the block tables."""
    block_tables: Sequence[Tensor]
    """Per cache group, int32 [lines, M]."""
    slot_mapping: Sequence[Tensor]
    """Per cache group, int64 [T]; -1 writes nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class PagedKV:
    """Where K and V lie."""

    caches: Sequence[tuple[Tensor, Tensor]]
    """Per layer, each [num_blocks, block_size, Hkv, Dh]."""
    layer_groups: Sequence[int]
    """Layer -> cache group."""


class TritonProgram:
    """``nodes`` of a recording, from ``start`` (token ids and positions, or activations) to ``output``.

    Weights are read where they lie, so replacing them in place is seen. Nothing waits for the device, and memory comes
    from torch's allocator, so a run can be captured in a CUDA graph.
    """

    def __init__(
        self,
        nodes: Sequence[r.Node],
        output: r.Value,
        kv: PagedKV,
        device: torch.device,
        num_multiprocessors: int,
        batch_invariant: bool = False,
    ) -> None:
        """``batch_invariant``: products of any number of rows by one kernel. Raises ConfigError where others remain."""
        self._nodes = nodes
        self._output = output
        self._kv = kv
        self._multiprocessors = num_multiprocessors
        self._batch_invariant = batch_invariant
        if batch_invariant and any(isinstance(n, r.Call) and not _is_linear(n.function) for n in nodes):
            raise ConfigError("batch_invariant is on, but PyTorch computes a part of this model; leave it off")
        self._frequencies = {n.out: n.frequencies.to(device) for n in nodes if isinstance(n, r.RotaryTable)}
        attentions = [node for node in nodes if isinstance(node, r.Attention)]
        self._layer_of = {node.heads.out: node.layer for node in attentions}
        heads = collections.Counter(node.heads.out for node in attentions)
        if any(heads[node.out] != 1 for node in nodes if isinstance(node, r.RotaryHeads)):
            raise InvariantError(
                "queries, keys and values must go to one attention; use kernels='torch' for this model"
            )
        last = {value: i for i, node in enumerate(nodes) for value in node.inputs}
        self._dead: list[list[r.Value]] = [[] for _ in nodes]
        """Per node, the values that nobody reads after it: their memory is given back at once."""
        for value, i in last.items():
            if value is not output:
                self._dead[i].append(value)
        self._in_place = {i for i in range(len(nodes) - 1) if self._adds_in_place(i)}

    @torch.inference_mode()
    def run(
        self, given: dict[r.Value, Tensor], step: StepTensors | None = None, launch: AttentionLaunch | None = None
    ) -> Tensor:
        """``output`` [T, width] from the values ``given``; ``step`` and ``launch`` are for attention."""
        values, i = dict(given), 0
        while i < len(self._nodes):
            node = self._nodes[i]
            if i in self._in_place and isinstance(norm := self._nodes[i + 1], r.RMSNorm):
                kept, added = (values[value] for value in node.inputs)
                values[norm.out] = add_rms_norm(added, kept, norm.weight, norm.eps)
                values[node.out] = kept
                self._forget(values, i)
                i += 1
            else:
                values[node.out] = self._compute(node, values, step, launch)
            self._forget(values, i)
            i += 1
        return values[self._output]

    def _forget(self, values: dict[r.Value, Tensor], i: int) -> None:
        for value in self._dead[i]:
            del values[value]

    def _adds_in_place(self, i: int) -> bool:
        """Whether node ``i`` adds to activations of this program that nobody else reads, and a norm comes next."""
        node, norm = self._nodes[i], self._nodes[i + 1]
        if not isinstance(node, r.Add) or not isinstance(norm, r.RMSNorm) or norm.inputs != (node.out,):
            return False
        kept, added = node.inputs
        # What a call-out returned may be shared with whoever wrote it.
        made = {n.out for n in self._nodes[:i] if isinstance(n, r.Embedding | r.Add)}
        return kept in made and kept in self._dead[i] and kept is not added

    def _compute(
        self, node: r.Node, values: dict[r.Value, Tensor], step: StepTensors | None, launch: AttentionLaunch | None
    ) -> Tensor:
        match node:
            case r.Call(function=function):
                return self._call(function, [values[value] for value in node.inputs], node.inputs)
            case r.Embedding(weight=Tensor() as weight):
                return torch.nn.functional.embedding(values[node.inputs[0]], weight)
            case r.RMSNorm(weight=weight, eps=eps):
                return rms_norm(values[node.inputs[0]], weight, eps)
            case r.SiluAndMul():
                return silu_and_mul(values[node.inputs[0]])
            case r.Add():
                return values[node.inputs[0]] + values[node.inputs[1]]
            case r.RotaryTable(factor=factor):
                dtype = node.out.recorder.dtype
                return rotary_table(values[node.inputs[0]], self._frequencies[node.out], factor, dtype)
            case r.RotaryHeads() if step is not None:
                return self._heads(node, values, step)
            case r.Attention(layer=layer) if step is not None and launch is not None:
                keys, entries = self._kv.caches[layer]
                group = self._kv.layer_groups[layer]
                out = paged_attention(
                    values[node.heads.out], keys, entries, step.seq_lens, step.block_tables[group], scale=node.scale,
                    window=node.window, launch=launch, cu_seqlens=step.cu_seqlens, table_rows=step.table_rows,
                )  # fmt: skip
                return out.flatten(1)
        raise InvariantError(f"the Triton kernels cannot run {type(node).__name__}; use kernels='torch' for this model")

    def _heads(self, node: r.RotaryHeads, values: dict[r.Value, Tensor], step: StepTensors) -> Tensor:
        """The queries; keys and values go to their slots."""
        layer = self._layer_of[node.out]
        keys, entries = self._kv.caches[layer]
        table = values[node.inputs[1]] if len(node.inputs) > 1 else None
        return rope_and_cache(
            values[node.inputs[0]],
            None if table is None else (table[0], table[1]),
            keys,
            entries,
            step.slot_mapping[self._kv.layer_groups[layer]],
            num_heads=node.num_heads,
            q_norm=node.q_norm,
            k_norm=node.k_norm,
            eps=node.eps,
        )

    def _call(self, function: Any, given: list[Tensor], inputs: Sequence[r.Value]) -> Tensor:
        if _is_linear(function):
            return self._linear(given[0], **function.keywords)
        # Functions of token ids and positions were promised int64.
        out: Tensor = function(*(x if v.role == "rows" else x.long() for x, v in zip(given, inputs, strict=True)))
        return out

    def _linear(self, x: Tensor, weight: Tensor | Fp8Weight, bias: Tensor | None) -> Tensor:
        any_rows = self._batch_invariant
        if not any_rows and len(x) > SMALL_ROWS:
            if isinstance(weight, Tensor):
                return reference.linear(x, weight, bias)
            if not any(size % 16 for size in weight.values.shape):  # the library takes no others
                return scaled_linear(x, weight.values, bias, scales=weight.scales)
            any_rows = True
        values, scales = (weight, None) if isinstance(weight, Tensor) else (weight.values, weight.scales)
        num_out, num_in = values.shape
        launch = gemm_launch(num_out, num_in, self._multiprocessors, any_rows=any_rows)
        return linear_small(x, values, bias, launch=launch, scales=scales)


def _is_linear(function: Any) -> bool:
    return isinstance(function, functools.partial) and function.func in (reference.linear, fp8_linear)
