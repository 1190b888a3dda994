"""The KV cache in the memory layout of the native kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.executor.host_memory import HostBlocks
from chairlift.executor.kv_tensors import KVPlan, make_host_blocks
from chairlift.kernels.cpu.library import KV_KINDS, STATE_KIND, KVLayer, Memory
from chairlift.models.context import LayerCache, LayerState

__all__ = ["NativeKV"]


class NativeKV:
    """K and V, or recurrent states, of every layer in one piece of memory. The operating system allocates a page when a
    block in it is first written.

    ``cl_kv_layer`` defines the contents of a block. A block is contiguous, so it can be copied as bytes. Each part of a
    recurrent layer's state is a separate array: the first part has the layer's index in :attr:`layers`; further parts
    come after all layers, at the index in :attr:`parts`. ``dtype`` is the model's data type (default: that of K and V).
    """

    def __init__(self, spec: Sequence[LayerCache | LayerState], plan: KVPlan, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or plan.dtype
        sizes = [
            layer.part_bytes(dtype)
            if isinstance(layer, LayerState)
            else [plan.block_size * layer.token_bytes(plan.dtype)]
            for layer in spec
        ]
        counts = [plan.groups[group].num_blocks for group in plan.layer_groups]
        padded = [
            [-(-count * size // _ALIGNED) * _ALIGNED for size in each]
            for count, each in zip(counts, sizes, strict=True)
        ]
        memory = Memory(sum(map(sum, padded)))
        offset = 0
        self.states: dict[int, tuple[Tensor, ...]] = {}
        """Index of a recurrent layer -> the parts of its states, each [num_blocks, ...]."""
        self.parts: dict[tuple[int, int], int] = {}
        """(index of a recurrent layer, index of a part of its state) -> index in :attr:`layers`."""
        self._caches: list[list[npt.NDArray[np.uint8]]] = [[] for _ in plan.groups]
        """Per group: the memory of its layers as arrays [num_blocks, bytes of a block]."""
        self.layers = list[KVLayer]()
        further = list[KVLayer]()
        for number, (layer, group, count) in enumerate(zip(spec, plan.layer_groups, counts, strict=True)):
            regions = []
            for size, room in zip(sizes[number], padded[number], strict=True):
                regions.append(memory.part(offset, room))
                self._caches[group].append(regions[-1].array(np.uint8, (count, size)))
                offset += room
            if isinstance(layer, LayerCache):
                self.layers.append(_kv_layer(layer, group, count, regions[0], plan))
                continue
            span = plan.groups[group].state_span
            structs = [
                _state_layer(group, count, region, size, span)
                for region, size in zip(regions, sizes[number], strict=True)
            ]
            self.states[number] = tuple(
                region.tensor(part.dtype or dtype, (count, *part.shape))
                for region, part in zip(regions, layer.parts, strict=True)
            )
            self.layers.append(structs[0])
            for part, struct in enumerate(structs[1:], 1):
                self.parts[number, part] = len(spec) + len(further)
                further.append(struct)
            self.parts[number, 0] = number
        self.layers += further
        self.host = HostBlocks(self._caches, make_host_blocks(plan))

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks; ``copies`` has (group, source block, target block). All source blocks of a group are read before
        its first target block is written."""
        for group in {group for group, _, _ in copies}:
            sources, targets = zip(*((source, target) for g, source, target in copies if g == group), strict=True)
            for cache in self._caches[group]:
                cache[list(targets)] = cache[list(sources)]


_ALIGNED = 64
"""The address of each array is a multiple of this number of bytes."""


def _kv_layer(layer: LayerCache, group: int, count: int, region: Memory, plan: KVPlan) -> KVLayer:
    return KVLayer(
        kv=region.address,
        group=group,
        kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        block_size=plan.block_size,
        num_blocks=count,
        kind=KV_KINDS[plan.dtype],
    )


def _state_layer(group: int, count: int, region: Memory, nbytes: int, span: int | None) -> KVLayer:
    return KVLayer(kv=region.address, group=group, head_dim=nbytes, block_size=span, num_blocks=count, kind=STATE_KIND)
