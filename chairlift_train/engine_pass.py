"""Forward passes over whole sequences by the engine's native kernels, which keep the input of each layer.

A row's bits do not depend on the batch, so the numbers are those of a rollout that was generated token by token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.step_batch import StepBatch
from chairlift.config import LoRAConfig
from chairlift.errors import ConfigError, InvariantError
from chairlift.executor.backends.native.backend import NativeBackend
from chairlift.executor.backends.native.native_runner import NativeModelRunner
from chairlift.executor.kv_tensors import plan_kv_cache
from chairlift.kernels.cpu.library import ThreadPool
from chairlift.kernels.cpu.program import ROUTED_TOKENS
from chairlift.kernels.weights import NATIVE
from chairlift.models.causal_lm import CausalLM
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.layers.experts import MixtureOfExperts
from chairlift.models.loader import replace_weights

__all__ = ["EnginePass", "Stretch"]

_BLOCK = 16
_NO_LIMIT = 1 << 50


class Stretch(NamedTuple):
    """Consecutive tokens of a pack that one step of the engine computed. The next step overwrites the tensors."""

    first: int
    """Index of the first token in the pack."""
    values: list[Tensor]
    """Input of each layer, and the decoder's result, each [t, D] in the engine's dtype."""
    experts: list[Tensor]
    """int64 [t, k] for each layer of experts: the experts that each token chose."""


class EnginePass:
    """The engine's forward pass with a copy of a model's weights in ``dtype``, the dtype of the rollouts.

    ``kernels`` is the engine's setting of this name (``auto`` or an instruction set), and ``threads`` its number of
    threads. Call :meth:`write` before the first pass, and :meth:`grow` for room. Raises ConfigError for a model that
    the native kernels do not run.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        dtype: torch.dtype = torch.float32,
        kernels: str = "auto",
        threads: int | None = None,
    ) -> None:
        device = next(model.parameters()).device
        backend = NativeBackend.choose(kernels)
        if reason := backend.why_not(model.config, dtype, device, _BLOCK):
            raise ConfigError(f"an exact forward pass uses the native kernels: {reason}")
        self.dtype = dtype
        self.isa = backend.kernels
        """Name of the instruction set of the kernels."""
        self._pool = ThreadPool(threads)
        with torch.device("meta"):
            self._copy = CausalLM(model.config)
        self._copy.lay_out(NATIVE, dtype, torch.device("cpu"))
        self._copy.eval().requires_grad_(False)
        self._has_experts = any(isinstance(each, MixtureOfExperts) for each in model.modules())
        self._runner: NativeModelRunner | None = None
        self._most = 0
        """Largest number of tokens of a step."""

    @property
    def runner(self) -> NativeModelRunner:
        """Runs the steps. Raises InvariantError before :meth:`grow`."""
        if self._runner is None:
            raise InvariantError("the engine's step is used before it has room for a pack")
        return self._runner

    def write(self, model: CausalLM) -> None:
        """Copy the weights of ``model``, rounded to :attr:`dtype`."""
        replace_weights(self._copy, hf_state_dict(model))
        if self._runner is not None:
            self._runner.weights_written()

    def grow(
        self, num_tokens: int, num_sequences: int, lora: LoRAConfig | None = None, *, step_tokens: int | None = None
    ) -> None:
        """Make room for packs of this size, with the adapters of ``lora``. The adapters in memory are lost.

        A step of the engine computes at most ``step_tokens`` tokens (None: whole packs). Fewer need less memory.
        """
        num_blocks = num_sequences + num_tokens // _BLOCK + 1
        plan = plan_kv_cache(
            self._copy.kv_cache_spec(),
            dtype=self.dtype,
            block_size=_BLOCK,
            memory_bytes=_NO_LIMIT,
            num_blocks=num_blocks,
            most_tokens=num_blocks * _BLOCK,
            rows=num_sequences,
            caching=False,
        )
        most = num_tokens if step_tokens is None else min(step_tokens, num_tokens)
        # The engine divides prompts into chunks, too: no bit depends on it.
        self._most = min(most, ROUTED_TOKENS) if self._has_experts else most
        sizes: dict[str, Any] = {"isa": self.isa, "max_tokens": most, "lora": lora, "keeps_layers": True}
        self._runner = NativeModelRunner(self._copy, plan, self.dtype, self._pool, **sizes)

    def stretches(
        self,
        token_ids: npt.NDArray[np.int32],
        starts: Sequence[int],
        adapters: npt.NDArray[np.int32] | None = None,
    ) -> Iterator[Stretch]:
        """Compute a pack ``token_ids`` [T] of whole sequences that begin at ``starts``, which ends with T. ``adapters``
        [T] is the number of each token's adapter, 0 for none; None if no token has one."""
        places = _Places(self.runner, starts)
        for first in range(0, len(token_ids), self._most):
            step = places.step(token_ids, first, min(first + self._most, len(token_ids)))
            step.adapters = None if adapters is None else adapters[first : first + self._most]
            out = self.runner.forward(step)
            experts = [torch.from_numpy(each).long() for each in self.runner.chosen_experts]
            yield Stretch(first, [*self.runner.layer_inputs(len(out)), out], experts)


class _Places:
    """Blocks of the cache for the sequences of a pack, whose first tokens are at ``starts``. Block 0 is never used; a
    recurrent state takes a block per sequence."""

    def __init__(self, runner: NativeModelRunner, starts: Sequence[int]) -> None:
        self._starts = np.array(starts, dtype=np.int64)
        lengths = np.diff(self._starts)
        self._positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        counts = [math.ceil(length / _BLOCK) for length in lengths.tolist()]
        table = np.zeros((len(counts), max(counts)), dtype=np.int32)
        first = 1
        for row, count in enumerate(counts):
            table[row, :count] = np.arange(first, first + count)
            first += count
        states = np.repeat(np.arange(1, len(counts) + 1, dtype=np.int32)[:, None], table.shape[1], axis=1)
        self._spans = [group.state_span for group in runner.cache_groups]
        self._tables = np.stack([table if span is None else states for span in self._spans])

    def step(self, ids: npt.NDArray[np.int32], first: int, end: int) -> StepBatch:
        """The step that computes the tokens ``first`` to ``end`` (excluded) of the pack [T], and their results. Earlier
        tokens must have been computed."""
        low = np.clip(self._starts[:-1], first, end)
        high = np.clip(self._starts[1:], first, end)
        rows = np.flatnonzero(high > low)
        counts = (high - low)[rows]
        positions = self._positions[first:end]
        row_of = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
        tables = np.ascontiguousarray(self._tables[:, rows])
        slots = [
            blocks[row_of, positions // _BLOCK].astype(np.int64) * _BLOCK + positions % _BLOCK
            if span is None
            else blocks[row_of, 0].astype(np.int64)
            for blocks, span in zip(tables, self._spans, strict=True)
        ]
        return StepBatch(
            token_ids=ids[first:end],
            positions=positions,
            cu_seqlens=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            seq_lens=(high - self._starts[:-1])[rows].astype(np.int32),
            block_tables=tables,
            slot_mapping=np.stack(slots),
            slots=np.arange(len(rows), dtype=np.int32),
            sample_rows=row_of,
            sample_tokens=np.arange(end - first, dtype=np.int32),  # so the step computes the results of all tokens
        )
