"""Runs a recorded model with the Triton kernels, from the same nodes as the CPU's step programs, in few launches.

The launches of a layer are: QKV matmul | norm, rotation and KV write | attention | output matmul | addition and norm |
gate-up matmul | SwiGLU | down matmul | addition and norm. Attention with split keys has a second launch, and attention
of rows that share keys has a launch before it. A recurrent layer has one to three launches
(:mod:`~chairlift.kernels.triton.recurrences`). If the sum of a matmul is split, the next launch adds the parts. From 17
to 64 rows, the gate-up matmul computes SwiGLU. A layer of experts has launches of its own
(:mod:`~chairlift.kernels.triton.experts`). If rows have adapters, each linear layer has a launch before it
(:mod:`~chairlift.kernels.triton.low_rank`). Matmuls of few rows use :mod:`~chairlift.kernels.triton.linear_small`.
Larger matmuls use torch's library, with activations in fp8 if the weight is fp8. A matmul with a weight in codes
decodes it (:mod:`~chairlift.kernels.triton.coded_linear`), for many rows before the library's matmul. Functions passed
to ``ops.call_out`` run unchanged, so they must not wait for the device.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from chairlift.errors import ConfigError, InvariantError
from chairlift.kernels import ops
from chairlift.kernels.coded import CodedWeight
from chairlift.kernels.fp8 import Fp8Weight
from chairlift.kernels.low_rank_pool import LowRankSite
from chairlift.kernels.recording import Node, Op, Value, add, attention, recurrence
from chairlift.kernels.triton.coded_linear import coded_linear, coded_parts, decoded_rows, library_linear
from chairlift.kernels.triton.experts import experts
from chairlift.kernels.triton.launch import GEMM_BLOCK_M, AttentionLaunch, GemmLaunch, gemm_launch
from chairlift.kernels.triton.linear_small import linear_parts, linear_small
from chairlift.kernels.triton.low_rank import LowRankTerm, expand, shrink
from chairlift.kernels.triton.norms import add_rms_norm, rms_norm, silu_and_mul
from chairlift.kernels.triton.operations import LINEARS
from chairlift.kernels.triton.paged_attention import SharedTiles, paged_attention
from chairlift.kernels.triton.recurrences import cell_launch
from chairlift.kernels.triton.rope_cache import rope_and_cache, rotary_table
from chairlift.kernels.triton.scaled import scaled_linear
from chairlift.kernels.triton.states import StateRows

__all__ = ["CODED_ROWS", "FUSIONS", "SMALL_ROWS", "PagedKV", "StepTensors", "TritonProgram"]

FUSIONS = frozenset({"add_norm", "linear_add_norm", "linear_heads", "linear_swiglu"})
"""Names of the fusions: groups of recorded operations that a TritonProgram computes together. Without a fusion the
results have the same bits; fusions are left out only in comparisons."""

SMALL_ROWS = 64
"""Maximum number of rows for the matmul kernel for few rows. On an H200, on the layers of Qwen3-0.6B, it takes 0.7 to
0.97 of cuBLAS's time up to 64 rows, and the same time at 128."""

CODED_ROWS = 256
"""Maximum number of rows for which each tile of 64 rows decodes a weight in codes again. With more rows it is decoded
once, for torch's library. Not measured."""

