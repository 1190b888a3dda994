"""Executor of models for embeddings, scores and classes: takes a batch of texts, returns one vector per text.

There is no KV cache and no padding: a forward pass is one flat batch of whole texts. The native kernels write K and V
into scratch memory, which the next pass overwrites; all layers of an encoder use the same scratch memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.step_batch import StepBatch
from chairlift.executor.backends.native.native_kv import NativeKV
from chairlift.executor.kv_tensors import plan_kv_cache
from chairlift.kernels.cpu.library import ThreadPool
from chairlift.kernels.cpu.program import StepProgram
from chairlift.kernels.recording import Recorder
from chairlift.models.context import PackedContext
from chairlift.models.encoder import EncoderBatch, EncoderNetwork, kernel_attention_cache
from chairlift.models.encoder_config import EncoderConfig
from chairlift.models.pooled_network import PooledNetwork

__all__ = ["NativePooledRunner", "PooledExecutor", "TorchPooledRunner"]

_BLOCK_SIZE = 16
_Int32 = npt.NDArray[np.int32]


class _Runner(Protocol):
    calls: Sequence[str]

    def hidden(self, batch: StepBatch, token_types: Tensor | None, kept: npt.NDArray[np.intp] | None) -> Tensor:
        """Hidden states [K, D] of the tokens with the indices ``kept``; or [T, D] of all tokens if ``kept`` is None."""


class TorchPooledRunner:
    """Runs the network in PyTorch on one device. The bits of a text's result may depend on other texts of its pass."""

    calls: Sequence[str] = ()

    def __init__(self, model: PooledNetwork, device: torch.device) -> None:
        self._model = model
        self._device = device

    def hidden(self, batch: StepBatch, token_types: Tensor | None, kept: npt.NDArray[np.intp] | None) -> Tensor:
        """Hidden states [K, D] of the tokens with the indices ``kept``; or [T, D] of all tokens if ``kept`` is None."""
        ids, positions = (
            torch.from_numpy(array.astype(np.int64)).to(self._device) for array in (batch.token_ids, batch.positions)
        )
        body, ctx = self._model.model, PackedContext(batch.cu_seqlens.tolist())
        if isinstance(body, EncoderNetwork):
            both = EncoderBatch()
            both.begin(batch.cu_seqlens.tolist(), None if token_types is None else token_types.to(self._device))
            found: Tensor = body(ids, positions, both)
        else:
            found = body(ids, positions, ctx)
        return found if kept is None else found[torch.from_numpy(kept).to(self._device)]


class NativePooledRunner:
    """Runs the network as a step program of the native kernels. The bits of a text's result do not depend on other
    texts."""

    def __init__(
        self, model: PooledNetwork, dtype: torch.dtype, pool: ThreadPool, *, isa: str, max_tokens: int, max_rows: int
    ) -> None:
        body, recorder, spec = model.model, Recorder(dtype), model.kv_cache_spec()
        if isinstance(model.config.network, EncoderConfig):
            shared = kernel_attention_cache(model.config.network)
            spec = [] if shared is None else [shared]
        self._batch = EncoderBatch(recorder=recorder)
        context: Any = self._batch if isinstance(body, EncoderNetwork) else recorder
        hidden: Any = body(recorder.token_ids, recorder.positions, context)
        layers = []
        if spec:
            blocks = max_tokens // _BLOCK_SIZE + max_rows + 1
            plan = plan_kv_cache(
                spec, dtype=dtype, block_size=_BLOCK_SIZE, memory_bytes=0, num_blocks=blocks, most_tokens=max_tokens
            )
            self._kv = NativeKV(spec, plan)
            layers = self._kv.layers
        self.num_groups = len({layer.window for layer in spec}) if context is recorder else 0
        self._program = StepProgram(recorder, hidden, layers, pool, isa=isa, max_tokens=max_tokens)
        self.calls: Sequence[str] = self._program.plan.calls

    def hidden(self, batch: StepBatch, token_types: Tensor | None, kept: npt.NDArray[np.intp] | None) -> Tensor:
        """Hidden states [K, D] of the tokens with the indices ``kept``; or [T, D] of all tokens if ``kept`` is None."""
        self._batch.begin(batch.cu_seqlens.tolist(), token_types)
        batch = _with_blocks(batch, self.num_groups)
        if self.num_groups and kept is not None and np.array_equal(kept, batch.cu_seqlens[1:] - 1):
            return self._program.run(batch, kept)  # the last layer computes only these tokens after its K and V
        hidden = self._program.run(batch)
        return hidden if kept is None else hidden[torch.from_numpy(kept)]


def _with_blocks(batch: StepBatch, num_groups: int) -> StepBatch:
    """The same batch, where each text's block table lists consecutive blocks of scratch memory. Block 0 is unused."""
    counts = -(-batch.seq_lens // _BLOCK_SIZE)
    first = np.concatenate(([1], 1 + np.cumsum(counts)[:-1]))
    table = first[:, None] + np.arange(int(counts.max()))
    slots = np.repeat(first * _BLOCK_SIZE, batch.seq_lens) + batch.positions
    groups = max(num_groups, 1)
    batch.block_tables = np.ascontiguousarray(np.broadcast_to(table, (groups, *table.shape)), dtype=np.int32)
    batch.slot_mapping = np.ascontiguousarray(np.broadcast_to(slots, (groups, len(slots))), dtype=np.int64)
    return batch


class PooledExecutor:
    """Computes whole texts. A pass has at most ``max_rows`` texts and ``max_tokens`` tokens."""

    def __init__(self, model: PooledNetwork, runner: _Runner) -> None:
        self._model = model
        self._runner = runner
        self.calls = tuple(runner.calls)
        """Names of the operations without a native kernel, which PyTorch computes."""

    @torch.inference_mode()
    def run(
        self, token_ids: Sequence[Sequence[int]], token_types: Sequence[Sequence[int] | None]
    ) -> list[npt.NDArray[np.float32] | None]:
        """Compute one forward pass. Returns one vector per text, in order; None for a vector with a value that is not
        finite.

        ``token_types`` has, per text, the type of each token, or None if all types are 0.
        """
        lengths = np.array([len(ids) for ids in token_ids], dtype=np.int32)
        ends = np.concatenate(([0], np.cumsum(lengths)), dtype=np.int32)
        batch = StepBatch(
            np.concatenate([np.asarray(ids, dtype=np.int32) for ids in token_ids]),
            np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
            ends,
            lengths,
            np.zeros((1, len(lengths), 1), dtype=np.int32),
            np.zeros((1, int(ends[-1])), dtype=np.int64),
        )
        types = None
        if any(each is not None for each in token_types):
            flat = [np.zeros(n) if each is None else each for n, each in zip(lengths, token_types, strict=True)]
            types = torch.from_numpy(np.concatenate(flat).astype(np.int64))
        rows = {"LAST": ends[1:] - 1, "CLS": ends[:-1], None: None}[self._model.one_row]
        hidden = self._runner.hidden(batch, types, None if rows is None else rows.astype(np.intp))
        vectors = self._model.pool(hidden, ends.tolist())
        found = [vector.cpu().numpy().copy() for vector in vectors]
        return [vector if np.isfinite(vector).all() else None for vector in found]
