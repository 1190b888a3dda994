"""Converts sampling parameters to records for the native sampler, and converts the sampler's results to the engine's
form.

The parameters of a request never change, so its record is made once and stored per slot. A step copies the records of
its sample positions, and sets position and history of all records with array operations. Only rows whose masked ids
depend on the output (bad words, ``min_tokens``) are processed one by one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.base.row_failures import raw_reason, shaped_reason
from chairlift.base.sampling_params import PARAMETERS
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.step_batch import Masks, SampledTokens, StepBatch
from chairlift.executor.sampling.logprobs import TokenLogprobs
from chairlift.kernels.cpu.library import SAMPLING_ROW, require

__all__ = ["NativeRows", "RowTemplates"]

_REASONS = {
    1: raw_reason(math.nan),
    2: raw_reason(math.inf),
    3: raw_reason(-math.inf),
    4: shaped_reason(-math.inf),
    5: shaped_reason(math.inf),
}
"""Value of ``cl_sample_status`` for a row -> reason why no token could be sampled."""

_COLUMNS = [(name, each) for name, each in PARAMETERS.items() if each.column]
_Records = np.ndarray[Any, np.dtype[np.void]]
_Int32 = npt.NDArray[np.int32]


@dataclasses.dataclass
class NativeRows:
    """Sampling records of R rows for the native function ``cl_head``, and the arrays to which the records point."""

    records: _Records
    """[R] records of type :data:`~chairlift.kernels.cpu.library.SAMPLING_ROW`."""
    needs_logits: npt.NDArray[np.bool_]
    """[R] whether the kernels must store the row's logits, because sampling needs all of them."""
    top_ids: _Int32 | None = None
    """int32 [R, 1 + n], where n is the largest number of log-probabilities that a row asked for: ids with the reported
    log-probabilities. None if no row asked for any."""
    top_logprobs: npt.NDArray[np.float32] | None = None
    kept: list[Any] = dataclasses.field(default_factory=list)
    """Other arrays that the records point to. They must stay alive as long as the records are used."""

    @functools.cached_property
    def storing(self) -> npt.NDArray[np.intp]:
        """Indices of the rows whose logits the kernels must store."""
        return np.flatnonzero(self.needs_logits)

    @functools.cached_property
    def columns(self) -> dict[str, _Int32]:
        """Field name -> view of the field in all records, for the fields that change in every step."""
        return {name: self.records[name] for name in ("position", "history_len", "status", "token")}

    @classmethod
    def for_targets(cls, targets: _Int32, num_logprobs: int, vocab_size: int) -> NativeRows:
        """Rows that draw no token, but report the log-probability of ``targets`` [R]; used for prompt tokens."""
        records = _blank(len(targets))
        records["target"] = targets
        records["num_logprobs"] = min(num_logprobs, vocab_size)
        rows = cls(records, np.full(len(targets), _needs_logits(records, 0)))
        rows.make_room()
        return rows

    def make_room(self) -> None:
        """Allocate the arrays for the reported log-probabilities, if at least one row asked for log-probabilities."""
        max_logprobs = int(self.records["num_logprobs"].max(initial=-1))
        if max_logprobs < 0:
            return
        count = len(self.records)
        self.top_ids = np.zeros((count, 1 + max_logprobs), dtype=np.int32)
        self.top_logprobs = np.zeros((count, 1 + max_logprobs), dtype=np.float32)
        self.records["top_ids"] = _row_addresses(self.top_ids)
        self.records["top_logprobs"] = _row_addresses(self.top_logprobs)

    def part(self, index: npt.NDArray[np.intp]) -> NativeRows:
        """A copy of the rows at ``index``. Its pointers are valid as long as this object exists."""
        return NativeRows(self.records[index], self.needs_logits[index])

    def sampled(self) -> SampledTokens:
        """Tokens, errors and log-probabilities that the kernels have written."""
        statuses = self.columns["status"]
        errors = {int(i): _REASONS[int(statuses[i])] for i in np.flatnonzero(statuses)} if statuses.any() else {}
        entries: list[TokenLogprobs | None] | None = None
        if self.top_ids is not None:
            entries = [None if i in errors else entry for i, entry in enumerate(self.logprobs())]
            entries = entries if any(entry is not None for entry in entries) else None
        return SampledTokens(self.columns["token"].tolist(), entries, errors)

    def logprobs(self) -> list[TokenLogprobs | None]:
        """Log-probabilities per row; None for a row that did not ask for them."""
        if self.top_ids is None or self.top_logprobs is None:
            return [None] * len(self.records)
        reported = zip(self.records["num_logprobs"].tolist(), self.records["rank"].tolist(), strict=True)
        return [
            TokenLogprobs(self.top_ids[i, : 1 + count].copy(), self.top_logprobs[i, : 1 + count].copy(), rank)
            if count >= 0
            else None
            for i, (count, rank) in enumerate(reported)
        ]