Weight = Tensor | Fp8Weight | CodedWeight
"""A linear layer's weight, in a format that the kernels multiply with."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's inputs on the device: N rows with T tokens in all. See :class:`~chairlift.base.step_batch.StepBatch`."""

    token_ids: Tensor
    """int32 [T], the ids of the tokens to compute."""
    positions: Tensor
    """int32 [T], the position of each token in its sequence."""
    seq_lens: Tensor
    """int32 [N], the number of tokens in each sequence after this step; 0 in padding rows."""
    cu_seqlens: Tensor | None
    """int32 [N + 1], offsets of the rows in the flat batch; None if every row has one token."""
    table_rows: Tensor
    """int32 [N], for each row of the step, the index of its row in the block tables."""
    block_tables: Sequence[Tensor]
    """Block tables, one per cache group: int32 [number of table rows, M]."""
    slot_mapping: Sequence[Tensor]
    """Per cache group, int64 [T], the slot where each token's K and V are written; -1: nothing is written."""
    shared: Sequence[SharedTiles] | None = None
    """Per cache group, the keys that rows of a decode step read together; None: each row reads its keys alone."""
    row_offsets: Tensor | None = None
    """int32 [N + 1], offsets of the rows in the flat batch if ``cu_seqlens`` is None. Only recurrent layers read it."""
    adapters: Tensor | None = None
    """int32 [T], the slot of each token's adapter, -1 for none; None if no token has one."""


