"""Step programs: a recorded model as a list of operations, which the native library runs over a ragged batch.

:class:`StepProgram` turns a :class:`~chairlift.kernels.recording.Recorder`'s nodes into the C structs of
``csrc/cpu/chairlift_cpu.h``, owns every array to which they point, and runs them. At a call-out to Python, the native
run stops, a Python function gets the buffers as tensors, and then the native run continues.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.step_batch import StepBatch
from chairlift.errors import InvariantError
from chairlift.kernels.cpu import library as lib
from chairlift.kernels.cpu.communicator import Communicator
from chairlift.kernels.cpu.fused_op import Activation, FusedOp, OpKind
from chairlift.kernels.cpu.low_rank import LowRankTable
from chairlift.kernels.cpu.lowering import lower, narrow_at
from chairlift.kernels.cpu.packed_codes import PackedCodes
from chairlift.kernels.cpu.packing import NATIVE_DTYPES, PANEL, PackedMatrix
from chairlift.kernels.recording import Node, Recorder, Value, recurrence
from chairlift.kernels.recurrent import plan_pieces, recur_paged
from chairlift.kernels.routing import GROUP_SCORES, SCORINGS, Routing

__all__ = ["ROUTED_TOKENS", "SPARE_ROWS", "StepProgram"]

SPARE_ROWS = 32
"""Number of additional rows in every buffer. Kernels work on tiles, and the last tile may extend past the largest
step."""

ROUTED_TOKENS = 512
"""Number of tokens that a layer of experts routes together: ``CL_EXPERT_TOKENS`` of the kernels."""


class StepProgram:
    """A model as a program that computes ``output`` from token ids, with KV caches laid out as ``kv_layers``.

    ``isa`` is one of :data:`~chairlift.kernels.cpu.library.ISA_NAMES`; a step has at most ``max_tokens`` tokens. The
    memory that ``kv_layers`` points to belongs to the caller and must outlive the program. ``states`` are the state
    tensors of recurrent layers, by layer, for cells without a kernel; ``parts`` maps (layer, part) to the part's index
    in ``kv_layers``. ``adapters`` is the table of the adapters that steps may use, with scratch for ``max_tokens`` plus
    :data:`SPARE_ROWS` tokens. ``taps`` are activations of equal width, computed before the last
    operation that writes KV; each run stores them in :attr:`tapped` while ``captures`` is true. ``others`` are
    activations whose buffers keep their contents after a run, too, for :meth:`rows_of`. ``comm`` connects the processes
    that run the program together, if the model's weights are divided; a run waits for the others, and raises
    EngineDeadError if one has ended.
    """

    def __init__(
        self,
        recorder: Recorder,
        output: Value,
        kv_layers: Sequence[lib.KVLayer],
        pool: lib.ThreadPool,
        *,
        isa: str,
        max_tokens: int,
        states: Mapping[int, tuple[Tensor, ...]] | None = None,
        parts: Mapping[tuple[int, int], int] | None = None,
        adapters: LowRankTable | None = None,
        taps: Sequence[Value] = (),
        others: Sequence[Value] = (),
        keeps_routing: bool = False,
        comm: Communicator | None = None,
    ) -> None:
        self._library = lib.require()
        self._comm = comm
        self._adapters = adapters
        self._adapter_rows: npt.NDArray[np.int32] | None = None
        self._pool = pool
        self._max_tokens = max_tokens
        self._batch = lib.BatchStruct()
        self._step: StepBatch | None = None
        """The step whose arrays the struct ``_batch`` points to; None before the first step."""
        self._recorder = recorder
        self._states = states or {}
        self._parts = parts or {}
        self._state_layers = {layer: (kv_layers[layer].group, kv_layers[layer].block_size) for layer in self._states}
        self.plan = lower(recorder.nodes, output, *others)
        self._referenced: list[Any] = []
        """Objects to which structs of the program point. The list keeps the objects alive."""
        self._converted: list[tuple[Tensor, Tensor, float]] = []
        """For each converted copy of a weight: (copy in another dtype, source weight, number added to the source)."""
        capacity = max_tokens + SPARE_ROWS
        strides = [_stride(width, recorder.dtype.itemsize) for width in self.plan.widths]
        self._buffers = self._make_buffers(capacity, strides)
        self._views: dict[tuple[int, int], int] = {}
        """(buffer, first column) -> number of the view of the buffer from this column on. Views are numbered after the
        buffers. Operations that compute a part of the columns write to views."""
        tables = [op.out for op in self.plan.ops if op.kind == OpKind.ROTARY]
        self._rotary = {value: i for i, value in enumerate(tables)}
        rotary = [_buffer(capacity, value.width, torch.float32) for value in tables]
        self._ops = (lib.OpStruct * len(self.plan.ops))(*map(self._op, self.plan.ops))
        self._program = self._struct(strides, rotary, kv_layers, isa, capacity)
        self._expert_counts = self._expert_memory(keeps_routing)
        if adapters is not None:
            adapters.point(self._program)
        self._output = self._buffers[self.plan.buffer_of[output]][:, : output.width]
        self._num_rows = -1
        self._rows = self._output
        self._narrow_at, narrowed = narrow_at(self.plan.ops, output)
        # Buffers as numpy bytes. Indexing in torch would start threads that spin on the pool's processors.
        self._narrowed = [self._own_columns(self.plan.buffer_of[value]) for value in narrowed]
        self._taps = self._make_taps(taps, capacity)
        self.captures = True

    def run(
        self,
        step: StepBatch,
        tokens: npt.NDArray[np.intp] | None = None,
        images: Mapping[bytes, npt.NDArray[np.uint8]] | None = None,
    ) -> Tensor:
        """Compute one step. Returns ``output`` [T, width], a view of a buffer that the next run overwrites.

        With ``tokens`` [K], indices as in :meth:`StepBatch.only`, the result has only the rows of these tokens,
        [K, width], with the same bits as without this argument. After the last operation that writes KV, other tokens
        are not computed. ``images`` maps tile key -> bytes of its rows in the program's dtype. Each row has an
        embedding, followed by the terms to add after each of the first layers.
        """
        num_tokens = len(step.token_ids)
        end = len(self._ops)
        if not 0 < num_tokens <= self._max_tokens or step.cu_seqlens[-1] != num_tokens:
            raise InvariantError(f"a step has {num_tokens} tokens, but this program allows 1 to {self._max_tokens}")
        begin = 0
        if step.image_rows and images is not None:
            begin = self._place_images(step, images)
        if tokens is None or len(tokens) == num_tokens:
            self._run(step, begin, end)
            return self._rows_of_output(num_tokens)
        self._run(step, begin, self._narrow_at)
        if self._comm is not None:
            self._comm.meet()  # until now, another process may read rows of shared buffers
        for buffer in self._narrowed:
            buffer[: len(tokens)] = buffer[tokens]
        if self._comm is not None:
            self._comm.meet()
        if len(tokens):
            self._run(step.only(tokens), self._narrow_at, end)
        return self._rows_of_output(len(tokens))

    def _struct(
        self,
        strides: Sequence[int],
        rotary: Sequence[Tensor],
        kv_layers: Sequence[lib.KVLayer],
        isa: str,
        capacity: int,
    ) -> lib.Program:
        """The C struct of the program, without experts and adapters. ``strides``: elements per row of each buffer.
        ``rotary``: the tables of cosines and sines."""
        dtype = self._recorder.dtype
        places = [each.data_ptr() for each in self._buffers]
        places += [places[buffer] + column * dtype.itemsize for buffer, column in self._views]
        strides = [*strides, *(strides[buffer] for buffer, _ in self._views)]
        addresses = [(ctypes.c_void_p * len(each))(*each) for each in (places, [x.data_ptr() for x in rotary])]
        arrays = (ctypes.c_int64 * len(strides))(*strides), (lib.KVLayer * len(kv_layers))(*kv_layers)
        self._referenced += [rotary, addresses, arrays]
        return lib.Program(
            ops=self._ops,
            buffers=addresses[0],
            strides=arrays[0],
            rotary=addresses[1],
            kv_layers=arrays[1],
            num_buffers=len(strides),
            num_rotary=len(rotary),
            num_kv_layers=len(kv_layers),
            dtype=NATIVE_DTYPES[dtype],
            isa=lib.ISA_NAMES.index(isa),
            capacity=capacity,
            codes=self._codes(capacity),
            comm=None if self._comm is None else self._comm.handle,
        )

    def _make_buffers(self, capacity: int, strides: Sequence[int]) -> list[Tensor]:
        """The buffers of the plan, each [capacity, stride]."""
        dtype = self._recorder.dtype
        comm = self._comm
        if comm is None:
            if self.plan.shared:
                raise InvariantError("the weights are divided among processes, so the program needs a communicator")
            return [_buffer(capacity, stride, dtype) for stride in strides]
        return [
            comm.tensor(dtype, (capacity, stride)) if number in self.plan.shared else _buffer(capacity, stride, dtype)
            for number, stride in enumerate(strides)
        ]

    def _own_columns(self, number: int) -> npt.NDArray[np.uint8]:
        """Buffer ``number`` as bytes [capacity, ...]; of a shared buffer, the columns that this process narrows."""
        rows = self._buffers[number].view(torch.uint8).numpy()
        if self._comm is None or number not in self.plan.shared:
            return rows
        width = rows.shape[1]
        return rows[:, width * self._comm.rank // self._comm.size : width * (self._comm.rank + 1) // self._comm.size]

    def _place_images(self, step: StepBatch, images: Mapping[bytes, npt.NDArray[np.uint8]]) -> int:
        """Run the operations up to the last one that image rows replace or change, and write the image rows. Returns
        the index of the next operation."""
        begin, inputs = self._embedded
        self._run(step, 0, begin)
        width = self.plan.ops[begin - 1].out.width * self._recorder.dtype.itemsize
        levels = 0
        for at, count, key, first in step.image_rows:
            rows = images[key]
            inputs[at : at + count, :width] = rows[first : first + count, :width]
            levels = max(levels, rows.shape[1] // width - 1)
        for level in range(levels):
            end, buffer = self._after_layer(level)
            self._run(step, begin, end)
            begin = end
            for at, count, key, first in step.image_rows:
                rows = images[key][first : first + count, (level + 1) * width : (level + 2) * width]
                _add_rows(buffer[at : at + count, :width], rows, self._recorder.dtype)
        return begin

    def _make_taps(
        self, taps: Sequence[Value], capacity: int
    ) -> list[tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """(index of an operation, source, destination) for each tap, sorted by index. Before that operation runs, the
        rows of the source are copied to the destination. Both are bytes [capacity, ...]."""
        width = taps[0].width if taps else 0
        size = width * self._recorder.dtype.itemsize
        self.tapped = _buffer(capacity if taps else 1, max(1, len(taps) * width), self._recorder.dtype)
        """[T, number of taps * width]: the activations ``taps`` of the newest step, next to each other in each row. The
        next step overwrites them."""
        into = self.tapped.view(torch.uint8).numpy()
        copies = []
        for i, tap in enumerate(taps):
            buffer = self._buffers[self.plan.buffer_of[tap]].view(torch.uint8).numpy()
            copies.append((self._index_after[tap], buffer[:, :size], into[:, i * size : (i + 1) * size]))
        return sorted(copies, key=lambda each: each[0])

    def _after_layer(self, layer: int) -> tuple[int, npt.NDArray[np.uint8]]:
        """(index of the operation after decoder layer ``layer``, bytes of the layer's result [T, ...]). ``layer`` must
        not be the last layer."""
        operations = enumerate(self.plan.ops)
        at = next((i for i, op in operations if op.kind == OpKind.QKV and op.fields["layer"] == layer + 1), 0) - 1
        if at < 0 or self.plan.ops[at].kind != OpKind.RMS_NORM:
            raise InvariantError(
                f"layer {layer + 1} does not begin with a norm and a matmul, so image rows cannot be added before it"
            )
        buffer = self._buffers[self.plan.buffer_of[self.plan.ops[at].inputs[0]]]
        return at, buffer.view(torch.uint8).numpy()

    @functools.cached_property
    def _index_after(self) -> dict[Value, int]:
        """Activation -> index of the operation after the one that computes it."""
        return {op.out: at + 1 for at, op in enumerate(self.plan.ops)}

    @functools.cached_property
    def _embedded(self) -> tuple[int, npt.NDArray[np.uint8]]:
        """(index of the operation after the embedding of tokens, bytes of its result [T, ...])."""
        at = next(i for i, op in enumerate(self.plan.ops) if op.kind == OpKind.EMBED)
        buffer = self._buffers[self.plan.buffer_of[self.plan.ops[at].out]]
        return at + 1, buffer.view(torch.uint8).numpy()

    def run_until(self, value: Value, step: StepBatch) -> None:
        """Compute the activation ``value`` of a step, and all operations before it."""
        self._run(step, 0, self._index_after[value])

    def rows_of(self, value: Value, count: int) -> Tensor:
        """First ``count`` rows of an activation after a run. They are valid if ``value`` is the output or one of
        ``others``; the next run overwrites them. The rows of an input (:meth:`Recorder.given`) are written here before
        a run."""
        return self._buffers[self.plan.buffer_of[value]][:count, : value.width]

    def _rows_of_output(self, count: int) -> Tensor:
        """View of the first ``count`` rows of the output. Views are cached, because creating one in torch touches much
        memory."""
        if self._num_rows != count:
            self._num_rows = count
            self._rows = self._output[:count]
        return self._rows

    def _run(self, step: StepBatch, at: int, end: int) -> None:
        """Run the program's operations ``at`` to ``end`` (excluded) for ``step``."""
        if step is not self._step:  # a step that was advanced in place has the same arrays
            self._adapter_rows = None
            if self._adapters is not None and step.adapters is not None:
                self._adapter_rows = self._adapters.rows_of(step.adapters)
            self._step, self._batch = step, lib.BatchStruct.of(step, self._adapter_rows)
        for tap, source, into in self._taps if self.captures else ():
            if at <= tap < end:
                self._advance(step, at, tap)
                into[: len(step.token_ids)] = source[: len(step.token_ids)]
                at = tap
        if self._keeps_routing:
            at = self._keep_routing(step, at, end)
        self._advance(step, at, end)

    def _keep_routing(self, step: StepBatch, at: int, end: int) -> int:
        """Run the operations from ``at`` to the last layer of experts before ``end``, and copy what each layer chose
        from the scratch memory, which the next layer overwrites. Returns the index of the next operation."""
        count = len(step.token_ids)
        if count > ROUTED_TOKENS and self._expert_counts is not None:
            raise InvariantError(f"a step of {count} tokens keeps its routing for the last {ROUTED_TOKENS} only")
        if at == 0:
            self.chosen.clear()
        for place in range(at, end):
            op = self._ops[place]
            if op.kind != OpKind.EXPERTS:
                continue
            self._advance(step, at, place + 1)
            at = place + 1
            experts = op.experts.contents
            # As ExpertScratch in csrc/cpu/experts.h: the logits [T, E] come first, then the choices [T, k].
            first = -(-4 * count * experts.num_experts // 64) * 64
            chosen = self._expert_scratch[first : first + 4 * count * experts.top_k].view(np.int32)
            self.chosen.append(chosen.reshape(count, experts.top_k).copy())
        return at

    def _advance(self, step: StepBatch, at: int, end: int) -> None:
        """Run operations ``at`` to ``end`` (excluded) of the step to which ``_batch`` points."""
        self._program.num_ops = end
        while at != end and (at := self._library.cl_run(self._pool.handle, self._program, self._batch, at)) != end:
            if self._comm is not None:
                self._comm.check(at)
            if not 0 <= at < end:
                raise InvariantError(f"the native kernels refused a step of {len(step.token_ids)} tokens ({at})")
            self._call_out(self.plan.ops[at], step)
            at += 1

    def head(
        self,
        weight: PackedMatrix,
        hidden: Tensor,
        token_rows: npt.NDArray[np.int32],
        rows: npt.NDArray[np.void],
        logits: Tensor | None,
        cap: float | None = None,
        adapters: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Multiply rows ``token_rows`` [R] of ``hidden`` [T, k] with an output head [V, k], and sample.

        ``rows`` [R] of :data:`~chairlift.kernels.cpu.library.SAMPLING_ROW` hold the sampling parameters and receive the
        results. ``logits`` is float32 scratch memory [S, V rounded up to 32] for the S rows that ``cl_needs_logits``
        selects. With a ``cap``, each logit s first becomes cap * tanh(s / cap). ``adapters`` [R] are the adapter
        numbers of the rows, 0 for none; None if no row has an adapter.
        """
        table_rows = None if adapters is None or self._adapters is None else self._adapters.rows_of(adapters)
        product = lib.OpStruct(n=weight.n, k=weight.k, cap=cap or 0.0)
        weight.point(product)
        code = self._library.cl_head(
            self._pool.handle,
            self._program,
            hidden.data_ptr(),
            hidden.stride(0),
            token_rows.ctypes.data,
            None if table_rows is None else table_rows.ctypes.data,
            len(token_rows),
            product,
            rows.ctypes.data,
            logits.data_ptr() if logits is not None else None,
            len(logits) if logits is not None else 0,
        )
        if code < 0:
            raise InvariantError(f"the native output head refused {len(token_rows)} rows ({code})")

    def logits(
        self,
        weight: PackedMatrix,
        hidden: Tensor,
        token_rows: npt.NDArray[np.int32],
        into: Tensor,
        cap: float | None,
        adapters: npt.NDArray[Any] | None = None,
    ) -> None:
        """Multiply rows ``token_rows`` [R] of ``hidden`` with this process's rows of an output head, and write the
        logits to their columns of ``into``, float32 [at least R, V rounded up to 32]. See :meth:`head`."""
        product = lib.OpStruct(n=weight.n, k=weight.k, cap=cap or 0.0)
        weight.point(product)
        first = 0 if weight.kept is None else weight.kept.first
        table_rows = None if adapters is None or self._adapters is None else self._adapters.rows_of(adapters)
        code = self._library.cl_logits(
            *(self._pool.handle, self._program, hidden.data_ptr(), hidden.stride(0), token_rows.ctypes.data),
            *(None if table_rows is None else table_rows.ctypes.data, len(token_rows), product),
            *(into.data_ptr() + 4 * first, into.stride(0)),
        )
        if code < 0:
            raise InvariantError(f"the native output head refused {len(token_rows)} rows ({code})")

    def sample(self, logits: npt.NDArray[np.float32], vocab_size: int, rows: npt.NDArray[np.void]) -> None:
        """Sample ``rows`` [R], as in :meth:`head`, from given logits [R, ``vocab_size`` rounded up to 32]."""
        isa = self._program.isa
        code = self._library.cl_sample(
            self._pool.handle, logits.ctypes.data, logits.shape[1], len(logits), vocab_size, rows.ctypes.data, isa
        )
        if code < 0:
            raise InvariantError(f"the native sampler refused {len(logits)} rows ({code})")

    def refresh(self) -> None:
        """Update converted copies after the recorded model's weights were replaced in place.

        Packed weights, their biases, and plain tensors in the program's dtype need no update: the program reads them
        directly.
        """
        for copy, weight, offset in self._converted:
            copy.copy_(weight).add_(offset)

    def _op(self, op: FusedOp) -> lib.OpStruct:
        """The C struct of a fused operation. The objects to which it points are kept alive."""
        buffers = [self.plan.buffer_of.get(value, -1) for value in op.inputs] if op.call is None else []
        source, aux = [*buffers, -1, -1][:2]
        struct = lib.OpStruct(
            kind=op.kind,
            in_=source,
            out=self._view(self.plan.buffer_of.get(op.out, -1), op.column),
            aux=self._view(aux, op.column) if _reads_own_columns(op) else aux,
            rotary=-1 if op.rotary is None else self._rotary[op.rotary],
            **op.fields,
        )
        if op.part:
            struct.layer = self._parts[op.fields["layer"], op.part]
        if op.kind == OpKind.ROTARY:
            struct.layer = self._rotary[op.out]
        if isinstance(op.weight, PackedMatrix):
            self._referenced.append(op.weight)
            op.weight.point(struct)
        elif op.weight is not None:
            # An embedding table keeps its dtype. The kernels read norms and frequencies as float32.
            dtype = self._recorder.dtype if op.kind == OpKind.EMBED else torch.float32
            struct.weight = self._keep(op.weight, dtype, op.norm_offset)
        if op.experts is not None and isinstance(op.weight, PackedMatrix):
            struct.experts = ctypes.pointer(self._experts(op.weight, **op.experts))
        if op.bias is not None:
            struct.bias = self._keep(op.bias, torch.float32)
        if op.sinks is not None:
            struct.sinks = self._keep(op.sinks, torch.float32)
        struct.q_norm, struct.k_norm = (
            None if norm is None else self._keep(norm, torch.float32, op.norm_offset) for norm in (op.q_norm, op.k_norm)
        )
        return struct

    def _view(self, buffer: int, column: int) -> int:
        """Number of the view of a buffer from ``column`` on: the buffer's own number for column 0."""
        if buffer < 0 or column == 0:
            return buffer
        return self._views.setdefault((buffer, column), len(self._buffers) + len(self._views))

    def _experts(
        self,
        first: PackedMatrix,
        down: PackedMatrix,
        router: Tensor,
        routing: Routing,
        correction: Tensor | None = None,
        shared_gate: Tensor | None = None,
        router_bias: Tensor | None = None,
        clamp: tuple[float, float] | None = None,
        gated: bool = True,
        routed_width: int = 0,
        **_: Any,
    ) -> lib.Experts:
        """Struct of an ``ops.experts`` operation, without scratch memory. The arguments are those of ``ops.experts``,
        from its first weight on.

        Biases of the experts belong to the packed weights.
        """
        alpha, limit = clamp or (0.0, 0.0)
        self._referenced.append(down)
        return lib.Experts(
            num_experts=routing.num_experts,
            top_k=routing.top_k,
            inner=down.k,
            scoring=SCORINGS.index(routing.scoring),
            normalise=routing.normalise,
            groups=routing.groups,
            kept_groups=routing.kept_groups,
            group_score=GROUP_SCORES.index(routing.group_score),
            down_format=down.format,
            down_group=down.group,
            epsilon=routing.epsilon,
            scale=routing.scale,
            alpha=alpha,
            limit=limit,
            activation=Activation.NONE if gated else Activation.RELU_SQUARED,
            routed_k=routed_width,
            down_n=down.n,
            inner_first=0 if first.kept is None else first.kept.first,
            router=self._keep_padded(router),
            correction=None if correction is None else self._keep(correction, torch.float32),
            shared_gate=None if shared_gate is None else self._keep_padded(shared_gate),
            down=down.memory.address,
            router_bias=None if router_bias is None else self._keep(router_bias, torch.float32),
            down_bias=None if down.bias is None else down.bias.data_ptr(),
        )

    @property
    def expert_counts(self) -> npt.NDArray[np.int64] | None:
        """int64 [layers of experts, E]: number of tokens that each expert has computed so far. The kernels increment
        this array. None without experts."""
        return self._expert_counts

    def _expert_memory(self, keeps_routing: bool) -> npt.NDArray[np.int64] | None:
        """Allocate scratch memory for layers of experts, and their counts. Layers run one at a time and share the
        scratch memory."""
        self._keeps_routing = keeps_routing
        self.chosen: list[npt.NDArray[np.int32]] = []
        """int32 [T, k] for each layer of experts: the experts that each token of the newest step chose, best first.
        Only with ``keeps_routing``, and then steps have at most :data:`ROUTED_TOKENS` tokens."""
        ops = [op for op in self._ops if op.kind == OpKind.EXPERTS]
        for op in ops:
            op.experts.contents.lora_stride = self._adapters.stride if self._adapters is not None and op.site else 0
        self._share_inner()
        sizes = [self._library.cl_expert_bytes(op, self._program.dtype, self._max_tokens) for op in ops]
        if sizes:
            memory = lib.Memory(max(sizes))
            self._referenced.append(memory)
            self._expert_scratch = memory.tensor(torch.uint8, (max(sizes),)).numpy()
            for op in ops:
                op.experts.contents.scratch = memory.address
        layers = [op.experts.contents for op in self._ops if op.kind == OpKind.EXPERTS]
        if not layers:
            return None
        counts = np.zeros((len(layers), max(each.num_experts for each in layers)), dtype=np.int64)
        for layer, row in zip(layers, counts, strict=True):
            layer.load = row.ctypes.data
        return counts

    def _share_inner(self) -> None:
        """Allocate memory for the activations of experts that several processes share. Layers run one at a time and
        share it."""
        comm, itemsize = self._comm, self._recorder.dtype.itemsize
        parts = [op for op in self.plan.ops if op.kind == OpKind.EXPERTS and _is_part(op.weight)]
        if comm is None or not parts:
            return
        structs = [op.experts.contents for op in self._ops if op.kind == OpKind.EXPERTS]
        tokens = min(self._max_tokens, ROUTED_TOKENS)
        sizes = [(tokens * each.top_k + SPARE_ROWS) * _stride(each.inner, itemsize) for each in structs]
        memory = comm.tensor(self._recorder.dtype, (max(sizes),))
        self._referenced.append(memory)
        for struct, op in zip(structs, (op for op in self.plan.ops if op.kind == OpKind.EXPERTS), strict=True):
            struct.shared_inner = memory.data_ptr() if _is_part(op.weight) else None

    def _keep_padded(self, weight: Tensor) -> int:
        """Address of a weight [n, k] in the program's dtype, whose rows are padded with zeros as the rows of
        activations are."""
        n, k = weight.shape
        whole = torch.zeros(n, -(-k // PANEL) * PANEL, dtype=self._recorder.dtype)
        rows = whole[:, :k]
        rows.copy_(weight.detach())
        self._referenced.append(whole)
        self._converted.append((rows, weight.detach(), 0.0))
        return whole.data_ptr()

    def _codes(self, capacity: int) -> int | None:
        """Address of the buffer for activations rounded to 8 bits, the inputs of matmuls with codes. None if there are
        no such matmuls."""
        products = [op for op in self.plan.ops if op.kind != OpKind.EXPERTS]  # experts have scratch memory of their own
        widths = [op.weight.k for op in products if isinstance(op.weight, PackedCodes)]
        if not widths:
            return None
        memory = lib.Memory(capacity * self._library.cl_code_bytes(max(widths)))
        self._referenced.append(memory)
        return memory.address

    def _keep(self, tensor: Tensor, dtype: torch.dtype, offset: float = 0.0) -> int:
        """Address of a contiguous copy of ``tensor + offset`` in ``dtype``. The copy exists as long as the program."""
        copy = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        copy = copy + offset if offset else copy
        self._referenced.append(copy)
        if copy.data_ptr() != tensor.data_ptr():
            self._converted.append((copy, tensor.detach(), offset))
        return copy.data_ptr()

    def _call_out(self, op: FusedOp, step: StepBatch) -> None:
        if op.call is None:
            raise InvariantError(f"the native kernels stopped at {op.kind.name}, although they have a kernel for it")
        num_tokens = len(step.token_ids)
        given = [self._argument(value, step) for value in op.inputs]
        with torch.inference_mode():
            result = self._recur(op.call, step, given) if op.call.op is recurrence else op.call.compute(*given)
        if not isinstance(result, Tensor) or result.shape != (num_tokens, op.out.width):
            shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise InvariantError(f"{op.call.op.name} returned {shape}, but its definition says [T, {op.out.width}]")
        rows = self._buffers[self.plan.buffer_of[op.out]][:num_tokens]
        rows[:, : op.out.width] = result
        rows[:, op.out.width :] = 0  # matmuls read the padding, which may contain NaN of an earlier row

    def _recur(self, node: Node, step: StepBatch, given: Sequence[Tensor]) -> Tensor:
        """Compute a recurrent layer in plain torch. It reads and writes the states that native kernels use, too."""
        layer = node.attributes["layer"]
        cell = node.attributes["cell"]
        group, span = self._state_layers[layer]
        tables = step.block_tables[group].tolist()
        pieces = plan_pieces(step.cu_seqlens.tolist(), step.seq_lens.tolist(), tables, span)
        return recur_paged(cell, tuple(given), self._states[layer], pieces)

    def _argument(self, value: Value, step: StepBatch) -> Tensor:
        if value.role == "rows":
            return self._buffers[self.plan.buffer_of[value]][: len(step.token_ids), : value.width]
        array = step.token_ids if value.role == "token_ids" else step.positions
        return torch.from_numpy(array.astype(np.int64))


def _is_part(weight: Any) -> bool:
    """Whether other processes have some of the weight's outputs."""
    return isinstance(weight, PackedMatrix) and weight.kept is not None


def _reads_own_columns(op: FusedOp) -> bool:
    """Whether a process reads only the columns of the second input that it computes itself."""
    return op.kind == OpKind.LINEAR or (op.experts is not None and not op.experts["routed_width"])


def _stride(width: int, itemsize: int) -> int:
    """Distance between two rows in elements, including padding. In bytes it is never a multiple of 1 KiB, which would
    map many rows to the same cache sets."""
    stride = -(-width // PANEL) * PANEL
    return stride + 512 // itemsize if stride * itemsize % 1024 == 0 else stride


def _add_rows(into: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8], dtype: torch.dtype) -> None:
    """Add ``rows`` to ``into`` in place. Both have the same shape, and hold float32 or bfloat16 numbers as bytes.

    numpy computes the sum, because torch would start threads that spin on the pool's processors.
    """
    if dtype == torch.float32:
        numbers = into.view(np.float32)
        numbers += np.ascontiguousarray(rows).view(np.float32)
        return
    halves = into.view(np.uint16)
    wide = [
        (each.astype(np.uint32) << 16).view(np.float32) for each in (halves, np.ascontiguousarray(rows).view(np.uint16))
    ]
    bits = (wide[0] + wide[1]).view(np.uint32)
    halves[:] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even


def _buffer(rows: int, stride: int, dtype: torch.dtype) -> Tensor:
    return lib.Memory(rows * stride * dtype.itemsize).tensor(dtype, (rows, stride))
