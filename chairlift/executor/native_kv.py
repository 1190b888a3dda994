"""The KV cache in the layout of the native kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from chairlift.executor.host_memory import HostBlocks
from chairlift.executor.kv_tensors import KVPlan, make_host_blocks
from chairlift.kernels.cpu.library import KV_KINDS, KVLayer, Memory
from chairlift.models.context import LayerCache

__all__ = ["NativeKV"]


class NativeKV:
    """K and V of every layer in one allocation. The system allocates pages as blocks are written.

    ``cl_kv_layer`` defines the contents of a block. A block is contiguous, so copying it is copying bytes.
    """

    def __init__(self, spec: Sequence[LayerCache], plan: KVPlan) -> None:
        blocks = [plan.groups[group].num_blocks for group in plan.layer_groups]
        sizes = [plan.block_size * layer.token_bytes(plan.dtype) for layer in spec]
        memory = Memory(sum(count * size for count, size in zip(blocks, sizes, strict=True)))
        self.layers: list[KVLayer] = []
        self._caches: list[list[npt.NDArray[np.uint8]]] = [[] for _ in plan.groups]
        """Per group, KV of its layers as [num_blocks, bytes of a block]; these arrays keep the memory alive."""
        offset = 0
        for layer, group, count, size in zip(spec, plan.layer_groups, blocks, sizes, strict=True):
            part = memory.part(offset, count * size)
            self._caches[group].append(part.array(np.uint8, (count, size)))
            offset += count * size
            self.layers.append(
                KVLayer(
                    kv=part.address,
                    group=group,
                    kv_heads=layer.num_kv_heads,
                    head_dim=layer.head_dim,
                    block_size=plan.block_size,
                    num_blocks=count,
                    kind=KV_KINDS[plan.dtype],
                )
            )
        self.host = HostBlocks(self._caches, make_host_blocks(plan))

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks (group, source, target). All sources of a group are read before its first target is written."""
        for group in {group for group, _, _ in copies}:
            sources, targets = zip(*((source, target) for g, source, target in copies if g == group), strict=True)
            for cache in self._caches[group]:
                cache[list(targets)] = cache[list(sources)]
