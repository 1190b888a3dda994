"""Executor of models for embeddings, scores and classes: each step computes whole texts, and returns a vector per text.

There is no KV cache and no padding: a step is one flat batch of whole texts. The native kernels write K and V into
scratch memory, which the next step overwrites; all layers of an encoder use the same scratch memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.step_batch import Masks, SampledTokens, StepBatch
from chairlift.config import CacheGroup
from chairlift.core.scheduler.output import FAILED_ROW, NewRow, SchedulerOutput
from chairlift.errors import ConfigError
from chairlift.executor.backends.native.native_kv import NativeKV
from chairlift.executor.executor import Executor, OnProgress, PendingTokens, WeightSource
from chairlift.executor.kv_tensors import plan_kv_cache
from chairlift.kernels.cpu.library import ThreadPool
from chairlift.kernels.cpu.program import StepProgram
from chairlift.kernels.recording import Recorder, Value
from chairlift.models.context import BothWaysContext, PackedContext
from chairlift.models.encoder import EncoderBatch, EncoderNetwork, kernel_attention_cache
from chairlift.models.encoder_config import EncoderConfig
from chairlift.models.hf_config import NetworkConfig
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
        body = self._model.model
        network = self._model.config.network
        both_ways = isinstance(network, NetworkConfig) and network.both_ways
        ctx = (BothWaysContext if both_ways else PackedContext)(batch.cu_seqlens.tolist())
        if isinstance(body, EncoderNetwork):
            both = EncoderBatch()
            both.begin(batch.cu_seqlens.tolist(), None if token_types is None else token_types.to(self._device))
            found: Tensor = body(ids, positions, both)
        else:
            found = body(ids, positions, ctx)
        return found if kept is None else found[torch.from_numpy(kept).to(self._device)]


class _BothWaysRecorder(Recorder):
    """Recorder of a decoder whose tokens also attend to later tokens."""

    def attend(self, layer: int, q: Value, k: Value, v: Value, **how: Any) -> Value:
        return super().attend(layer, q, k, v, **how, both_ways=True)


class NativePooledRunner:
    """Runs the network as a step program of the native kernels. The bits of a text's result do not depend on other
    texts."""

    def __init__(
        self, model: PooledNetwork, dtype: torch.dtype, pool: ThreadPool, *, isa: str, max_tokens: int, max_rows: int
    ) -> None:
        body = model.model
        network = model.config.network
        spec = model.kv_cache_spec()
        if isinstance(network, EncoderConfig):
            shared = kernel_attention_cache(network)
            spec = [] if shared is None else [shared]
            recorder = Recorder(dtype)
        else:
            recorder = _BothWaysRecorder(dtype) if network.both_ways else Recorder(dtype)
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Vectors:
    """The vectors of a step, which are known already. Their token ids stand for tokens that nobody reads."""

    tokens: SampledTokens

    def result(self) -> SampledTokens:
        return self.tokens


class PooledExecutor(Executor):
    """Computes whole texts, one chunk per text. A text leaves after its step, so the executor keeps no rows and has no
    KV cache."""

    block_size = _BLOCK_SIZE
    num_lookahead_steps = 0

    def __init__(self, model: PooledNetwork, runner: _Runner) -> None:
        self.cache_groups: list[CacheGroup] = []
        self.block_bytes: list[int] = []
        self._model = model
        self._runner = runner
        self.calls = tuple(runner.calls)
        """Names of the operations without a native kernel, which PyTorch computes."""

    def execute(self, out: SchedulerOutput) -> list[NewRow]:
        """The texts of a step. Each has joined in this step."""
        rows = {row.slot: row for row in out.joined}
        return [rows[chunk.slot] for chunk in out.chunks]

    def sample(self, handle: list[NewRow], masks: Masks | None = None) -> PendingTokens:
        """Compute the texts of a step. If the step fails, each of its texts gets the error."""
        try:
            vectors = self.run([row.token_ids for row in handle], [row.sampling.token_types for row in handle])
        except (MemoryError, RuntimeError) as error:  # usually out of memory; the next step may be smaller
            why = f"the pass with this text failed ({type(error).__name__}: {str(error)[:200]})"
            vectors = [None] * len(handle)
        else:
            why = "the model computed numbers that are not finite for this text"
        failed = {place: why for place, vector in enumerate(vectors) if vector is None}
        token_ids = [FAILED_ROW if place in failed else 0 for place in range(len(vectors))]
        return _Vectors(SampledTokens(token_ids, errors=failed, vectors=vectors))

    def update_weights(self, source: WeightSource, progress: OnProgress | None = None) -> None:
        """Raise ConfigError: the weights of these models cannot be replaced."""
        raise ConfigError(
            "weights of models for embeddings and classes cannot be replaced; start the server with the new ones"
        )

    def shutdown(self) -> None:
        """Do nothing: all resources are freed together with the object."""

    @torch.inference_mode()
    def run(
        self, token_ids: Sequence[Sequence[int]], token_types: Sequence[Sequence[int] | None]
    ) -> list[npt.NDArray[np.float32] | None]:
        """Compute whole texts in one flat batch. Returns one vector per text, in order; None for a vector with a value
        that is not finite.

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