class RowTemplates:
    """The part of a slot's sampling record that stays constant, for every slot. It is made when a request gets the
    slot."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._owners: list[SamplingRow | None] = []
        self._records = _blank(0)
        self._needs_logits = np.zeros(0, dtype=np.bool_)
        self._changing = np.zeros(0, dtype=np.bool_)
        """Per slot: whether the set of masked token ids depends on the tokens generated so far."""
        self._kept: list[list[Any]] = []
        self._filled: tuple[list[Any], NativeRows] | None = None
        """(list of sampling parameters of a step, the step's rows). If the next step has the same list, only the
        positions in the rows are updated."""

    def fill(self, batch: StepBatch, masks: Masks | None) -> NativeRows:
        """Records of the sample positions of ``batch``.

        The records point into ``batch.tokens``, which must not change until the kernels have run.
        """
        lengths = batch.sample_lengths
        if self._filled is not None and self._filled[0] is batch.sampling and masks is None:
            rows = self._filled[1]
            rows.columns["position"][:] = rows.columns["history_len"][:] = lengths
            return rows
        slots = batch.sample_slots
        self._admit(batch, slots)
        rows = NativeRows(self._records[slots], self._needs_logits[slots])
        rows.records["position"] = rows.records["history_len"] = lengths
        rows.records["history"] = batch.tokens.ctypes.data + slots.astype(np.uintp) * batch.tokens.strides[0]
        rows.make_room()
        changing = self._changing[slots]
        fixed = masks is None and rows.top_ids is None and not changing.any()
        self._filled = (batch.sampling, rows) if fixed else None
        if changing.any():
            for i in np.flatnonzero(changing).tolist():
                self._mask(rows, i, self._owners[slots[i]], batch.tokens[slots[i], : lengths[i]])
        for i, bits in masks.items() if masks is not None else ():
            rows.kept.append(bits)
            rows.records["mask_bits"][i] = bits.ctypes.data
            rows.needs_logits[i] = True
        return rows

    def _admit(self, batch: StepBatch, slots: _Int32) -> None:
        """Make the constant part of the sampling records of slots that have a new request."""
        if len(self._owners) < len(batch.tokens):
            count = len(batch.tokens)
            self._owners = [None] * count
            self._records = _blank(count)
            self._needs_logits, self._changing = np.zeros((2, count), dtype=np.bool_)
            self._kept = [[] for _ in range(count)]
        owners = self._owners
        sampling = batch.sampling
        for index, slot in zip(batch.sample_rows.tolist(), slots.tolist(), strict=True):
            if owners[slot] is not sampling[index]:
                self._write(slot, sampling[index])

    def _write(self, slot: int, row: SamplingRow) -> None:
        params = row.params
        fields: dict[str, Any] = {
            "seed": row.seed,
            "num_prompt_tokens": row.num_prompt_tokens,
        }
        if params.logprobs is not None:
            fields["num_logprobs"] = min(params.logprobs, self._vocab_size)
        for name, each in _COLUMNS:
            if not (each.draws and params.greedy):
                fields[each.column] = max(getattr(params, name), each.column_low)
        arrays: list[Any] = []
        if params.allowed_token_ids:
            allowed = self._known(sorted(set(params.allowed_token_ids)))
            arrays.append(allowed)
            fields |= {"allowed": allowed.ctypes.data, "num_allowed": len(allowed)}
        if params.logit_bias:
            ids = self._known(list(params.logit_bias))
            bias = np.array([params.logit_bias[token_id] for token_id in ids.tolist()], dtype=np.float32)
            arrays += [ids, bias]
            fields |= {"bias_ids": ids.ctypes.data, "bias": bias.ctypes.data, "num_bias": len(ids)}
        self._records[slot] = _blank(1)[0]
        for name, value in fields.items():
            self._records[name][slot] = value
        self._needs_logits[slot] = _needs_logits(self._records, slot)
        self._changing[slot] = bool(row.bad_word_ids or (params.min_tokens and row.stop_token_ids))
        self._owners[slot], self._kept[slot] = row, arrays

    def _mask(self, rows: NativeRows, i: int, owner: SamplingRow | None, history: _Int32) -> None:
        masked = self._known(owner.masked_token_ids(history) if owner is not None else [])
        if len(masked):
            rows.kept.append(masked)
            rows.records["masked"][i], rows.records["num_masked"][i] = masked.ctypes.data, len(masked)
            rows.needs_logits[i] = _needs_logits(rows.records, i)

    def _known(self, token_ids: Sequence[int]) -> _Int32:
        """The given token ids that are below the size of the vocabulary."""
        return np.array([i for i in token_ids if 0 <= i < self._vocab_size], dtype=np.int32)


def _blank(count: int) -> _Records:
    """``count`` sampling records without settings: each asks for the token with the highest logit."""
    records = np.zeros(count, dtype=SAMPLING_ROW)
    records["top_p"] = records["repetition"] = 1
    records["num_logprobs"] = records["target"] = -1
    return records


def _needs_logits(records: _Records, i: int) -> bool:
    return bool(require().cl_needs_logits(records.ctypes.data + i * SAMPLING_ROW.itemsize))


def _row_addresses(array: npt.NDArray[Any]) -> npt.NDArray[np.uintp]:
    return array.ctypes.data + np.arange(len(array), dtype=np.uintp) * np.uintp(array.strides[0])
