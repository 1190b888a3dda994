"""The executor in this process: an InputBatch and a model runner."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from chairlift.base.step_batch import Masks, SampledTokens, StepBatch
from chairlift.config import CacheGroup
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.spec_decode.upkeep import Upkeep
from chairlift.errors import ConfigError
from chairlift.executor.executor import (
    AdapterMemory,
    BlockBytes,
    ImageMemory,
    LiveWeights,
    OnProgress,
    PendingTokens,
    WeightSource,
)
from chairlift.executor.input_batch import Awaited, InputBatch
from chairlift.executor.sampling.apart import compute_apart

__all__ = ["Drafter", "LocalExecutor", "ModelRunner"]

_log = logging.getLogger(__name__)


class ModelRunner(Protocol):
    """Runs a model and holds its KV cache: with PyTorch, with the native kernels, or for HashLM."""

    cache_groups: list[CacheGroup]
    block_bytes: list[int]
    """Per cache group: bytes of one block over all layers of the group."""

    @property
    def repeats(self) -> bool:
        """Whether a step may be computed again, as a whole or in parts, after its forward pass has failed. False if a
        step changes something in place, such as recurrent states."""
        ...

    def move_blocks(self, batch: StepBatch) -> None:
        """Swap out, copy and swap in the blocks of a step, in this order. Called once per step, before ``forward``, if
        the step moves blocks."""
        ...

    def forward(self, batch: StepBatch) -> Any:
        """Compute a step: run the layers, which write KV and attend. Returns the input of :meth:`sample`."""
        ...

    def sample(self, hidden: Any, batch: StepBatch, masks: Masks | None) -> SampledTokens | PendingTokens:
        """Sample one token per sample position. If the tokens are still pending, the next step must be able to read
        them on the device."""
        ...


class Drafter(Protocol):
    """Makes drafts. It is a :class:`~chairlift.core.spec_decode.adaptive.Proposer` that is also called for every
    step."""

    most: int
    """Maximum number of drafts for a row in one step."""
    upkeep: Upkeep
    """Decides whether the drafter keeps states."""
    sleeps: bool
    """Whether the drafter keeps no states, so that a step concerns it only if it changes the rows or their blocks."""

    def follow(self, out: SchedulerOutput, batch: StepBatch) -> None:
        """Called after the model has computed a step, before the step's tokens are known. A drafter that sleeps is
        called only for steps that change the rows or their blocks."""
        ...

    def saw(self, hidden: Any, batch: StepBatch, token_ids: Sequence[int]) -> None:
        """Called when the tokens of a step are known, if the drafter does not sleep. ``hidden`` is the result of the
        runner's ``forward``."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _KnownTokens:
    """A step's tokens from a runner that computes them before it returns."""

    tokens: SampledTokens

    def result(self) -> SampledTokens:
        return self.tokens


@dataclasses.dataclass(frozen=True, slots=True)
class _Arriving:
    """A step's tokens that a device is still computing, and their positions in the InputBatch."""

    pending: PendingTokens
    rows: InputBatch
    awaited: Awaited

    def result(self) -> SampledTokens:
        tokens = self.pending.result()
        self.rows.arrived(self.awaited, tokens.token_ids)
        return tokens


@dataclasses.dataclass(frozen=True, slots=True)
class _Failed:
    """Stands for the result of a forward pass that failed. The step's rows can be computed apart."""

    error: Exception


