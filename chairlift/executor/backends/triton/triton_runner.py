"""Runs a model with the Triton kernels on one GPU. A step is a list of kernel launches, or one CUDA graph.

A step in which every row computes and samples one token reads and updates the state on the device. It is padded to one
of a few sizes, so that a CUDA graph can be replayed. A step with prompt chunks is also a graph, except for its
sampling, unless it has so many tokens that the GPU takes longer than the host. The next step reads the sampled tokens
on the device, so the host may start it before it knows the tokens. All work is queued on one stream, so each step sees
the results of the previous step.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.step_batch import Masks, SampledTokens, StepBatch
from chairlift.config import LoRAConfig
from chairlift.executor.backends.torch.model_runner import TorchModelRunner
from chairlift.executor.backends.torch.step_buffer import ReturnBuffers, StepBuffer
from chairlift.executor.backends.triton.device_sampling import SlotSettings, failures
from chairlift.executor.backends.triton.step_graph import (
    CudaGraphs,
    EagerSteps,
    Graph,
    GraphMaker,
    graph_sizes,
    padded_size,
    token_sizes,
)
from chairlift.executor.backends.triton.step_shares import StepShares
from chairlift.executor.kv_tensors import KVPlan
from chairlift.kernels import recording
from chairlift.kernels.triton.decode_state import DecodeInputs, DecodeState
from chairlift.kernels.triton.launch import AttentionLaunch, attention_launch, num_multiprocessors
from chairlift.kernels.triton.operations import LINEARS
from chairlift.kernels.triton.paged_attention import SharedTiles
from chairlift.kernels.triton.program import PagedKV, StepTensors, TritonProgram
from chairlift.kernels.triton.sampling import SamplingSettings, kept_ids, sample
from chairlift.lora.device_bank import DeviceAdapters
from chairlift.models.causal_lm import CausalLM

__all__ = ["DecodeKind", "TritonModelRunner"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Slots = npt.NDArray[np.int32]


class DecodeKind(NamedTuple):
    """A kind of decode steps: one graph serves all of them."""

    size: int
    """Number of rows, with padding."""
    truncates: bool
    """Whether min-p, top-k or top-p are applied."""
    keep: bool
    """Whether the logits are kept."""
    adapted: bool
    """Whether rows may have adapters."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Outputs:
    hidden: Tensor
    """Hidden states of the step's tokens, [T, D]."""
    logits: Tensor | None
    """Logits [P, V] if the full sampler may be needed for a row; otherwise None."""
    drawn: Tensor | None
    """int32 [P, 3]: the token, and the bits that :func:`~chairlift.executor.backends.triton.device_sampling.failures`
    reads. None if the step has no sample position."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Drawn:
    """Tokens of a step that was sampled completely on the device. The tokens are being copied to the host."""

    read: Callable[[], npt.NDArray[np.int32]]

    def result(self) -> SampledTokens:
        drawn = self.read()
        return SampledTokens(drawn[:, 0].tolist(), errors=failures(drawn))


class TritonModelRunner(TorchModelRunner):
    """Runs a :class:`~chairlift.models.causal_lm.CausalLM` with unpacked weights on a CUDA device, or in Triton's
    interpreter.

    ``graphs`` is ``lazy`` (a size is recorded at its first use), ``start`` (all sizes are recorded in the constructor,
    except decode steps with min-p, top-k or top-p) or ``off``. The tokens are the same in all cases. With
    ``batch_invariant``, every operation has a single implementation for all batches, so that the bits of a request do
    not depend on other requests. Raises ConfigError if an operation has no such implementation. With ``lora``, rows may
    have adapters.
    """

    def __init__(
        self,
        model: CausalLM,
        plan: KVPlan,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_slots: int,
        max_tokens: int,
        max_model_len: int,
        graphs: str,
        batch_invariant: bool = False,
        lora: LoRAConfig | None = None,
    ) -> None:
        super().__init__(model, plan, dtype, device)
        self.repeats = False  # the rows on the device may be those of the failed step
        self._network = model.config
        self._dtype = dtype
        self._int8_kv = plan.dtype == torch.int8
        cuda = device.type == "cuda"
        if device.index is not None:
            torch.cuda.set_device(device)
        self.runs_ahead = cuda
        """Whether the device computes a step while the host prepares the next one."""
        self._multiprocessors = num_multiprocessors(device)
        recorder = recording.Recorder(dtype)
        self._token_ids = recorder.token_ids
        self._positions = recorder.positions
        hidden: Any = model(recorder.token_ids, recorder.positions, recorder)
        body = len(recorder.nodes)
        logits: Any = model.compute_logits(hidden)
        self._hidden, kv = hidden, PagedKV(self._kv_caches, plan.layer_groups, self._state_spans)
        self._batch_invariant = batch_invariant
        self._pool: DeviceAdapters | None = None
        if lora is not None:
            multiplied = {id(node.attributes["weight"]) for node in recorder.nodes if node.op in LINEARS}
            sizes = {"max_rank": lora.max_lora_rank, "capacity": lora.max_loras}
            self._pool = self.adapters = DeviceAdapters(model, dtype, device, multiplied=multiplied, **sizes)
        sites = None if self._pool is None else self._pool.sites
        how = (kv, device, self._multiprocessors, batch_invariant, sites)
        self._body = TritonProgram(recorder.nodes[:body], hidden, *how)
        self._head = TritonProgram(recorder.nodes[body:], logits, *how)
        self.calls = list(dict.fromkeys((*self._body.calls, *self._head.calls)))
        """Names of the operations without a Triton kernel, which PyTorch computes."""
        self._settings = SlotSettings(num_slots, model.config.vocab_size)
        max_blocks = -(-max_model_len // plan.block_size)
        self._state = DecodeState(num_slots, max_blocks, len(plan.groups), plan.block_size, device)
        self._sizes = graph_sizes(num_slots)
        self._buffer = StepBuffer(device)
        self._returns = ReturnBuffers((max(num_slots, max_tokens), 3), torch.int32, device)
        self.graphs: GraphMaker = CudaGraphs(device) if cuda and graphs != "off" else EagerSteps()
        self._decodes: dict[DecodeKind, tuple[DecodeInputs, Graph[_Outputs]]] = {}
        self._shares = StepShares(plan, model.config, self._multiprocessors, device)
        self._shared_decodes: dict[DecodeKind, tuple[DecodeInputs, Graph[_Outputs]]] = {}
        self.reads_shared_once = self._shares.can_share(self._launch(num_slots, True))
        """Whether decode rows may read the K and V of shared blocks together."""
        self._bodies: dict[tuple[int, bool], tuple[StepBuffer, Graph[Tensor]]] = {}
        """(Number of tokens, whether rows may have adapters) -> (buffer for the inputs, graph)."""
        self._token_sizes = token_sizes(max_tokens)
        self._row_offsets = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        """Offsets of the rows of a decode step."""
        self._kept_logits = torch.empty(0, dtype=dtype, device=device)
        if batch_invariant and model.config.vocab_size % 4:
            self._prompt_rows = 1  # PyTorch's order of summation depends on the layout of rows
        if cuda and graphs == "start":
            for adapted in (False,) if lora is None else (False, True):
                for size in reversed(self._token_sizes):
                    self._recorded_body(size, adapted)
                for size in reversed(self._sizes):  # smaller graphs reuse memory of the larger ones
                    self._recorded(DecodeKind(size, truncates=False, keep=False, adapted=adapted))

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> _Outputs:
        """Compute a step and sample its tokens, without waiting for the device."""
        if self._device.index is not None:
            torch.cuda.set_device(self._device)  # Triton launches on the current device of the calling thread
        num_rows = len(batch.slots)
        slots = batch.sample_slots
        for group, tables in enumerate(batch.block_tables):
            self._state.note_tables(group, batch.slots, tables)
        changed = self._settings.update(slots.tolist(), [batch.sampling[row] for row in batch.sample_rows])
        if changed:
            changed_slots = np.array(changed, dtype=np.int32)
            for field, values in zip(
                dataclasses.fields(SamplingSettings), self._settings.arrays(changed_slots), strict=True
            ):
                self._state.note(field.name, changed_slots, values)
        truncates = bool(self._settings.truncates[slots].any())
        adapters = None
        if self._pool is not None and batch.adapters is not None:
            adapters = self._pool.place(batch.adapters)
        if len(slots) == num_rows == len(batch.token_ids):
            keep = not self._settings.on_device[slots].all()
            kind = DecodeKind(padded_size(self._sizes, num_rows), truncates, bool(keep), adapters is not None)
            outputs = self._decode(batch, kind, adapters)
        else:
            self._state.flush()
            self._state.forget(slots)
            outputs = self._mixed(batch, truncates, adapters)
        if self._pool is not None:
            self._pool.queued()
        return outputs

    @torch.inference_mode()
    def sample(self, hidden: _Outputs, batch: StepBatch, masks: Masks | None) -> SampledTokens | _Drawn:
        """Pending tokens. If a row uses parameters that the kernels do not support, the tokens of the step are read,
        and the row is sampled on the host.

        Such a row is sampled on the host in every step, so the host knows all its earlier tokens.
        """
        tokens = SampledTokens([])
        masks = masks or {}
        if hidden.drawn is not None:
            known = self._settings.on_device[batch.sample_slots]
            if masks:
                known[list(masks)] = False
            rest = np.flatnonzero(~known).tolist()
            drawn = _Drawn(self._returns.fetch(hidden.drawn[: len(known)]))
            if not rest and not batch.prompt_rows:
                return drawn
            tokens = drawn.result()
            if rest:
                tokens.errors = {row: reason for row, reason in tokens.errors.items() if row not in rest}
                self._draw_rest(hidden, rest, batch, masks, tokens)
        self._score_prompts(hidden.hidden, batch, tokens)
        return tokens

    def describe_graphs(self) -> str:
        """Text about the CUDA graphs recorded so far; empty if there are none."""
        if not isinstance(self.graphs, CudaGraphs):
            return ""
        return f"{self.graphs.num_graphs} recorded, {self.graphs.num_bytes / 2**20:,.0f} MiB, others when first needed"

    def _draw_rest(
        self, step: _Outputs, rest: list[int], batch: StepBatch, masks: Masks, tokens: SampledTokens
    ) -> None:
        histories = batch.histories
        if self._pool is not None:
            self._pool.begin(None if batch.adapters is None else batch.adapters[batch.sample_tokens])
        # A decode step has no logits here only if a mask was given. The mask was not known when the step was launched.
        whole = self._compute_logits(step.hidden[: len(batch.sample_rows)]) if step.logits is None else step.logits
        logits = whole.index_select(0, torch.tensor(rest, device=whole.device))
        logprobs: list[Any] = [None] * len(batch.sample_rows)
        # PyTorch's sums may depend on the number of rows and on their memory layout.
        size = 1 if self._batch_invariant else len(rest)
        for at in range(0, len(rest), size):
            some = rest[at : at + size]
            part = slice(at, at + size)
            rows = [batch.sampling[batch.sample_rows[i]] for i in some]
            scores = logits[part].clone() if self._batch_invariant else logits[part]
            masked = {j: masks[i] for j, i in enumerate(some) if i in masks}
            drawn = self._sampler(scores, rows, [histories[i] for i in some], masked)
            for j, i in enumerate(some):
                tokens.token_ids[i], logprobs[i] = drawn.token_ids[j], drawn.logprobs[j]
                if j in drawn.errors:
                    tokens.errors[i] = drawn.errors[j]
        tokens.logprobs = logprobs if any(entry is not None for entry in logprobs) else None

    def _decode(self, batch: StepBatch, kind: DecodeKind, adapters: _Slots | None) -> _Outputs:
        """Compute and sample one token of each row of ``batch``, padded to the rows of ``kind``. First the changes of
        the state are sent to the device. ``adapters`` [R]: slot of each row's adapter, if rows have some."""
        size = kind.size
        found = self._shares.find(batch, size, self._launch(size, True))
        step = self._recorded(kind, None if found is None else self._shares.send(size, found))
        state = self._state
        known = batch.token_ids >= 0
        rows = np.full(size, -1, dtype=np.int32)
        rows[: len(batch.slots)] = batch.slots
        state.note("tokens", batch.slots[known], batch.token_ids[known])
        state.note("num_computed", batch.slots, batch.positions)
        state.note("slots", np.arange(size), rows)
        if adapters is not None:
            state.note("adapters", batch.slots, adapters)
        state.flush()
        state.forget(batch.slots)  # after a failure in the middle it is unknown whether they advanced
        outputs = step.replay()
        state.advanced(batch.slots, batch.seq_lens)
        return outputs

    def _recorded(self, kind: DecodeKind, shared: Sequence[SharedTiles] | None = None) -> Graph[_Outputs]:
        """Graph of decode steps of a kind. ``shared``: what rows read together, which a replay reads from the same
        memory."""
        decodes = self._decodes if shared is None else self._shared_decodes
        size = kind.size
        if kind not in decodes:
            # Recording runs the step more than once. All rows of the recorded step are empty, so this changes no
            # request.
            self._state.note("slots", np.arange(size), np.full(size, -1))
            self._state.flush()
            inputs = self._state.inputs(size)
            launch = self._launch(size, True)
            if kind.keep and not len(self._kept_logits):  # all sizes share them, because only one runs at a time
                self._kept_logits = self._kept_logits.new_empty((self._sizes[-1], self._model.config.vocab_size))
            step = TritonModelRunner._decode_step
            decodes[kind] = inputs, self._record(f"{size} rows", step, inputs, launch, kind, shared)
        return decodes[kind][1]

    def _decode_step(
        self,
        inputs: DecodeInputs,
        launch: AttentionLaunch,
        kind: DecodeKind,
        shared: Sequence[SharedTiles] | None,
    ) -> _Outputs:
        """Decode step that a CUDA graph records. It reads its inputs from the state on the device, and writes the
        sampled tokens there, so it needs no input from the host."""
        state = self._state
        slots = self._state.slots[: len(inputs.token_ids)]
        state.begin_step(inputs)
        tables = state.block_tables
        mapping = inputs.slot_mapping.unbind()
        offsets = self._row_offsets[: len(slots) + 1]
        # With offsets, decode rows use the same compiled attention kernel as chunks.
        starts = offsets if self._batch_invariant else None
        adapters = inputs.adapters if kind.adapted else None
        where = (slots, tables, mapping, shared, offsets, adapters)
        step = StepTensors(inputs.token_ids, inputs.positions, inputs.seq_lens, starts, *where)
        hidden = self._run_body(step, launch)
        how = {"truncates": kind.truncates, "keep": kind.keep}
        outputs = self._draw(hidden, hidden, slots, inputs.seq_lens, slots, adapters, **how)
        if outputs.logits is None:
            return outputs
        return dataclasses.replace(outputs, logits=self._kept_logits[: len(slots)].copy_(outputs.logits))

    def _mixed(self, batch: StepBatch, truncates: bool, adapters: _Slots | None) -> _Outputs:
        """Compute a step that has prompt chunks. Its sampling is launched without a graph. ``adapters`` [T]: slot of
        each token's adapter, if tokens have some."""
        late = np.flatnonzero(batch.token_ids < 0)
        owners = np.searchsorted(batch.cu_seqlens, late, side="right") - 1
        tokens = len(batch.token_ids)
        sizes = self._token_sizes
        size = padded_size(sizes, tokens) if tokens <= sizes[-1] else 0
        buffer, body = self._recorded_body(size, adapters is not None) if size else (self._buffer, None)
        last = batch.cu_seqlens[batch.sample_rows + 1] - 1 == batch.sample_tokens
        slots = batch.sample_slots
        lengths = batch.sample_lengths
        newest = np.where(last, slots, -1)  # for a row with several sample positions, the last one gives the next input
        rest: list[npt.NDArray[Any]] = [late, batch.slots[owners], batch.sample_tokens, slots, lengths, newest]
        if adapters is not None:
            rest.append(adapters[batch.sample_tokens])
        step, (places, sources, wanted, *sampling) = self._send(buffer, batch, size, rest, adapters)
        if len(late):
            step.token_ids.index_copy_(0, places, self._state.tokens.index_select(0, sources))
        hidden = self._run_body(step, self._launch(len(batch.slots), False)) if body is None else body.replay()
        if not len(slots):
            return _Outputs(hidden, None, None)
        return self._draw(hidden, hidden.index_select(0, wanted), *sampling, truncates=truncates, keep=True)

    def _recorded_body(self, size: int, adapted: bool) -> tuple[StepBuffer, Graph[Tensor]]:
        """(buffer for the inputs, graph that computes them) of steps of up to ``size`` tokens, which may be
        ``adapted``."""
        largest = self._token_sizes[-1]
        if not self._bodies and size != largest and isinstance(self.graphs, CudaGraphs):
            self._recorded_body(largest, adapted)  # smaller graphs reuse its memory
        key = size, adapted
        if key not in self._bodies:
            groups = len(self._state.block_tables)
            none = np.zeros(0, dtype=np.int32)
            tables = np.zeros((groups, 0, 0), dtype=np.int32)
            mapping = np.zeros((groups, 0), dtype=np.int64)
            nobody = StepBatch(none, none, none, none, tables, mapping)
            buffer = StepBuffer(self._device)
            largest_input = np.zeros(max(size, self._state.num_slots), dtype=np.int64)
            # Use the largest possible inputs, so that the buffer never has to move.
            step, _ = self._send(buffer, nobody, size, [largest_input] * 7, none if adapted else None)
            launch = self._launch(self._state.num_slots, False)
            self._bodies[key] = buffer, self._record(f"{size} tokens", TritonModelRunner._run_body, step, launch)
        return self._bodies[key]

    def _record(self, size: str, method: Callable[..., _T], *arguments: Any) -> Graph[_T]:
        """Record ``method`` with these ``arguments`` as a graph. If there is not enough memory for the graph, the
        operations are launched again each time."""
        step = functools.partial(
            method, weakref.proxy(self), *arguments
        )  # a reference cycle would keep the GPU's memory
        try:
            return self.graphs.record(step)
        except torch.cuda.OutOfMemoryError:
            why = "no memory for a CUDA graph of steps of %s, which will be slower; lower gpu_memory_utilization"
            _log.warning(why, size)
        torch.cuda.empty_cache()
        return EagerSteps().record(step)

    def _send(
        self, buffer: StepBuffer, batch: StepBatch, size: int, rest: list[npt.NDArray[Any]], adapters: _Slots | None
    ) -> tuple[StepTensors, list[Tensor]]:
        """Copy the input of a step, with the slots of the tokens' ``adapters``, and the arrays ``rest`` to the device,
        and return both as tensors there. Unless ``size`` is 0, the step is padded to ``size`` tokens or rows."""
        tokens, rows = (size, self._state.num_slots) if size else (len(batch.token_ids), len(batch.slots))
        arrays: list[tuple[npt.NDArray[Any], int, int]] = [
            (batch.token_ids, tokens, 0),
            (batch.positions, tokens, 0),
            (batch.seq_lens, rows, 0),
            (batch.cu_seqlens, rows + 1, len(batch.token_ids)),
            (batch.slots, rows, 0),
            *((mapping, tokens, -1) for mapping in batch.slot_mapping),
        ]
        if adapters is not None:
            arrays.append((adapters, tokens, -1))
        filled = [np.append(array, np.full(length - len(array), fill, array.dtype)) for array, length, fill in arrays]
        token_ids, positions, seq_lens, cu_seqlens, slots, *others = buffer.send([*filled, *rest])
        tables = self._state.block_tables
        groups = len(batch.slot_mapping)
        mapping, own, rest_sent = others[:groups], others[groups : len(arrays) - 5], others[len(arrays) - 5 :]
        where = (token_ids, positions, seq_lens, cu_seqlens, slots, tables, mapping)
        return StepTensors(*where, adapters=own[0] if own else None), rest_sent

    def _run_body(self, step: StepTensors, launch: AttentionLaunch) -> Tensor:
        """Hidden states [T, D] of all tokens of ``step``."""
        return self._body.run({self._token_ids: step.token_ids, self._positions: step.positions}, step, launch)

    def _draw(
        self,
        hidden: Tensor,
        sample_hidden: Tensor,
        slots: Tensor,
        lengths: Tensor,
        newest: Tensor,
        adapters: Tensor | None = None,
        *,
        truncates: bool,
        keep: bool,
    ) -> _Outputs:
        """One token for each sample position. ``sample_hidden`` [P, D] has the hidden states of the sample positions.

        ``slots`` (int32 [P]) has their slots (-1 for padding), ``lengths`` (int32 [P]) the positions of the new tokens.
        ``newest`` (int32 [P]) has
        the slot that gets the token as its next input; -1 for none. ``adapters`` (int32 [P]) has the places of their
        adapters in the pool (-1 for none); None if no row has one. Logits are returned only with ``keep``, because
        each recorded graph would hold logits, which take gigabytes for all batch sizes.
        """
        logits = self._logits(sample_hidden, adapters)
        candidates = kept_ids(logits, self._state.sampling, slots) if truncates else None
        tokens, failing = sample(logits, self._state.sampling, slots, lengths, candidates)
        self._state.store(newest, tokens)
        drawn = torch.cat((tokens[:, None], failing.view(torch.int32)), dim=1)
        return _Outputs(hidden, logits if keep else None, drawn)

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows whose adapters :meth:`DeviceAdapters.begin` has set."""
        return self._logits(hidden, None if self._pool is None else self._pool.rows)

    def _logits(self, hidden: Tensor, adapters: Tensor | None) -> Tensor:
        return self._head.run({self._hidden: hidden}, None, None, adapters)

    def _launch(self, num_rows: int, decode_only: bool) -> AttentionLaunch:
        config = self._network
        return attention_launch(
            head_dim=config.head_dim,
            group=config.num_attention_heads // config.num_key_value_heads,
            num_kv_heads=config.num_key_value_heads,
            max_rows=num_rows,
            decode_only=decode_only and not self._batch_invariant,
            num_multiprocessors=self._multiprocessors,
            itemsize=self._dtype.itemsize,
            int8_kv=self._int8_kv,
        )
