"""A model run by the Triton kernels on one GPU: one copy in, one launch list or graph, one read of the tokens.

Steps in which every row computes one token and samples are padded to one of a few sizes, over buffers at fixed
addresses, so that a CUDA graph can replay them. All others run launch by launch. Sampling is part of the step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.executor.device_sampling import SlotSettings, failures
from chairlift.executor.kv_tensors import KVPlan
from chairlift.executor.model_runner import TorchModelRunner
from chairlift.executor.step_buffer import StepBuffer
from chairlift.executor.step_graph import CudaGraphs, EagerSteps, Graph, GraphMaker, graph_sizes, padded_size
from chairlift.kernels import recording
from chairlift.kernels.triton.launch import AttentionLaunch, attention_launch
from chairlift.kernels.triton.program import PagedKV, StepTensors, TritonProgram
from chairlift.kernels.triton.sampling import SamplingSettings, kept_ids, sample
from chairlift.models.causal_lm import CausalLM
from chairlift.models.flat_batch import FlatBatch, SampledTokens

__all__ = ["TritonModelRunner"]

_INTERPRETED = 2
"""Multiprocessors that the interpreter stands for: few, and enough that small batches split their keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Inputs:
    """What a step reads, all on the device."""

    step: StepTensors
    ends: Tensor | None
    """int32 [R], the tokens whose logits are wanted; None: all of them."""
    slots: Tensor
    """int32 [R], each row's place in ``settings``; -1 draws nothing."""
    lengths: Tensor
    """int32 [R], the positions of the new tokens."""
    settings: SamplingSettings


@dataclasses.dataclass(frozen=True, slots=True)
class _Outputs:
    hidden: Tensor
    """[T, D]"""
    logits: Tensor | None
    """[R, V] where a row may have to be drawn by the sampler that knows everything."""
    drawn: Tensor | None
    """int32 [R, 3]: token, and the bits of what :func:`~chairlift.executor.device_sampling.failures` reads."""


