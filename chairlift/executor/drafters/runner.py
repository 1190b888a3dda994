"""What a drafter needs from the runner of the served model. The runner of a backend with the ability ``draft_models``
has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.step_batch import Masks, SampledTokens, StepBatch
from chairlift.executor.local import ModelRunner
from chairlift.kernels.recording import Recorder, Value

__all__ = ["DraftProgram", "DraftRunner"]


class DraftProgram(Protocol):
    """A recorded layer, or recorded heads, ready to run. Buffers have one row per token."""

    def rows_of(self, value: Value, count: int) -> Tensor:
        """The first ``count`` rows [``count``, width] of a value's buffer, in its dtype. The buffer of an input is
        written before a run; that of a result is read after it. The next run overwrites both."""
        ...

    def run(self, step: StepBatch, kept: npt.NDArray[np.intp]) -> Tensor:
        """Compute all of it for the T tokens of ``step``, whose inputs are in the first T rows of their buffers.
        Returns the output [K, D] of the tokens ``kept`` [K]. The rows of other results are those of ``kept``, too."""
        ...

    def run_until(self, value: Value, step: StepBatch) -> None:
        """Compute ``value``, and all that was recorded before it, for the T tokens of ``step``."""
        ...


class DraftRunner(ModelRunner, Protocol):
    """Runs the served model for a drafter, and a small model or the recorded layers of a drafter beside it. Hidden
    states have the width D of the served model and its :attr:`dtype`."""

    captures: bool
    """Whether steps store :attr:`tapped`. A change applies to the next step."""

    @property
    def draft(self) -> DraftRunner | None:
        """Runner of the small model; None without such a model. It uses the served model's cache, threads and block
        tables."""
        ...

    @property
    def windows(self) -> Mapping[int, int]:
        """Number of a cache group -> its sliding window in positions, for the groups of the model's layers that have
        one."""
        ...

    @property
    def draft_blocks(self) -> tuple[int, int]:
        """(number of the cache group, number of its blocks) of the drafter's own cache layers."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the served model's activations."""
        ...

    @property
    def tapped(self) -> Tensor:
        """[T, number of taps * D]: hidden states of the newest step before the layers that the drafter taps, if
        :attr:`captures` is true. The address stays; each step overwrites the rows."""
        ...

    def forward(self, batch: StepBatch) -> Tensor:
        """Compute a step. Returns the hidden states [K, D] of the tokens that are needed, see :meth:`sample_places`.
        The next step overwrites them."""
        ...

    def sample(self, hidden: Any, batch: StepBatch, masks: Masks | None) -> SampledTokens:
        """Sample one token per sample position of ``batch``, from the result of :meth:`forward`."""
        ...

    def sample_places(self, batch: StepBatch) -> npt.NDArray[np.int32]:
        """[P] index of each sample position's hidden state in the result of :meth:`forward`."""
        ...

    def draw(
        self, states: Tensor, batch: StepBatch, head: Any = None, token_ids: npt.NDArray[np.int32] | None = None
    ) -> list[int]:
        """Sample one token for each of the R sample positions of ``batch``, with the position's parameters and noise;
        -1 for a position for which no token could be sampled.

        Args:
            states: Hidden states [R, width of the head].
            batch: Tokens, slots and sampling parameters of the positions.
            head: Weights [V', width] of an output head, in the backend's layout; None: the served model's head.
            token_ids: int32 [V'], ascending: token id of each row of ``head``. None: row i stands for id i.
        """
        ...

    def recorder(self) -> Recorder:
        """A new recorder for the layer or the heads of a drafter, with the served model's dtype. Its recording goes to
        :meth:`program_of`."""
        ...

    def embed(self, token_ids: Value) -> Tensor:
        """Record the look-up of ``token_ids`` [T] in the served model's embedding table. The result is [T, D]."""
        ...

    def program_of(
        self, recorder: Recorder, output: Value, max_tokens: int, others: Sequence[Value] = ()
    ) -> DraftProgram:
        """The program that computes ``output`` for at most ``max_tokens`` tokens. ``others`` are further results that
        can be read. It uses the served model's threads and the drafter's own cache layers."""
        ...
