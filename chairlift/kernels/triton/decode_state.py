# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""Decoding state of every running request, stored and updated on the device.

It mirrors the host's :class:`~chairlift.executor.input_batch.InputBatch`: each request has a permanent row, here called
slot. A decode step reads its inputs from this state and writes the sampled tokens back into it. Therefore one captured
graph can run step after step, and the host may run one step ahead. The host learns some changes late, for example that
a request has ended. It sends them as a difference before the next launch. All state is one block of int32 memory. A
difference is a list of words and their indices, and one launch writes all differences of a step. The host keeps a copy
of the state, and sends only words that changed.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.triton.launch import APPLY_BLOCK
from chairlift.kernels.triton.sampling import SamplingSettings

__all__ = ["DecodeInputs", "DecodeState"]

_NAMES_64 = ("seeds", "top_p")
_NAMES_32 = ("tokens", "num_computed", "slots", "adapters", "top_k", "temperature", "log_min_p")
_DTYPES = {"seeds": torch.int64, "top_p": torch.float64, "temperature": torch.float32, "log_min_p": torch.float32}
_NUMPY = {torch.int64: np.int64, torch.float64: np.float64, torch.float32: np.float32, torch.int32: np.int32}
_UNKNOWN = -(2**31)
"""Marks a word in the host's copy of the state whose value only the device knows. It is neither a valid token id nor a
valid length."""