class TritonModelRunner(TorchModelRunner):
    """Runs a :class:`~chairlift.models.causal_lm.CausalLM` with plain weights on a CUDA device, or interpreted.

    ``graphs`` is ``lazy`` (a size is recorded when it is first needed), ``start`` (the sizes of steps without min-p,
    top-k and top-p are recorded here) or ``off``. The tokens are the same either way.
    """

    def __init__(
        self,
        model: CausalLM,
        plan: KVPlan,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_slots: int,
        max_model_len: int,
        graphs: str,
    ) -> None:
        super().__init__(model, plan, dtype, device)
        cuda = device.type == "cuda"
        if device.index is not None:
            torch.cuda.set_device(device)
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else _INTERPRETED
        recorder = recording.Recorder(dtype)
        self._token_ids, self._positions = recorder.token_ids, recorder.positions
        hidden: Any = model(recorder.token_ids, recorder.positions, recorder)
        body = len(recorder.nodes)
        logits: Any = model.compute_logits(hidden)
        self._hidden, kv = hidden, PagedKV(self._kv_caches, plan.layer_groups)
        self._body = TritonProgram(recorder.nodes[:body], hidden, kv, device, self._multiprocessors)
        self._head = TritonProgram(recorder.nodes[body:], logits, kv, device, self._multiprocessors)
        self._settings = SlotSettings(num_slots, model.config.vocab_size)
        shape = (num_slots, -(-max_model_len // plan.block_size))
        self._block_tables = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in plan.groups]
        self._sent_tables = [np.zeros(shape, dtype=np.int32) for _ in plan.groups]
        self._sizes = graph_sizes(num_slots)
        self._buffer = StepBuffer(device)
        self.graphs: GraphMaker = CudaGraphs(device) if cuda and graphs != "off" else EagerSteps()
        self._decodes: dict[tuple[int, bool, bool], tuple[StepBuffer, Graph[_Outputs]]] = {}
        if cuda and graphs == "start":
            for size in self._sizes:
                self._decode(self._padding(size), truncates=False, keep=False)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch) -> _Outputs:
        """Compute a step and draw its tokens; nothing waits for the device."""
        if self._device.index is not None:
            torch.cuda.set_device(self._device)  # Triton launches where the calling thread is
        self._move_blocks(batch)
        self._send_tables(batch)
        num_rows, slots = len(batch.slots), batch.slots[batch.sample_rows]
        self._settings.update(slots.tolist(), [batch.sampling[row] for row in batch.sample_rows])
        truncates = bool((self._settings.truncates & self._settings.on_device)[slots].any())
        if len(slots) == num_rows == len(batch.token_ids):
            keep = not self._settings.on_device[slots].all()
            return self._decode(self._pad(batch, padded_size(self._sizes, num_rows)), truncates, bool(keep))
        tensors = self._buffer.send(
            [
                batch.token_ids,
                batch.positions,
                batch.seq_lens,
                batch.slots,
                *batch.slot_mapping,
                *self._sampling(batch, len(slots)),
                batch.cu_seqlens,
                batch.cu_seqlens[batch.sample_rows + 1] - 1,
            ]
        )
        *tensors, cu_seqlens, ends = tensors
        return self._compute(self._inputs(tensors, cu_seqlens, ends), self._launch(num_rows, False), truncates, True)

    @torch.inference_mode()
    def sample(self, hidden: _Outputs, batch: FlatBatch, masks: Any) -> SampledTokens:
        """Read the tokens; draw those of rows that ask for what the kernels do not know."""
        tokens, count = SampledTokens([]), len(batch.sample_rows)
        if hidden.drawn is not None:
            drawn = hidden.drawn[:count].cpu().numpy()
            known = self._settings.on_device[batch.slots[batch.sample_rows]]
            tokens.token_ids = drawn[:, 0].tolist()
            rest = range(count) if masks is not None else np.flatnonzero(~known).tolist()
            tokens.errors = {row: reason for row, reason in failures(drawn).items() if row not in rest}
            if rest:
                self._draw_rest(hidden, list(rest), batch, masks, tokens)
        self._score_prompts(hidden.hidden, batch, tokens)
        return tokens

    def describe_graphs(self) -> str:
        """What was recorded until now, in words; empty without graphs."""
        if not isinstance(self.graphs, CudaGraphs):
            return ""
        return f"{self.graphs.num_graphs} recorded, {self.graphs.num_bytes / 2**20:,.0f} MiB, others when first needed"

    def _draw_rest(self, step: _Outputs, rest: list[int], batch: FlatBatch, masks: Any, tokens: SampledTokens) -> None:
        histories = batch.histories
        if step.logits is None:  # only a mask, which the step could not foresee, brings a decode step here
            logits = self._model.compute_logits(step.hidden[: len(batch.sample_rows)])
        else:
            logits = step.logits.index_select(0, torch.tensor(rest, device=step.logits.device))
        rows = [batch.sampling[batch.sample_rows[i]] for i in rest]
        drawn = self._sampler(logits, rows, [histories[i] for i in rest], masks)
        logprobs: list[Any] = [None] * len(batch.sample_rows)
        for j, i in enumerate(rest):
            tokens.token_ids[i], logprobs[i] = drawn.token_ids[j], drawn.logprobs[j]
            if j in drawn.errors:
                tokens.errors[i] = drawn.errors[j]
        tokens.logprobs = logprobs if any(entry is not None for entry in logprobs) else None

    def _decode(self, arrays: list[npt.NDArray[Any]], truncates: bool, keep: bool) -> _Outputs:
        """One token of each row, ``arrays`` being padded to one of the sizes."""
        size = len(arrays[0])
        key = (size, truncates, keep)
        found = self._decodes.get(key)
        if found is not None:
            found[0].send(arrays)
            return found[1].replay()
        buffer = StepBuffer(self._device)
        inputs = self._inputs(buffer.send(arrays), None, None)
        step = functools.partial(self._compute, inputs, self._launch(size, True), truncates, keep)
        self._decodes[key] = buffer, (graph := self.graphs.record(step))
        return graph.replay()

    def _compute(self, inputs: _Inputs, launch: AttentionLaunch, truncates: bool, keep: bool) -> _Outputs:
        """A step and its tokens. Logits are kept on demand: those of every recorded size would fill gigabytes."""
        given = {self._token_ids: inputs.step.token_ids, self._positions: inputs.step.positions}
        hidden = self._body.run(given, inputs.step, launch)
        if not len(inputs.slots):
            return _Outputs(hidden, None, None)
        wanted = hidden if inputs.ends is None else hidden.index_select(0, inputs.ends)
        logits = self._head.run({self._hidden: wanted})
        kept = kept_ids(logits, inputs.settings, inputs.slots) if truncates else None
        tokens, failing = sample(logits, inputs.settings, inputs.slots, inputs.lengths, kept)
        drawn = torch.cat((tokens[:, None], failing.view(torch.int32)), dim=1)
        return _Outputs(hidden, logits if keep else None, drawn)

    def _inputs(self, tensors: Sequence[Tensor], cu_seqlens: Tensor | None, ends: Tensor | None) -> _Inputs:
        """``tensors`` in the order in which :meth:`forward` sends them."""
        groups = len(self.cache_groups)
        token_ids, positions, seq_lens, table_rows, *rest = tensors
        mapping, (slots, lengths, *settings) = rest[:groups], rest[groups:]
        step = StepTensors(token_ids, positions, seq_lens, cu_seqlens, table_rows, self._block_tables, mapping)
        return _Inputs(step, ends, slots, lengths, SamplingSettings(*settings))

    def _sampling(self, batch: FlatBatch, size: int) -> list[npt.NDArray[Any]]:
        """Rows' places in the settings (-1: drawn elsewhere, or nobody), new positions, and the settings."""
        slots, count = batch.slots[batch.sample_rows], len(batch.sample_rows)
        places = np.full(size, -1, dtype=np.int32)
        places[:count] = np.where(self._settings.on_device[slots], np.arange(count), -1)
        lengths = _padded(batch.seq_lens[batch.sample_rows], size)
        return [places, lengths, *(_padded(array, size) for array in self._settings.arrays(slots))]

    def _pad(self, batch: FlatBatch, size: int) -> list[npt.NDArray[Any]]:
        """A decode step's arrays with ``size`` rows; those that only fill up have length 0 and write nowhere."""
        return [
            *(_padded(array, size) for array in (batch.token_ids, batch.positions, batch.seq_lens, batch.slots)),
            *(_padded(mapping, size, -1) for mapping in batch.slot_mapping),
            *self._sampling(batch, size),
        ]

    def _padding(self, size: int) -> list[npt.NDArray[Any]]:
        """A decode step of nobody."""
        none = np.zeros(0, dtype=np.int32)
        mapping, tokens = [none.astype(np.int64) for _ in self.cache_groups], np.zeros((1, 1), dtype=np.int32)
        batch = FlatBatch(none, none, none, none, none, [], mapping, [], none, tokens, [], [], [], [])
        return self._pad(batch, size)

    def _send_tables(self, batch: FlatBatch) -> None:
        """Bring the block tables on the device, a line per slot, up to date: only what differs is sent."""
        for table, sent, rows in zip(self._block_tables, self._sent_tables, batch.block_tables, strict=True):
            row, column = np.nonzero(sent[batch.slots, : rows.shape[1]] != rows)
            if len(row):
                lines, blocks = batch.slots[row], rows[row, column]
                places, values = self._buffer.send([lines.astype(np.int64) * sent.shape[1] + column, blocks])
                table.view(-1).index_copy_(0, places, values)
                sent[lines, column] = blocks

    def _launch(self, num_rows: int, decode_only: bool) -> AttentionLaunch:
        keys = self._kv_caches[0][0]
        config = self._model.config
        return attention_launch(
            head_dim=config.head_dim,
            group=config.num_attention_heads // config.num_key_value_heads,
            num_kv_heads=config.num_key_value_heads,
            max_rows=num_rows,
            decode_only=decode_only,
            num_multiprocessors=self._multiprocessors,
            itemsize=keys.dtype.itemsize,
        )


def _padded(array: npt.NDArray[Any], size: int, value: int = 0) -> npt.NDArray[Any]:
    out = np.full(size, value, dtype=array.dtype)
    out[: len(array)] = array
    return out
