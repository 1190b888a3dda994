"""Sampling parameters of all slots as flat arrays, for the kernels that sample on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.base.row_failures import raw_reason, shaped_reason
from chairlift.base.sampling_row import SamplingRow

__all__ = ["SlotSettings", "failures"]


class SlotSettings:
    """Sampling parameters per slot, a permanent row of the engine's batch. The entries of a slot change only when a
    different request gets the slot."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[SamplingRow | None] = [None] * num_slots
        self._seeds = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float64)
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._log_min_p = np.full(num_slots, -np.inf, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int32)
        self.on_device = np.ones(num_slots, dtype=np.bool_)
        """[S] whether the kernels support all parameters of the slot's row: no penalties, no bias, no
        log-probabilities."""
        self.truncates = np.zeros(num_slots, dtype=np.bool_)
        """[S] whether the kernels apply min-p, top-k or top-p when they sample the slot's row."""

    def update(self, slots: Sequence[int], rows: Sequence[SamplingRow]) -> list[int]:
        """Store the sampling parameters ``rows`` of ``slots``. Returns the slots whose parameters have changed."""
        changed = [slot for slot, row in zip(slots, rows, strict=True) if self._rows[slot] is not row]
        for slot, row in zip(slots, rows, strict=True) if changed else ():
            if self._rows[slot] is not row:
                self._rows[slot] = row
                self._set(slot, row)
        return changed

    def arrays(self, slots: npt.NDArray[np.int32]) -> list[npt.NDArray[Any]]:
        """Parameters of ``slots`` [R]: one array per field of
        :class:`~chairlift.kernels.triton.sampling.SamplingSettings`, in order."""
        fields = (self._seeds, self._temperature, self._log_min_p, self._top_k, self._top_p)
        return [field[slots] for field in fields]

    def _set(self, slot: int, row: SamplingRow) -> None:
        params = row.params
        self.on_device[slot] = not row.reshapes and params.logprobs is None
        # A row that is sampled on the host gets the cheapest parameters on the device, because its device token is not
        # used.
        greedy = params.greedy or not self.on_device[slot]
        self._seeds[slot] = np.uint64(row.seed).astype(np.int64)
        self._temperature[slot] = 0.0 if greedy else params.temperature
        # The logarithm is taken of the float32 value, as on the CPU, so that both give the same bits.
        self._log_min_p[slot] = np.log(np.float32(params.min_p)) if params.min_p > 0.0 else -np.inf
        self._top_k[slot] = params.top_k if 0 < params.top_k < self._vocab_size else 0
        self._top_p[slot] = params.top_p
        limited = params.min_p > 0.0 or self._top_k[slot] > 0 or params.top_p < 1.0
        self.truncates[slot] = not greedy and limited


def failures(drawn: npt.NDArray[np.int32]) -> dict[int, str]:
    """Index of a row that has no token -> reason. ``drawn`` is int32 [R, 3]: the token, the bits of the highest raw
    logit, and the bits of the highest logit after all transforms."""
    errors: dict[int, str] = {}
    for row in np.flatnonzero(drawn[:, 0] < 0).tolist():
        raw, shaped = drawn[row, 1:].copy().view(np.float32).tolist()
        errors[row] = shaped_reason(shaped) if math.isfinite(raw) else raw_reason(raw)
    return errors