@triton.jit(do_not_specialize=["count"])
def _write(
    memory_ptr: tl.tensor, places_ptr: tl.tensor, words_ptr: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Kernel that writes words[i] to memory[places[i]]. One program per block of words. All places are different."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places_ptr + i, mask=i < count, other=0)
    tl.store(memory_ptr + place, tl.load(words_ptr + i, mask=i < count, other=0), mask=i < count)


@triton.jit(do_not_specialize=["num_rows"])
def _begin(
    token_ids_ptr: tl.tensor, positions_ptr: tl.tensor, seq_lens_ptr: tl.tensor, slot_mapping_ptr: tl.tensor,
    row_adapters_ptr: tl.tensor, slots_ptr: tl.tensor, tokens_ptr: tl.tensor, num_computed_ptr: tl.tensor,
    adapters_ptr: tl.tensor, memory_ptr: tl.tensor, table_starts_ptr: tl.tensor, num_rows: tl.tensor,
    TABLE_WIDTH: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel that prepares the computation of one more token for each row. One program per block of rows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_rows
    slot = tl.load(slots_ptr + i, mask=inside, other=-1)
    active = slot >= 0
    position = tl.load(num_computed_ptr + slot, mask=active, other=0)
    tl.store(token_ids_ptr + i, tl.load(tokens_ptr + slot, mask=active, other=0), mask=inside)
    tl.store(positions_ptr + i, position, mask=inside)
    tl.store(seq_lens_ptr + i, tl.where(active, position + 1, 0), mask=inside)
    tl.store(row_adapters_ptr + i, tl.load(adapters_ptr + slot, mask=active, other=-1), mask=inside)
    tl.store(num_computed_ptr + slot, position + 1, mask=active)
    block = position // BLOCK_SIZE
    held = active & (block < TABLE_WIDTH)
    for group in tl.static_range(NUM_GROUPS):
        table = memory_ptr + tl.load(table_starts_ptr + group)
        number = tl.load(table + slot.to(tl.int64) * TABLE_WIDTH + block, mask=held, other=0).to(tl.int64)
        place = tl.where(held, number * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slot_mapping_ptr + group * num_rows + i, place, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _store(
    tokens_ptr: tl.tensor, slots_ptr: tl.tensor, sampled_ptr: tl.tensor, num_rows: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Kernel that stores sampled tokens in their slots. One program per block of rows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + i, mask=i < num_rows, other=-1)
    token = tl.load(sampled_ptr + i, mask=i < num_rows, other=0)
    tl.store(tokens_ptr + slot, tl.maximum(token, 0), mask=slot >= 0)


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode step with B rows: buffers at fixed addresses, which :meth:`DecodeState.begin_step` fills."""

    token_ids: Tensor
    """int32 [B], the token that each row computes in this step; 0 in padding rows."""
    positions: Tensor
    """int32 [B], the position of each row's token in its sequence; 0 in padding rows."""
    seq_lens: Tensor
    """int32 [B], number of tokens in each sequence after this step, which is also the index of the next token; 0 in
    padding rows."""
    slot_mapping: Tensor
    """int64 [groups, B], slot where each token's K and V are written; -1 in padding rows and past the end of a block
    table."""
    adapters: Tensor
    """int32 [B], slot of each row's adapter in the pool of adapters; -1 for none, and in padding rows."""


class DecodeState:
    """Decoding state of ``num_slots`` requests. Every attribute is a tensor on the device: a view of one block of
    memory.

    :meth:`note` and :meth:`note_tables` collect differences; :meth:`flush` sends them all together, and must not be
    captured in a graph. :meth:`begin_step` and :meth:`store` can be captured. All methods run on the current stream.
    """

    tokens: Tensor
    """int32 [S], the newest token of each slot, which is its next input."""
    num_computed: Tensor
    """int32 [S], the number of tokens of each slot whose K and V are in the cache."""
    slots: Tensor
    """int32 [S], the slot of each row in the decode batch; -1 after the last row."""
    adapters: Tensor
    """int32 [S], the place of each slot's adapter in the pool of adapters; -1 for none."""
    block_tables: list[Tensor]
    """Per cache group, the block tables of all slots, int32 [S, max_blocks]."""
    sampling: SamplingSettings

    def __init__(
        self, num_slots: int, max_blocks: int, num_groups: int, block_size: int, device: torch.device,
        *, most_differences: int = 1 << 16,
    ) -> None:  # fmt: skip
        self.num_slots = num_slots
        self._block_size = block_size
        starts = {}
        length = 0
        for name in (*_NAMES_64, *_NAMES_32, *(f"table{group}" for group in range(num_groups))):
            starts[name] = length
            words = 1
            if name in _NAMES_64:
                words = 2
            elif name.startswith("table"):
                words = max_blocks
            length += num_slots * words
        if length > 2**31 - 1:
            raise InvariantError(f"{num_slots} slots of {max_blocks} blocks need {length:,} words; 2^31 are too many")
        self._starts = starts
        self._memory = torch.zeros(length, dtype=torch.int32, device=device)
        fields = {name: self._view(name) for name in (*_NAMES_64, *_NAMES_32)}
        self.tokens = fields["tokens"]
        self.num_computed = fields["num_computed"]
        self.slots, self.adapters = fields["slots"], fields["adapters"]
        for field in (self.slots, self.adapters):
            field.fill_(-1)
        self.block_tables = [self._view(f"table{group}").view(num_slots, -1) for group in range(num_groups)]
        self.sampling = SamplingSettings(*(fields[field.name] for field in dataclasses.fields(SamplingSettings)))
        table_starts = [starts[f"table{group}"] for group in range(num_groups)]
        self._table_starts = torch.tensor(table_starts, dtype=torch.int64, device=device)
        self._mirror = np.zeros(length, dtype=np.int32)
        """The host's copy of the device memory, as it will be after all noted differences have been sent;
        :data:`_UNKNOWN` where only the device knows the value."""
        for name in ("slots", "adapters"):
            self._mirror[starts[name] : starts[name] + num_slots] = -1
        self._noted: list[npt.NDArray[np.int64]] = []
        self._most = most_differences
        self._sent = torch.empty(2 * most_differences + 3, dtype=torch.int32, device=device)
        # There are two buffers. The host fills one while the copy from the other may still be running.
        self._buffers = itertools.cycle(self._make_buffer(device.type == "cuda") for _ in range(2))

    def inputs(self, num_rows: int) -> DecodeInputs:
        """Buffers for steps of ``num_rows`` rows, which :meth:`begin_step` fills. All are aligned, so that one compiled
        kernel works for all of them."""
        flat = torch.zeros((4, -(-num_rows // 4) * 4), dtype=torch.int32, device=self._memory.device)[:, :num_rows]
        mapping = torch.full((len(self.block_tables), num_rows), -1, dtype=torch.int64, device=self._memory.device)
        return DecodeInputs(flat[0], flat[1], flat[2], mapping, flat[3])

    def note(self, name: str, places: npt.NDArray[np.integer[Any]], values: npt.NDArray[Any]) -> None:
        """Set the elements at indices ``places`` of ``name`` to ``values``. Values that did not change are not sent.

        ``name`` is ``tokens``, ``num_computed``, ``slots``, ``adapters`` or a field of :class:`SamplingSettings`. Seeds
        are given as int64. Nothing is sent before :meth:`flush`.

        Raises: InvariantError: an index is out of range.
        """
        dtype = _NUMPY[_DTYPES.get(name, torch.int32)]
        self._note(self._starts[name], len(self._view(name)), places, np.ascontiguousarray(values, dtype=dtype))

    def note_tables(self, group: int, slots: npt.NDArray[np.int32], tables: npt.NDArray[np.int32]) -> None:
        """Set the first M entries of the block tables of ``slots`` [N], in one cache group, to ``tables`` [N, M]."""
        start, (num_slots, width) = self._starts[f"table{group}"], self.block_tables[group].shape
        held = self._mirror[start : start + num_slots * width].reshape(num_slots, width)[slots, : tables.shape[1]]
        row, column = np.nonzero(held != tables)
        if len(row):
            self._note(start, num_slots * width, slots[row].astype(np.int64) * width + column, tables[row, column])

    def forget(self, slots: npt.NDArray[np.int32]) -> None:
        """Mark the tokens and lengths of ``slots`` as unknown to the host, because from now on the device updates
        them."""
        for name in ("tokens", "num_computed"):
            self._mirror[self._starts[name] + slots] = _UNKNOWN

    def advanced(self, slots: npt.NDArray[np.int32], num_computed: npt.NDArray[np.int32]) -> None:
        """Note that the device has computed ``num_computed`` tokens of ``slots``, or will have done so after the
        launched steps."""
        self._mirror[self._starts["num_computed"] + slots] = num_computed

    def flush(self) -> None:
        """Send the noted differences in as few launches as possible. Without differences, nothing is launched."""
        if not self._noted:
            return
        places = np.unique(np.concatenate(self._noted)).astype(np.int32)
        for start in range(0, len(places), self._most):
            part = places[start : start + self._most]
            self._send(part, self._mirror[part])
        self._noted.clear()

    def begin_step(self, inputs: DecodeInputs) -> None:
        """Fill ``inputs`` for the first B rows of ``slots``, and count their tokens as computed.

        All inputs come from device memory, so a captured call works for every step.
        """
        num_rows = len(inputs.token_ids)
        if num_rows > self.num_slots:
            raise InvariantError(f"a step of {num_rows} rows is larger than the {self.num_slots} slots")
        _begin[(-(-num_rows // APPLY_BLOCK),)](
            inputs.token_ids, inputs.positions, inputs.seq_lens, inputs.slot_mapping, inputs.adapters, self.slots,
            self.tokens, self.num_computed, self.adapters, self._memory, self._table_starts, num_rows,
            TABLE_WIDTH=self.block_tables[0].shape[1], NUM_GROUPS=len(self.block_tables),
            BLOCK_SIZE=self._block_size, BLOCK=APPLY_BLOCK,
        )  # fmt: skip

    def store(self, slots: Tensor, sampled: Tensor) -> None:
        """Make ``sampled`` (int32 [R]) the newest tokens of ``slots`` (int32 [R], -1 for none).

        In a failed row, the token -1 is replaced by the valid id 0. The row is removed afterwards.
        """
        if len(sampled):
            grid = (-(-len(sampled) // APPLY_BLOCK),)
            _store[grid](self.tokens, slots, sampled, len(sampled), BLOCK=APPLY_BLOCK)

    def _note(self, start: int, size: int, places: npt.NDArray[np.integer[Any]], values: npt.NDArray[Any]) -> None:
        if not len(places):
            return
        if not 0 <= places.min() <= places.max() < size:
            raise InvariantError(f"places {places.min()} to {places.max()} are not all within {size} elements")
        words = values.view(np.int32).reshape(len(places), -1)
        width = words.shape[1]
        at = start + width * places.astype(np.int64)[:, None] + np.arange(width)
        new = self._mirror[at] != words
        if new.any():
            self._mirror[at[new]] = words[new]
            self._noted.append(at[new])

    def _view(self, name: str) -> Tensor:
        """The part of the device memory that holds ``name``, as a one-dimensional tensor in this part's dtype."""
        starts = [*self._starts.values(), len(self._memory)]
        start = self._starts[name]
        return self._memory[start : min(end for end in starts if end > start)].view(_DTYPES.get(name, torch.int32))

    def _make_buffer(self, pinned: bool) -> tuple[Tensor, torch.cuda.Event | None]:
        """Host memory for the differences of one launch, and the CUDA event that is recorded after it was copied."""
        host = torch.empty(len(self._sent), dtype=torch.int32, pin_memory=pinned)
        return host, torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def _send(self, places: npt.NDArray[np.int32], words: npt.NDArray[np.int32]) -> None:
        count = len(places)
        # Start of the words. It is aligned, because otherwise Triton would compile another kernel.
        second = -(-count // 4) * 4
        host, copied = next(self._buffers)
        if copied is not None:
            copied.synchronize()
        host[:count], host[second : second + count] = torch.from_numpy(places), torch.from_numpy(words)
        self._sent[: second + count].copy_(host[: second + count], non_blocking=True)
        if copied is not None:
            copied.record()
        grid = (-(-count // APPLY_BLOCK),)
        _write[grid](self._memory, self._sent, self._sent[second:], count, BLOCK=APPLY_BLOCK)
