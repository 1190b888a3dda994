"""Runs a model with the native CPU kernels: one call computes the layers of a step, a second one its output head and
sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.row_failures import output_reason
from chairlift.base.step_batch import Masks, PromptLogprobs, SampledTokens, StepBatch
from chairlift.config import LoRAConfig
from chairlift.errors import ConfigError, InvariantError
from chairlift.executor.backends.native.native_kv import NativeKV
from chairlift.executor.backends.native.sampling_rows import NativeRows, RowTemplates
from chairlift.executor.drafters.source import DraftSource
from chairlift.executor.executor import OnProgress, WeightSource
from chairlift.executor.image_bank import ImageBank
from chairlift.executor.kv_tensors import KVPlan
from chairlift.executor.sampling.apart import sample_rows
from chairlift.executor.sampling.logprobs import token_logprobs
from chairlift.executor.sampling.sampler import processed_logits
from chairlift.kernels import ops
from chairlift.kernels.cpu.communicator import Communicator
from chairlift.kernels.cpu.library import Memory, ThreadPool
from chairlift.kernels.cpu.packing import PANEL, PackedMatrix
from chairlift.kernels.cpu.program import SPARE_ROWS, StepProgram
from chairlift.kernels.recording import Recorder, Value
from chairlift.lora.bank import NativeAdapters
from chairlift.models.causal_lm import CausalLM
from chairlift.models.eagle3 import hidden_at
from chairlift.models.loader import replace_weights

__all__ = ["NativeModelRunner"]

_SCRATCH_BYTES = 64 << 20
"""Maximum size in bytes of the memory for logits. If a step's logits need more, its rows are sampled in several
calls."""


class NativeModelRunner:
    """Runs a :class:`~chairlift.models.causal_lm.CausalLM` in the native layout as a step program.

    The model's Python code runs once, in the constructor, and is recorded as the program. ``isa`` is the instruction
    set of the kernels. A step has at most ``max_tokens`` tokens. With ``lora``, rows may have adapters. A row's result
    does not depend on other rows of the batch. ``drafts`` is what makes drafts; the last layers of ``plan`` belong to
    it. ``kv`` is the cache of another runner; its layers from ``first_layer`` on belong to this
    runner. ``images`` holds the encoded images that steps may use. With ``keeps_layers``, a step keeps the input of
    every decoder layer for :meth:`layer_inputs`. ``comm`` connects the processes that share the model, if its weights
    are divided.
    """

    _is_whole = False
    """Whether the newest step computed the last layer for all of its tokens."""

    def __init__(
        self,
        model: CausalLM,
        plan: KVPlan,
        dtype: torch.dtype,
        pool: ThreadPool,
        *,
        isa: str,
        max_tokens: int,
        drafts: DraftSource | None = None,
        kv: NativeKV | None = None,
        first_layer: int = 0,
        lora: LoRAConfig | None = None,
        images: ImageBank | None = None,
        keeps_layers: bool = False,
        logprobs_mode: str = "raw_logprobs",
        comm: Communicator | None = None,
    ) -> None:
        self.reads_shared_once = True
        """Whether decode rows read the K and V of shared blocks together: the attention kernels group the rows."""
        self.images = images
        """Stored embeddings of images; None if the model reads only texts."""
        self.cache_groups = plan.groups
        self.block_bytes = plan.block_bytes
        self._model = model
        spec = model.kv_cache_spec()
        draft_spec = () if drafts is None else drafts.layers
        self._kv = NativeKV([*spec, *draft_spec], plan, dtype) if kv is None else kv
        self.blocks = self._kv.host
        self.adapters: NativeAdapters | None = None
        """Computes the low-rank matrices of adapters; None if no adapters are served."""
        if lora is not None:
            sizes = {"max_rank": lora.max_lora_rank, "capacity": lora.num_cpu_loras}
            self.adapters = NativeAdapters(model, dtype, max_tokens=max_tokens + SPARE_ROWS, **sizes)
        table = None if self.adapters is None else self.adapters.table
        recorder = Recorder(dtype)
        taps = () if drafts is None else drafts.taps
        self._taps_end = any(tap == len(model.model.layers) for tap in taps)
        kept = range(model.config.num_hidden_layers) if keeps_layers else ()
        hidden, found = _record(model, recorder, [*taps, *kept])
        tapped, self._layer_inputs = found[: len(taps)], found[len(taps) :]
        layers = self._kv.layers[first_layer:]
        states = {} if first_layer else self._kv.states
        windows = ((each.group, plan.groups[each.group].window) for each in layers)
        self.windows = {group: window for group, window in windows if window is not None}
        """Cache group -> its sliding window in positions, for the groups of this model's layers that have one."""
        how: dict[str, Any] = {"isa": isa, "max_tokens": max_tokens, "states": states, "adapters": table}
        how |= {"taps": tapped, "others": self._layer_inputs, "keeps_routing": keeps_layers, "comm": comm}
        self.program = StepProgram(recorder, hidden, layers, pool, parts=self._kv.parts, **how)
        self.calls = self.program.plan.calls
        """Names of the operations without a native kernel, which PyTorch computes."""
        self._head_weight, self._cap = _head_of(model, recorder, hidden)
        self._reports_processed = logprobs_mode == "processed_logprobs"
        self._vocab_size = self._head_weight.layer_outputs
        self._templates = RowTemplates(self._vocab_size)
        self._draft_templates = RowTemplates(self._vocab_size)
        self._max_tokens = max_tokens
        self._dtype = dtype
        self._isa = isa
        self._pool = pool
        self._draft_layers = self._kv.layers[first_layer + len(spec) :][: len(draft_spec)]
        self._logits: Tensor | None = None
        self.draft: NativeModelRunner | None = None
        """Runner of the small model that makes drafts; None without such a model."""
        if drafts is not None and drafts.small is not None:
            more = {"isa": isa, "max_tokens": max_tokens, "kv": self._kv, "first_layer": len(spec)}
            self.draft = NativeModelRunner(drafts.small, plan, dtype, pool, **more)  # type: ignore[arg-type]

    @property
    def expert_counts(self) -> npt.NDArray[np.int64] | None:
        """int64 [layers of experts, E]: number of tokens that each expert has computed so far. None if the model has no
        experts."""
        return self.program.expert_counts

    @property
    def repeats(self) -> bool:
        """Whether a failed step may be computed again: recurrent states are changed in place, KV is not."""
        return not self._kv.states

    def move_blocks(self, batch: StepBatch) -> None:
        """Swap out, copy and swap in the blocks of a step, in this order."""
        if batch.swap_out:
            self._kv.host.swap_out(batch.swap_out)
        if batch.copies:
            self._kv.copy_blocks(batch.copies)
        if batch.swap_in:
            self._kv.host.swap_in(batch.swap_in)

    def forward(self, batch: StepBatch) -> Tensor:
        """Hidden states [K, D] of the tokens that :func:`_needed` returns. The next step overwrites them."""
        self._is_whole = self._taps_end and self.captures
        return self.program.run(batch, self._needed(batch), None if self.images is None else self.images.rows)

    def sample(self, hidden: Tensor, batch: StepBatch, masks: Masks | None) -> SampledTokens:
        """Compute the logits of the sample positions and sample their tokens, in one call of the native library."""
        # Indices in ``hidden``. In ``at``: the first hidden state of each row. In ``hidden_rows``: the hidden state of
        # each sample position.
        at = batch.cu_seqlens
        hidden_rows = self.sample_places(batch)
        if (needed := self._needed(batch)) is not None:
            at = np.searchsorted(needed, at).astype(np.int32)
        tokens = SampledTokens([])
        if len(hidden_rows):

            def draw(places: slice, part: StepBatch, masks: Masks | None) -> SampledTokens:
                rows = self._templates.fill(part, masks)
                self._head(hidden, hidden_rows[places], rows, adapters=_adapters_of(part))
                drawn = rows.sampled()
                if self._reports_processed and drawn.logprobs is not None:
                    self._report_processed(hidden, hidden_rows[places], part, masks, drawn)
                return drawn

            tokens = sample_rows(batch, masks, draw)
        for row, first, known in batch.prompt_rows:
            start = int(at[row])
            count = min(int(at[row + 1] - at[row]), len(known) - 1 - first)
            targets = known[first + 1 : first + 1 + count]
            slot = int(batch.slots[row])
            try:
                targets_rows = NativeRows.for_targets(
                    targets, batch.sampling[row].params.prompt_logprobs, self._vocab_size
                )
                own = None if batch.adapters is None else np.full(count, batch.adapters[batch.cu_seqlens[row]])
                self._head(hidden, np.arange(start, start + count, dtype=np.int32), targets_rows, adapters=own)
                report = PromptLogprobs(slot, first + 1, list(targets_rows.logprobs()))
            except Exception as error:  # out of memory for them; other requests of the step are not affected
                report = PromptLogprobs(slot, first + 1, [], output_reason(error))
            tokens.prompt_logprobs.append(report)
        return tokens

    def _report_processed(
        self,
        hidden: Tensor,
        token_rows: npt.NDArray[np.int32],
        batch: StepBatch,
        masks: Masks | None,
        drawn: SampledTokens,
    ) -> None:
        """Replace the log-probabilities of ``drawn`` by those of the distributions from which the tokens were drawn.
        The kernels overwrite the logits that they store, so the rows are multiplied with the output head again."""
        histories, adapters = batch.histories, _adapters_of(batch)
        reports = list(drawn.logprobs or [])
        wanted = [i for i, report in enumerate(reports) if report is not None]
        step = len(self._scratch())
        for start in range(0, len(wanted), step):
            part = wanted[start : start + step]
            own = None if adapters is None else np.ascontiguousarray(adapters[part])
            logits = torch.from_numpy(self._logits_at(hidden, token_rows[part], own))
            rows = [batch.sampling[batch.sample_rows[i]] for i in part]
            allowed = {j: masks[i] for j, i in enumerate(part) if i in masks} if masks else None
            scores = processed_logits(logits, rows, [histories[i] for i in part], allowed)
            counts = [row.params.logprobs or 0 for row in rows]
            found = token_logprobs(scores, [drawn.token_ids[i] for i in part], counts)
            for i, report in zip(part, found, strict=True):
                reports[i] = report
        drawn.logprobs = reports

    def _logits_at(
        self, hidden: Tensor, token_rows: npt.NDArray[np.int32], adapters: npt.NDArray[np.int32] | None
    ) -> npt.NDArray[np.float32]:
        """Logits [R, V] of the rows ``token_rows`` [R] of ``hidden``, which is the result of :meth:`forward`."""
        return self._logits_of(hidden[token_rows], self._head_weight, self._cap, adapters)

    def sample_places(self, batch: StepBatch) -> npt.NDArray[np.int32]:
        """[P] index of each sample position's hidden state in the result of :meth:`forward`."""
        needed = self._needed(batch)
        return batch.sample_tokens if needed is None else np.searchsorted(needed, batch.sample_tokens).astype(np.int32)

    def _needed(self, batch: StepBatch) -> npt.NDArray[np.intp] | None:
        """As :func:`_needed`; None also if a drafting layer reads the last hidden states of all tokens."""
        return None if self._is_whole else _needed(batch)

    @property
    def tapped(self) -> Tensor:
        """[T, number of taps * width]: hidden states of the newest step at the layers that the drafting layer reads,
        if the step was captured."""
        return self.program.tapped

    @property
    def captures(self) -> bool:
        """Whether steps store :attr:`tapped`."""
        return self.program.captures

    @captures.setter
    def captures(self, captures: bool) -> None:
        self.program.captures = captures

    def layer_inputs(self, count: int) -> list[Tensor]:
        """Input [T, D] of each decoder layer in the newest step, which had ``count`` tokens, if layers are kept. The
        next step overwrites them."""
        return [self.program.rows_of(value, count) for value in self._layer_inputs]

    @property
    def chosen_experts(self) -> list[npt.NDArray[np.int32]]:
        """int32 [T, k] for each layer of experts: what the tokens of the newest step chose, if layers are kept."""
        return self.program.chosen

    def logits(self, hidden: Tensor, adapters: npt.NDArray[np.int32] | None = None) -> Tensor:
        """Logits float32 [R, V] of the model's output head for hidden states [R, D], as the sampler sees them.
        ``adapters`` [R]: number of each row's adapter, 0 for none; None if no row has one."""
        return torch.from_numpy(self._logits_of(hidden, self._head_weight, self._cap, adapters)).contiguous()

    def logprobs(
        self, hidden: Tensor, targets: npt.NDArray[np.int32], adapters: npt.NDArray[np.int32] | None = None
    ) -> Tensor:
        """Log-probabilities float32 [R] of the tokens ``targets`` [R], from the hidden states [R, D] before them: the
        numbers that a request with ``logprobs`` or ``prompt_logprobs`` gets. ``adapters`` is that of :meth:`logits`."""
        rows = NativeRows.for_targets(targets, 0, self._vocab_size)
        self._head(self._padded(hidden), np.arange(len(targets), dtype=np.int32), rows, adapters=adapters)
        return _reported(rows)

    def scored(
        self, hidden: Tensor, targets: npt.NDArray[np.int32], adapters: npt.NDArray[np.int32] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The results of :meth:`logits`, [R, V], and of :meth:`logprobs`, [R], by one product."""
        rows = NativeRows.for_targets(targets, 0, self._vocab_size)
        logits = self._stored(hidden, rows, self._head_weight, self._cap, adapters)
        return torch.from_numpy(logits), _reported(rows)

    def logprobs_of(self, logits: Tensor, targets: npt.NDArray[np.int32]) -> Tensor:
        """The same as :meth:`logprobs`, [R], from the logits [R, V] of other targets of the same rows."""
        vocab_size = self._vocab_size
        rows = NativeRows.for_targets(targets, 0, vocab_size)
        self.program.sample(_aligned(logits), vocab_size, rows.records)
        return _reported(rows)

    def embed(self, token_ids: Value) -> Tensor:
        """Record the look-up of ``token_ids`` in the served model's embedding table. The result is [T, D]."""
        embedded: Tensor = self._model.model.embed_tokens(token_ids)
        return embedded

    def recorder(self) -> Recorder:
        """A new recorder for the drafting layer, with the served model's dtype; its recording goes to
        :meth:`program_of`."""
        return Recorder(self._dtype)

    def program_of(
        self, recorder: Recorder, output: Value, max_tokens: int, others: Sequence[Value] = ()
    ) -> StepProgram:
        """Step program of the layer or the heads that draft. It uses the served model's threads and the last layers of
        its cache. ``others`` is that of :class:`StepProgram`."""
        how: dict[str, Any] = {"isa": self._isa, "max_tokens": max_tokens, "others": others}
        return StepProgram(recorder, output, self._draft_layers, self._pool, **how)

    @property
    def draft_blocks(self) -> tuple[int, int]:
        """(number of the cache group, number of its blocks) of the drafting layer's cache."""
        return self._draft_layers[-1].group, self._draft_layers[-1].num_blocks

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the served model's activations."""
        return self._dtype

    def draw(
        self,
        states: Tensor,
        batch: StepBatch,
        head: PackedMatrix | None = None,
        token_ids: npt.NDArray[np.int32] | None = None,
    ) -> list[int]:
        """Sample one token for each sample position of ``batch`` from hidden states ``states``; see
        :class:`~chairlift.executor.drafters.runner.DraftRunner`."""
        rows = self._draft_templates.fill(batch, None)
        if head is None or token_ids is None:
            self._head(self._padded(states), np.arange(len(states), dtype=np.int32), rows, head)
            return rows.sampled().token_ids
        drawn = self._logits_of(states, head)
        if not rows.needs_logits.any() and not rows.records["temperature"].any():
            found: list[int] = token_ids[drawn.argmax(axis=1)].tolist()
            return found
        # The sampler supports only the ids of the served model's vocabulary. So it gets logits of the whole vocabulary;
        # tokens that the head does not have get minus infinity.
        vocab_size = self._vocab_size
        logits = np.full((len(states), -(-vocab_size // 32) * 32), -np.inf, dtype=np.float32)
        logits[:, token_ids] = drawn
        self.program.sample(logits, vocab_size, rows.records)
        return rows.sampled().token_ids

    def _logits_of(
        self,
        states: Tensor,
        head: PackedMatrix,
        cap: float | None = None,
        adapters: npt.NDArray[np.int32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Logits [R, n] of hidden states [R, D] in the model's dtype with an output head [n, D], with a ``cap`` as in
        :meth:`StepProgram.head`."""
        rows = NativeRows.for_targets(np.zeros(len(states), dtype=np.int32), -1, head.n)  # they report nothing
        return self._stored(states, rows, head, cap, adapters)

    def _stored(
        self,
        states: Tensor,
        rows: NativeRows,
        head: PackedMatrix,
        cap: float | None,
        adapters: npt.NDArray[np.int32] | None,
    ) -> npt.NDArray[np.float32]:
        """As :meth:`_logits_of`, for ``rows`` with targets, which store their logits and report what they ask for."""
        count = len(states)
        width = -(-head.n // PANEL) * PANEL
        stored = Memory(4 * count * width).tensor(torch.float32, (count, width))
        places = np.arange(count, dtype=np.int32)
        self.program.head(head, self._padded(states), places, rows.records, stored, cap, adapters)
        return stored.numpy()[:, : head.n]

    def _padded(self, states: Tensor) -> Tensor:
        """The hidden states ``states`` [R, D]. Each row is padded with zeros at its end."""
        width = states.shape[1]
        given = states.view(torch.uint8).numpy()  # a copy in torch would start threads
        padded = np.zeros((len(given), (-(-width // PANEL) + 1) * PANEL * states.element_size()), dtype=np.uint8)
        padded[:, : given.shape[1]] = given
        return torch.from_numpy(padded).view(states.dtype)[:, :width]

    def update_weights(self, source: WeightSource, progress: OnProgress | None = None) -> None:
        """Replace all weights of the model; see :func:`~chairlift.models.loader.replace_weights`. The weights keep
        their addresses, so the step program stays valid. Raises ConfigError for a model with an image encoder."""
        if self.images is not None:
            raise ConfigError("the weights of a model that reads images cannot be replaced; load the new ones instead")
        replace_weights(self._model, source, progress)
        self.weights_written()

    def weights_written(self) -> None:
        """Follow new weights that were written into the model in place."""
        self.program.refresh()
        if self.adapters is not None:
            self.adapters.weights_replaced()

    def _head(
        self,
        hidden: Tensor,
        token_rows: npt.NDArray[np.int32],
        rows: NativeRows,
        head: PackedMatrix | None = None,
        adapters: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Sample the rows ``token_rows`` of ``hidden``, in several calls if the logits do not all fit into the scratch
        memory. Only the logits of the model's own output head are capped. ``adapters``: number of each row's adapter,
        None if no row has one."""
        stored = rows.storing
        weight, cap = (self._head_weight, self._cap) if head is None else (head, None)
        if not len(stored):
            self.program.head(weight, hidden, token_rows, rows.records, None, cap, adapters)
            return
        logits = self._scratch()
        if len(stored) <= len(logits):
            self.program.head(weight, hidden, token_rows, rows.records, logits, cap, adapters)
            return
        rest = np.flatnonzero(~rows.needs_logits)
        for start in range(0, len(stored), len(logits)):
            index = stored[start : start + len(logits)]
            if start == 0:
                index = np.concatenate((rest, index))
            part = rows.part(index)
            these = np.ascontiguousarray(token_rows[index])
            own = None if adapters is None else adapters[index]
            self.program.head(weight, hidden, these, part.records, logits, cap, own)
            rows.records[index] = part.records

    def _scratch(self) -> Tensor:
        """Scratch memory for logits, float32 [rows, V rounded up to 32]. It is allocated at first use."""
        if self._logits is None:
            count, width = self._scratch_shape()
            self._logits = Memory(4 * width * count).tensor(torch.float32, (count, width))
        return self._logits

    def _scratch_shape(self) -> tuple[int, int]:
        """(rows, V rounded up to 32) of the memory for logits."""
        width = -(-self._vocab_size // PANEL) * PANEL
        return max(1, min(self._max_tokens, _SCRATCH_BYTES // (4 * width))), width


def _reported(rows: NativeRows) -> Tensor:
    """Log-probabilities float32 [R] that the kernels have reported for the targets of ``rows``."""
    if rows.top_logprobs is None:
        raise InvariantError("rows that report log-probabilities have no room for them")
    return torch.from_numpy(rows.top_logprobs[:, 0].copy())


def _aligned(logits: Tensor) -> npt.NDArray[np.float32]:
    """Logits [R, V] with rows of a multiple of 32 values, which the sampler reads. Not a copy if they are so."""
    count, width = logits.shape
    wide = -(-width // PANEL) * PANEL
    if wide == width and logits.is_contiguous():
        found: npt.NDArray[np.float32] = logits.numpy()
        return found
    padded = np.full((count, wide), -np.inf, dtype=np.float32)
    padded[:, :width] = logits.numpy()
    return padded


def _record(model: CausalLM, recorder: Recorder, taps: Sequence[int]) -> tuple[Any, list[Value]]:
    """Record the model. Returns (its result, the hidden states before the decoder layers ``taps``)."""
    return hidden_at(model, taps, recorder.token_ids, recorder.positions, recorder)


def _head_of(model: CausalLM, recorder: Recorder, hidden: Value) -> tuple[PackedMatrix, float | None]:
    """(weight of the output head, cap of its logits or None). Raises InvariantError for a head of another form."""
    body = len(recorder.nodes)
    model.compute_logits(hidden)  # type: ignore[arg-type]
    head = recorder.nodes[body:]
    capped = len(head) == 2 and head[1].op is ops.soft_cap and head[1].inputs == (head[0].out,)
    if len(head) != 1 + capped or head[0].op is not ops.native_linear or head[0].inputs != (hidden,):
        raise InvariantError(
            f"compute_logits of {type(model).__name__} must be one linear layer in the native layout, and at most"
            " ops.soft_cap behind it; use kernels='torch' for this model"
        )
    weight: PackedMatrix = head[0].attributes["weight"]
    return weight, head[1].attributes["cap"] if capped else None


def _adapters_of(batch: StepBatch) -> npt.NDArray[np.int32] | None:
    """Number of the adapter of each sample position (0: none); None if no token of the step has an adapter."""
    return None if batch.adapters is None else batch.adapters[batch.sample_tokens]


def _needed(batch: StepBatch) -> npt.NDArray[np.intp] | None:
    """Ascending indices of the tokens whose hidden states are needed: the sample positions, and all tokens of chunks
    with prompt log-probabilities. None if these are all tokens, as in a step that only decodes."""
    if len(batch.sample_tokens) == len(batch.token_ids):
        return None
    starts = batch.cu_seqlens
    needed = np.zeros(len(batch.token_ids), dtype=bool)
    needed[batch.sample_tokens] = True
    for row, *_ in batch.prompt_rows:
        needed[starts[row] : starts[row + 1]] = True
    return np.flatnonzero(needed)
