"""Memory on a device for the adapters of a step: a fixed number of slots, each with room for one whole adapter.

Every slot has the same layout, so an adapter is two copies (its matrices, and words that describe them), and kernels
find a layer's matrices of any slot from the slot's number. The addresses never change, so a captured graph serves any
mixture of adapters. For each layer, a slot holds:

- matrix A, [parts, rank, in]: layers that this package merges (query, key and value) have a part for each;
- matrix B, [out, rank]: each output is changed by one part at most;
- words: the rank of each part, whether there are gains and offsets, and for each output its part, gain and offset.

``rank`` is the largest rank of the pool. Kernels read neither unused ranks nor unused slots, so these need no zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from chairlift.errors import InvariantError, ModelLoadError
from chairlift.kernels.cpu.low_rank import MatrixChange

__all__ = ["HEAD_WORDS", "RANK_UNIT", "LowRankPool", "LowRankSite", "PackedSlot", "PoolLayout", "SiteShape"]

RANK_UNIT: Final = 16
"""The largest rank of a pool is rounded up to a multiple of this: tensor cores multiply as many numbers at a time."""
HEAD_WORDS: Final = 8
"""Words of a layer before those of its outputs: the ranks of its parts, and in the last one, whether there are gains
and offsets."""
MAX_PARTS: Final = HEAD_WORDS - 1
_ALIGNMENT: Final = 64
"""Each matrix begins at a multiple of this number of elements."""


class SiteShape(NamedTuple):
    """Shape of a linear layer that adapters may change."""

    out_features: int
    in_features: int
    parts: int
    """Largest number of low-rank parts that one adapter may have for this layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class LowRankSite:
    """A layer's matrices in all S slots of a pool: views of the pool's memory."""

    a: Tensor
    """[S, parts, rank, in] in the model's dtype."""
    b: Tensor
    """[S, out, rank] in the model's dtype."""
    words: Tensor
    """int32 [S, HEAD_WORDS + 3 out]: the ranks of the parts, whether there are gains and offsets, the part of each
    output (-1: none), the bits of its gain and of its offset, both float32."""


class PackedSlot(NamedTuple):
    """A whole adapter in the layout of a slot, in host memory."""

    numbers: Tensor
    words: Tensor


class PoolLayout:
    """Places of the layers' matrices in a slot. ``shapes`` has the layers by name; no rank is larger than
    ``max_rank``."""

    def __init__(self, shapes: Mapping[str, SiteShape], max_rank: int, dtype: torch.dtype) -> None:
        self.shapes = dict(shapes)
        self.rank = -(-max_rank // RANK_UNIT) * RANK_UNIT
        self.dtype = dtype
        self._places: dict[str, tuple[int, int, int]] = {}
        """Name of a layer -> (first number of A, first number of B, first word)."""
        numbers = words = 0
        for name, (outputs, inputs, parts) in self.shapes.items():
            if not 1 <= parts <= MAX_PARTS:
                raise InvariantError(f"{name} has {parts} parts, and a pool holds 1 to {MAX_PARTS} for each layer")
            b = numbers + _aligned(parts * self.rank * inputs)
            self._places[name] = numbers, b, words
            numbers = b + _aligned(outputs * self.rank)
            words += _aligned(HEAD_WORDS + 3 * outputs)
        self.numbers, self.words = numbers, words

    @property
    def slot_bytes(self) -> int:
        """Number of bytes of one slot."""
        return self.numbers * self.dtype.itemsize + 4 * self.words

    def views(self, name: str, numbers: Tensor, words: Tensor) -> LowRankSite:
        """A layer's matrices in the memory [S, numbers] and [S, words] of S slots."""
        outputs, inputs, parts = self.shapes[name]
        a, b, first = self._places[name]
        slots = len(numbers)
        return LowRankSite(
            numbers[:, a : a + parts * self.rank * inputs].view(slots, parts, self.rank, inputs),
            numbers[:, b : b + outputs * self.rank].view(slots, outputs, self.rank),
            words[:, first : first + HEAD_WORDS + 3 * outputs],
        )

    def pack(self, changes: Mapping[str, MatrixChange], *, pinned: bool = False) -> PackedSlot:
        """An adapter's ``changes`` by the name of the layer, in the layout of a slot.

        Raises ModelLoadError for a layer without a place, and for changes that are not low-rank matrices, gains and
        offsets.
        """
        numbers = torch.zeros((1, self.numbers), dtype=self.dtype, pin_memory=pinned)
        words = torch.zeros((1, self.words), dtype=torch.int32, pin_memory=pinned)
        for name in self.shapes:
            site = self.views(name, numbers, words)
            site.words[0, HEAD_WORDS : HEAD_WORDS + self.shapes[name].out_features] = -1
        for name, change in changes.items():
            if name not in self.shapes:
                raise ModelLoadError(f"it changes {name}, to which the GPU's kernels add no low-rank matrices")
            self._fill(name, self.views(name, numbers, words), change)
        return PackedSlot(numbers[0], words[0])

    def _fill(self, name: str, site: LowRankSite, change: MatrixChange) -> None:
        outputs, _, most = self.shapes[name]
        if change.whole is not None:
            raise ModelLoadError(f"it replaces the weight of {name}, which the GPU's kernels do not")
        if len(change.parts) > most or any(len(part.a) > self.rank for part in change.parts):
            raise InvariantError(f"{name} has parts of the ranks {[len(part.a) for part in change.parts]}, and a slot"
                                 f" has room for {most} of rank {self.rank}")  # fmt: skip
        words = site.words[0]
        of_outputs = words[HEAD_WORDS:].view(3, outputs)
        for p, part in enumerate(change.parts):
            rows, rank = slice(part.start, part.start + len(part.b)), len(part.a)
            if bool((of_outputs[0, rows] >= 0).any()):
                raise ModelLoadError(f"two low-rank matrices of {name} change the same outputs")
            site.a[0, p, :rank], site.b[0, rows, :rank] = part.a, part.b
            of_outputs[0, rows], words[p] = p, rank
        if change.gains is not None or change.offsets is not None:
            words[MAX_PARTS] = 1
            bits = of_outputs[1:].view(torch.float32)
            bits[0] = 1.0 if change.gains is None else change.gains
            bits[1] = 0.0 if change.offsets is None else change.offsets


class LowRankPool:
    """``num_slots`` slots of a ``layout`` in the memory of ``device``."""

    def __init__(self, layout: PoolLayout, num_slots: int, device: torch.device) -> None:
        self.layout = layout
        self.numbers = torch.zeros((num_slots, layout.numbers), dtype=layout.dtype, device=device)
        self.words = torch.zeros((num_slots, layout.words), dtype=torch.int32, device=device)
        self.sites = {name: layout.views(name, self.numbers, self.words) for name in layout.shapes}

    def __len__(self) -> int:
        return len(self.numbers)

    def copy(self, slot: int, adapter: PackedSlot) -> None:
        """Copy an adapter into a slot, on the current stream."""
        self.numbers[slot].copy_(adapter.numbers, non_blocking=True)
        self.words[slot].copy_(adapter.words, non_blocking=True)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