class LocalExecutor:
    """Runs each step at once in this process; see :class:`~chairlift.executor.executor.Executor`."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        drafter: Drafter | None = None,
    ) -> None:
        self.cache_groups = runner.cache_groups
        self.block_size = block_size
        self.block_bytes = runner.block_bytes
        self.calls: tuple[str, ...] = tuple(getattr(runner, "calls", ()))
        """Names of the operations for which there is no kernel, so that PyTorch computes them."""
        self.num_lookahead_steps = 1 if getattr(runner, "runs_ahead", False) else 0
        self.reads_shared_once: bool = getattr(runner, "reads_shared_once", False)
        """Whether decode rows whose block tables begin alike read the K and V of these blocks together, once per
        step."""
        self.drafter = drafter
        """Small model, layer or heads that make drafts; None without drafts. See ``speculative_config``."""
        self.adapters: AdapterMemory | None = getattr(runner, "adapters", None)
        """Adapters that the model runner holds in memory; None if no adapters are served."""
        self.expert_counts: npt.NDArray[np.int64] | None = getattr(runner, "expert_counts", None)
        """[layers of experts, E] number of tokens that each expert has computed so far. Each step adds its tokens in
        place. None if the model has no expert counts."""
        self.images: ImageMemory | None = getattr(runner, "images", None)
        """Encoded images that the model runner holds in memory; None if the model reads no images."""
        self.blocks: BlockBytes | None = getattr(runner, "blocks", None)
        """Content of the runner's blocks; None if they cannot outlive the process."""
        self.heartbeat: float | None = getattr(runner, "heartbeat", None)
        """Seconds after which to call :meth:`check_processes` while no steps are computed; None: never."""
        self._runner = runner
        spans = [group.state_span for group in runner.cache_groups]
        self._input = InputBatch(num_slots, max_model_len, block_size, len(spans), spans)

    def execute(self, out: SchedulerOutput) -> tuple[Any, StepBatch]:
        batch = self._input.apply(out)
        if batch.moves_blocks:
            self._runner.move_blocks(batch)
        try:
            hidden = self._runner.forward(batch)
        except Exception as error:
            if self.drafter is not None or not self._runner.repeats:
                raise
            return _Failed(error), batch
        if self.drafter is not None and not (self.drafter.sleeps and out.keeps_rows):
            self.drafter.follow(out, batch)
        return hidden, batch

    def sample(self, handle: tuple[Any, StepBatch], masks: Masks | None = None) -> PendingTokens:
        hidden, batch = handle
        if isinstance(hidden, _Failed):
            _log.error("a step failed, and its rows are computed again in parts", exc_info=hidden.error)
            tokens: SampledTokens | PendingTokens = compute_apart(batch, masks, self._compute)
        else:
            tokens = self._runner.sample(hidden, batch, masks)
        if isinstance(tokens, SampledTokens):
            if self.drafter is not None and not self.drafter.sleeps:
                self.drafter.saw(hidden, batch, tokens.token_ids)
            self._input.store(batch, tokens.token_ids)
            return _KnownTokens(tokens)
        return _Arriving(tokens, self._input, self._input.expect(batch))

    def _compute(self, batch: StepBatch, masks: Masks | None) -> SampledTokens:
        tokens = self._runner.sample(self._runner.forward(batch), batch, masks)
        return tokens if isinstance(tokens, SampledTokens) else tokens.result()

    def update_weights(self, source: WeightSource, progress: OnProgress | None = None) -> None:
        """Replace all weights of the model; see :class:`~chairlift.executor.executor.LiveWeights`. Raises ConfigError
        for a model without weights."""
        if not isinstance(self._runner, LiveWeights):
            raise ConfigError(
                f"{type(self._runner).__name__} has no weights to replace; load a model that a directory holds"
            )
        self._runner.update_weights(source, progress)

    def collective_seconds(self) -> float:
        """Seconds that this process has waited, inside steps, for the other processes of its model. 0 if there are
        none."""
        waited = getattr(self._runner, "collective_seconds", None)
        return 0.0 if waited is None else float(waited())

    def check_processes(self) -> None:
        """Raise EngineDeadError if another process of the model has ended, or hangs. Call it between two steps."""
        check = getattr(self._runner, "check_processes", None)
        if check is not None:
            check()

    def describe_processes(self) -> list[str]:
        """Text about the memory of each process of a divided model; empty for a model on one process."""
        describe = getattr(self._runner, "describe_processes", list)
        return list(describe())

    def notes(self) -> list[str]:
        """Notes of the runner for the user."""
        return list(getattr(self._runner, "notes", list)())

    def describe_graphs(self) -> str:
        """Text about the CUDA graphs recorded so far; empty if there are none."""
        describe = getattr(self._runner, "describe_graphs", None)
        return "" if describe is None else str(describe())

    def shutdown(self) -> None:
        """End processes that belong to the runner. All other resources are freed together with the object."""
        end = getattr(self._runner, "shutdown", None)
        if end is not None:
            end()
