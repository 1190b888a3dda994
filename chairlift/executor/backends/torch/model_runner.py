"""Runs a PyTorch model with paged KV tensors: takes one flat batch, returns one token per sample position."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.row_failures import output_reason
from chairlift.base.step_batch import Masks, PromptLogprobs, SampledTokens, StepBatch
from chairlift.config import LoRAConfig
from chairlift.errors import ModelLoadError
from chairlift.executor.backends.torch.step_buffer import to_device
from chairlift.executor.backends.torch.swap_space import make_swap_space
from chairlift.executor.executor import AdapterMemory, OnProgress, PendingTokens, WeightSource
from chairlift.executor.host_memory import HostBlocks
from chairlift.executor.kv_tensors import KVPlan, make_kv_caches
from chairlift.executor.sampling.apart import sample_rows
from chairlift.executor.sampling.logprobs import TokenLogprobs, token_logprobs
from chairlift.executor.sampling.sampler import Sampler
from chairlift.kernels import ops
from chairlift.lora.torch_bank import TorchAdapters
from chairlift.models.causal_lm import CausalLM
from chairlift.models.context import PagedContext
from chairlift.models.fallback.model import TransformersLM
from chairlift.models.loader import replace_weights

__all__ = ["TorchModelRunner"]


class _Adapters(AdapterMemory, Protocol):
    """Adapters in memory, and those of the rows that are computed next."""

    def begin(self, adapters: npt.NDArray[np.int32] | None) -> None:
        """Set the adapter number of each row (0: no adapter); None: no row has an adapter."""
        ...

    def weights_replaced(self) -> None:
        """Compute again what depends on the model's weights, which were replaced."""
        ...


class TorchModelRunner:
    """Runs a :class:`~chairlift.models.causal_lm.CausalLM`, or a model from transformers, on one device."""

    _prompt_rows = 128
    """Number of prompt positions whose logits are computed at a time, because vocabularies are large and chunks may be
    long."""

    def __init__(
        self,
        model: CausalLM | TransformersLM,
        plan: KVPlan,
        dtype: torch.dtype,
        device: torch.device,
        lora: LoRAConfig | None = None,
        *,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self.cache_groups = plan.groups
        self.block_bytes = plan.block_bytes
        self._model = model
        self._device = device
        self._layer_groups = plan.layer_groups
        self._state_spans = [group.state_span for group in plan.groups]
        self.repeats = not any(self._state_spans)
        """Whether a failed step may be computed again: recurrent states are changed in place, KV is not."""
        spec = model.kv_cache_spec()
        self._kv_caches = make_kv_caches(spec, plan, dtype, device)
        self._swap_space = make_swap_space(self._kv_caches, plan)
        self.blocks = self._swap_space if isinstance(self._swap_space, HostBlocks) else None
        self._sampler = Sampler(logprobs_mode)
        self.adapters: _Adapters | None = None
        """Computes the adapters' low-rank matrices; None if no adapters are served."""
        if lora is not None and isinstance(model, CausalLM):
            self.adapters = TorchAdapters(model, dtype, device, max_rank=lora.max_lora_rank)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Any:
        """Hidden states of all tokens of the step, [T, D]."""
        if self.adapters is not None:
            self.adapters.begin(batch.adapters)
        ctx = PagedContext(
            cu_seqlens=batch.cu_seqlens.tolist(),
            seq_lens=batch.seq_lens.tolist(),
            block_tables=self._to_device(batch.block_tables),
            slot_mapping=self._to_device(batch.slot_mapping),
            kv_caches=self._kv_caches,
            layer_groups=self._layer_groups,
            state_spans=self._state_spans,
        )
        hidden: Tensor = self._model(self._to_device(batch.token_ids), self._to_device(batch.positions), ctx)
        return hidden

    @torch.inference_mode()
    def sample(self, hidden: Any, batch: StepBatch, masks: Masks | None) -> SampledTokens | PendingTokens:
        """Compute the logits of the sample positions, and sample a token from each."""
        tokens = SampledTokens([])
        if len(batch.sample_tokens):
            tokens = sample_rows(batch, masks, lambda _, part, masks: self._draw_tokens(hidden, part, masks))
        self._score_prompts(hidden, batch, tokens)
        return tokens

    def _draw_tokens(self, hidden: Tensor, batch: StepBatch, masks: Masks | None) -> SampledTokens:
        if self.adapters is not None:
            self.adapters.begin(None if batch.adapters is None else batch.adapters[batch.sample_tokens])
        logits = self._compute_logits(hidden.index_select(0, self._to_device(batch.sample_tokens)))
        rows = [batch.sampling[row] for row in batch.sample_rows]
        drawn = self._sampler(logits, rows, batch.histories, masks)
        has_logprobs = any(row is not None for row in drawn.logprobs)
        return SampledTokens(drawn.token_ids, drawn.logprobs if has_logprobs else None, drawn.errors)

    def _score_prompts(self, hidden: Tensor, batch: StepBatch, tokens: SampledTokens) -> None:
        """Add the log-probabilities of prompt tokens to ``tokens``, for the rows that asked for them."""
        for row, first, known in batch.prompt_rows:
            start = int(batch.cu_seqlens[row])
            count = int(batch.cu_seqlens[row + 1] - batch.cu_seqlens[row])
            count = min(count, len(known) - 1 - first)
            entries: list[TokenLogprobs] = []
            reason = ""
            try:
                for at in range(0, count, self._prompt_rows):
                    targets = known[first + 1 + at : first + 1 + min(at + self._prompt_rows, count)].tolist()
                    some = slice(start + at, start + at + len(targets))
                    if self.adapters is not None:
                        self.adapters.begin(None if batch.adapters is None else batch.adapters[some])
                    logits = self._compute_logits(hidden[some])
                    counts = [batch.sampling[row].params.prompt_logprobs] * len(targets)
                    entries += token_logprobs(logits, targets, counts)
            except Exception as error:  # out of memory for them; other requests of the step are not affected
                entries = []
                reason = output_reason(error)
            tokens.prompt_logprobs.append(PromptLogprobs(int(batch.slots[row]), first + 1, entries, reason))

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)

    def update_weights(self, source: WeightSource, progress: OnProgress | None = None) -> None:
        """Replace all weights of the model; see :func:`~chairlift.models.loader.replace_weights`. Raises ModelLoadError
        for a model from transformers."""
        if isinstance(self._model, TransformersLM):
            raise ModelLoadError(
                f"weights of {self._model.config.model_type!r}, which runs through transformers, cannot be replaced"
                " while it serves; load the model again"
            )
        replace_weights(self._model, source, progress)
        if self.adapters is not None:
            self.adapters.weights_replaced()

    @torch.inference_mode()
    def move_blocks(self, batch: StepBatch) -> None:
        """Swap out, copy and swap in the blocks of a step, in this order."""
        if batch.swap_out:
            self._swap_space.swap_out(batch.swap_out)
        self._copy_blocks(batch.copies)
        if batch.swap_in:
            self._swap_space.swap_in(batch.swap_in)

    def _to_device(self, array: np.ndarray[Any, Any]) -> Tensor:
        return to_device(array.astype(np.int64), self._device)

    def _copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        for group in {group for group, _, _ in copies}:
            pairs = [(source, target) for g, source, target in copies if g == group]
            sources, targets = (self._to_device(np.array(side)) for side in zip(*pairs, strict=True))
            for layer, caches in enumerate(self._kv_caches):
                if self._layer_groups[layer] == group:
                    for cache in caches:
                        ops.copy_blocks(cache, sources, targets)