@dataclasses.dataclass(frozen=True, slots=True)
class PagedKV:
    """The KV cache of a model: the tensors of all layers."""

    caches: Sequence[tuple[Tensor, ...]]
    """Per layer, K and V, each [num_blocks, block_size, Hkv, Dh]. In 8 bits, the scales of both follow; see
    :mod:`~chairlift.kernels.triton.kv8`."""
    layer_groups: Sequence[int]
    """Layer index -> index of its cache group."""
    state_spans: Sequence[int | None] = ()
    """Per cache group, the number of positions that a table entry covers, for groups of recurrent states; None for
    other groups. A recurrent layer has the parts of its states in ``caches``, each [num_blocks, ...]."""


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
        sites: Mapping[int, LowRankSite] | None = None,
    ) -> None:
        """With ``batch_invariant``, one kernel computes matmuls of any number of rows. Raises ConfigError if some
        matmul cannot use that kernel. ``sites`` has the matrices of adapters by the ``id`` of the layer's weight."""
        self._nodes = nodes
        self._output = output
        self._kv = kv
        self._multiprocessors = num_multiprocessors
        self._batch_invariant = batch_invariant
        self._sites = {} if sites is None else sites
        self._adapters: Tensor | None = None
        """int32 [T], the slot of each row's adapter in the run in progress; None if no row has one."""
        self.calls = list(dict.fromkeys(node.label for node in nodes if node.op not in _KERNELS))
        """Names of the operations without a Triton kernel, which PyTorch computes."""
        if batch_invariant and self.calls:
            raise ConfigError("batch_invariant is on, but PyTorch computes a part of this model; leave it off")
        tables = [node for node in nodes if node.op is ops.rotary_table]
        self._cells = {
            node.out: cell_launch(node.attributes["cell"], device) for node in nodes if node.op is recurrence
        }
        """Result of a recurrent layer -> function that launches its kernels."""
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
        self._fused = {i: fusion for i in range(len(nodes)) if (fusion := self._fusion(i))}
        """Index of the first of several nodes that are computed together -> (number of these nodes, method that
        computes them)."""

    @torch.inference_mode()
    def run(
        self,
        given: dict[Value, Tensor],
        step: StepTensors | None = None,
        launch: AttentionLaunch | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """``output`` [T, width], computed from the values in ``given``. ``step`` and ``launch`` are needed for
        attention. ``adapters`` has the rows' adapters, as :attr:`StepTensors.adapters`, if there is no step."""
        self._adapters = adapters if step is None else step.adapters
        values = dict(given)
        i = 0
        while i < len(self._nodes):
            node = self._nodes[i]
            count, compute = self._fused.get(i, (1, None))
            if compute is None:
                values[node.out] = self._compute(node, values, step, launch)
            else:
                compute(self, values, step, *self._nodes[i : i + count])
            for value in itertools.chain(*self._dead[i : i + count]):
                values.pop(value, None)  # keys and values of attention are in the cache
            i += count
        return values[self._output]

    def _fusion(self, i: int) -> tuple[int, Callable[..., None]] | None:
        """(number of nodes from node ``i`` on that are computed together, method that computes them), if they are."""
        node, *after = self._nodes[i : i + 3]
        if node.op in LINEARS and after and node.out in self._dead[i + 1]:
            if "linear_heads" in FUSIONS and after[0].op is ops.rotary_heads:
                return 2, TritonProgram._linear_heads
            if "linear_swiglu" in FUSIONS and after[0].op is ops.silu_and_mul and not after[0].attributes:
                return 2, TritonProgram._linear_swiglu
            if "linear_add_norm" in FUSIONS and self._adds_in_place(i + 1):
                return 3, TritonProgram._linear_add_norm
        return (2, TritonProgram._add_norm) if "add_norm" in FUSIONS and self._adds_in_place(i) else None

    def _adds_in_place(self, i: int) -> bool:
        """Whether node ``i`` may add in place: the next node is a norm, and this program computed the activations that
        are overwritten, and nothing else reads them."""
        node, norm = (*self._nodes[i : i + 2], None)[:2]
        if node is None or norm is None:
            return False
        if node.op is not add or norm.op is not ops.rms_norm or norm.inputs != (node.out,):
            return False
        kept, added = node.inputs
        # The function of a call-out may keep its result, so its result is not overwritten.
        made = {n.out for n in self._nodes[:i] if n.op in (ops.embedding, add)}
        return kept in made and kept in self._dead[i] and kept is not added

    def _add_norm(self, values: dict[Value, Tensor], step: StepTensors | None, node: Node, norm: Node) -> None:
        kept, added = (values[value] for value in node.inputs)
        values[norm.out] = add_rms_norm(added, kept, **norm.attributes)
        values[node.out] = kept

    def _linear_add_norm(
        self, values: dict[Value, Tensor], step: StepTensors | None, linear: Node, node: Node, norm: Node
    ) -> None:
        added, bias = self._linear_or_parts(values[linear.inputs[0]], **linear.attributes)
        kept = values[node.inputs[0]]
        values[norm.out] = add_rms_norm(added, kept, **norm.attributes, bias=bias)
        values[node.out] = kept

    def _linear_heads(self, values: dict[Value, Tensor], step: StepTensors | None, linear: Node, heads: Node) -> None:
        qkv, bias = self._linear_or_parts(values[linear.inputs[0]], **linear.attributes)
        values[heads.out] = self._heads(heads, [qkv, *(values[value] for value in heads.inputs[1:])], step, bias)

    def _linear_swiglu(self, values: dict[Value, Tensor], step: StepTensors | None, linear: Node, node: Node) -> None:
        values[node.out] = self._linear(values[linear.inputs[0]], **linear.attributes, gated=True)

    def _compute(
        self, node: Node, values: dict[Value, Tensor], step: StepTensors | None, launch: AttentionLaunch | None
    ) -> Tensor:
        if node.op is attention:
            return self._attention(node, values[node.inputs[0]], step, launch)
        given = [values[value] for value in node.inputs]
        if node.op is ops.rotary_heads:
            return self._heads(node, given, step)
        if node.op in (ops.experts, ops.latent_experts):
            return self._experts(node, step, *given)
        if node.op is recurrence:
            return self._recurrence(node, given, step)
        kernel = _KERNELS.get(node.op)
        if kernel is not None:
            return kernel(self, node, *given)
        # Functions of token ids and positions expect int64 tensors; the device has int32.
        out: Tensor = node.compute(
            *(x if v.role == "rows" else x.long() for x, v in zip(given, node.inputs, strict=True))
        )
        return out

    def _attention(self, node: Node, q: Tensor, step: StepTensors | None, launch: AttentionLaunch | None) -> Tensor:
        if step is None or launch is None:
            raise InvariantError("attention needs a step and its launch")
        layer, scale, window = (node.attributes[name] for name in ("layer", "scale", "window"))
        keys, entries, *scales = self._kv.caches[layer]
        group = self._kv.layer_groups[layer]
        out = paged_attention(
            q, keys, entries, step.seq_lens, step.block_tables[group], scale=scale, window=window, launch=launch,
            cu_seqlens=step.cu_seqlens, table_rows=step.table_rows,
            shared=None if step.shared is None else step.shared[group], cap=node.attributes["cap"],
            sinks=node.attributes["sinks"], scales=(scales[0], scales[1]) if scales else None,
        )  # fmt: skip
        return out.flatten(1)

    def _recurrence(self, node: Node, given: Sequence[Tensor], step: StepTensors | None) -> Tensor:
        """A recurrent layer. The states of the step's rows are read and updated."""
        layer = node.attributes["layer"]
        group = self._kv.layer_groups[layer]
        span = self._kv.state_spans[group] if self._kv.state_spans else None
        if step is None or span is None:
            raise InvariantError(f"recurrent layer {layer} needs a step, and a cache group of states")
        one_token = step.cu_seqlens is None
        offsets = step.row_offsets if step.cu_seqlens is None else step.cu_seqlens
        if offsets is None:
            raise InvariantError(f"recurrent layer {layer} needs the offsets of the step's rows")
        rows = StateRows(offsets, step.seq_lens, step.table_rows, step.block_tables[group], span, one_token)
        return self._cells[node.out](given, self._kv.caches[layer], rows)

    def _heads(
        self, node: Node, given: Sequence[Tensor], step: StepTensors | None, bias: Tensor | None = None
    ) -> Tensor:
        """Queries of an attention layer. Keys and values are written to their slots. ``bias`` is added to the parts of
        a split sum."""
        if step is None:
            raise InvariantError("heads need a step, whose cache they are written to")
        layer = self._layer_of[node.out]
        attributes = node.attributes
        keys, entries, *scales = self._kv.caches[layer]
        q_norm = attributes.get("q_norm")
        k_norm = attributes.get("k_norm")
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
            bias=bias,
            scales=(scales[0], scales[1]) if scales else None,
            dtype=node.out.dtype if scales else None,
        )

    def _experts(self, node: Node, step: StepTensors | None, x: Tensor, *others: Tensor) -> Tensor:
        """A layer of experts. The second value is the shared expert's result, or, for latent experts, what the router
        reads. Tokens that pad the step are written nowhere, and choose no expert."""
        given = dict(node.attributes)
        shared = given.pop("shared", None)
        routed = x
        if node.op is ops.latent_experts:
            (routed,) = others
        elif others:
            (shared,) = others
        return experts(
            x,
            routed,
            shared,
            **given,
            num_multiprocessors=self._multiprocessors,
            batch_invariant=self._batch_invariant,
            slots=step.slot_mapping[0] if step is not None and step.slot_mapping else None,
        )

    def _table(self, node: Node, positions: Tensor) -> Tensor:
        attributes = node.attributes
        return rotary_table(positions, self._frequencies[node.out], attributes["factor"], attributes["dtype"])

    def _gemm_launch(self, x: Tensor, weight: Weight) -> GemmLaunch | None:
        """Launch configuration with which the matmul kernel for few rows multiplies ``x`` by ``weight``; None if
        torch's library does it."""
        any_rows = self._batch_invariant
        num_out, num_in = weight.values.shape if isinstance(weight, Fp8Weight) else weight.shape
        if not any_rows and len(x) > SMALL_ROWS:
            if isinstance(weight, CodedWeight):
                any_rows = len(x) <= CODED_ROWS
            elif isinstance(weight, Fp8Weight):
                any_rows = bool(num_out % 16 or num_in % 16)  # the library accepts no such sizes in fp8
            if not any_rows:
                return None
        return gemm_launch(
            num_out, num_in, self._multiprocessors, num_rows=len(x), any_rows=any_rows, itemsize=x.element_size()
        )

    def _linear_or_parts(self, x: Tensor, weight: Weight, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(a linear layer, None), or, if its sum is split, (the parts, the bias), which the next launch adds.

        With batch_invariant, the layer adds its own parts. On an H200 the next launch took 3 to 7 % of a step longer.
        """
        launch = self._gemm_launch(x, weight)
        if launch is None or launch.num_splits == 1 or self._batch_invariant:
            return self._linear(x, weight, bias), None
        term = self._term(x, weight)
        if isinstance(weight, CodedWeight):
            return coded_parts(x, weight, launch=launch, term=term), bias
        values, scales = (weight, None) if isinstance(weight, Tensor) else (weight.values, weight.scales)
        return linear_parts(x, values, launch=launch, scales=scales, term=term), bias

    def _linear(self, x: Tensor, weight: Weight, bias: Tensor | None, *, gated: bool = False) -> Tensor:
        """A linear layer; with ``gated``, SwiGLU of its results.

        The matmul computes SwiGLU in tiles of 64 rows only. In tiles of 16 rows, this made a step of Qwen2.5-0.5B's
        shape 7 % slower on an H200.
        """
        launch = self._gemm_launch(x, weight)
        term = self._term(x, weight)
        if launch is None:
            out = _by_library(x, weight, bias)
            if term is not None:
                expand(out, term, bias)
        else:
            inside = gated and launch.block_m > GEMM_BLOCK_M
            out = _by_kernel(x, weight, bias, launch, inside, term)
            gated = gated and not inside
        return silu_and_mul(out) if gated else out

    def _term(self, x: Tensor, weight: Weight) -> LowRankTerm | None:
        """What the adapters of the rows ``x`` add to their products with ``weight``; None if they add nothing."""
        site = self._sites.get(id(weight))
        if self._adapters is None or site is None:
            return None
        return shrink(x, site, self._adapters, any_rows=self._batch_invariant)

    def _embedding(self, node: Node, ids: Tensor) -> Tensor:
        weight = node.attributes["weight"]
        if isinstance(weight, CodedWeight):
            return decoded_rows(weight, weight.dtype, ids=ids)
        return torch.nn.functional.embedding(ids, weight)


def _by_library(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, CodedWeight):
        return library_linear(x, weight, bias)
    if isinstance(weight, Fp8Weight):
        return scaled_linear(x, weight.values, bias, scales=weight.scales)
    out: Tensor = ops.linear(x, weight, bias)
    return out


def _by_kernel(
    x: Tensor, weight: Weight, bias: Tensor | None, launch: GemmLaunch, gated: bool, term: LowRankTerm | None
) -> Tensor:
    if isinstance(weight, CodedWeight):
        return coded_linear(x, weight, bias, launch=launch, gated=gated, term=term)
    values, scales = (weight, None) if isinstance(weight, Tensor) else (weight.values, weight.scales)
    return linear_small(x, values, bias, launch=launch, scales=scales, gated=gated, term=term)


_KERNELS: dict[Op[..., Any], Callable[..., Tensor]] = {
    add: lambda program, node, a, b: a + b,
    attention: TritonProgram._attention,
    recurrence: TritonProgram._recurrence,
    ops.embedding: TritonProgram._embedding,
    ops.experts: TritonProgram._experts,
    ops.latent_experts: TritonProgram._experts,
    ops.rms_norm: lambda program, node, x: rms_norm(x, **node.attributes),
    ops.rotary_heads: TritonProgram._heads,
    ops.rotary_table: TritonProgram._table,
    ops.silu_and_mul: lambda program, node, x: silu_and_mul(x, **node.attributes),
    **dict.fromkeys(LINEARS, lambda program, node, x: program._linear(x, **node.attributes)),
}
"""Operation with a kernel -> function that launches it. Those for attention, experts and recurrent layers also get the
step."""
