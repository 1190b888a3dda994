"""What the rows of a decode step read together: found on the host before the step, and sent to fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chairlift.base.step_batch import StepBatch
from chairlift.executor.backends.torch.step_buffer import StepBuffer
from chairlift.executor.kv_tensors import KVPlan
from chairlift.kernels.triton.launch import AttentionLaunch
from chairlift.kernels.triton.paged_attention import SharedTiles
from chairlift.kernels.triton.shared_prefixes import (
    SharedRows,
    find_shared_tiles,
    least_rows,
    nothing_shared,
    rows_per_task,
    saved_seconds,
)
from chairlift.models.hf_config import NetworkConfig

__all__ = ["StepShares"]


class StepShares:
    """Decides for each decode step which rows share tiles of keys, and holds the arrays of these tasks.

    The arrays have fixed shapes and addresses for each padded number of rows, so a graph that was recorded with them
    serves any tasks.
    """

    def __init__(self, plan: KVPlan, network: NetworkConfig, num_multiprocessors: int, device: torch.device) -> None:
        self._windows = [group.window for group in plan.groups]
        self._has_keys = [group.state_span is None for group in plan.groups]
        """Whether the blocks of each group hold K and V; the others hold recurrent states, which no rows share."""
        self._num_layers = [
            plan.layer_groups.count(group) if has_keys else 0 for group, has_keys in enumerate(self._has_keys)
        ]
        self._block_size = plan.block_size
        self._head_dim = network.head_dim
        self._itemsize = plan.dtype.itemsize
        self._num_kv_heads = network.num_key_value_heads
        self._group = network.num_attention_heads // network.num_key_value_heads
        self._multiprocessors = num_multiprocessors
        self._device = device
        self._buffers: dict[int, StepBuffer] = {}

    def can_share(self, launch: AttentionLaunch) -> bool:
        """Whether a tile of queries has room for a second row."""
        return rows_per_task(launch, self._group) > 1

    def find(self, batch: StepBatch, size: int, launch: AttentionLaunch) -> list[SharedRows] | None:
        """Per cache group, the tasks of ``batch``, a decode step that is padded to ``size`` rows; None if each row
        should read its keys alone."""
        if len(batch.slots) < least_rows(self._num_kv_heads, launch, self._multiprocessors):
            return None
        found = [
            find_shared_tiles(
                batch.block_tables[group],
                batch.seq_lens,
                size,
                block_size=self._block_size,
                window=window,
                launch=launch,
                group=self._group,
            )
            if self._has_keys[group]
            else None
            for group, window in enumerate(self._windows)
        ]
        if not any(found):
            return None
        tile_bytes = 2 * launch.block_n * self._head_dim * self._itemsize
        # The launch before attention is recorded for all layers or for none.
        saved = sum(
            layers * saved_seconds(tasks, self._num_kv_heads, launch, tile_bytes, self._multiprocessors)
            for layers, tasks in zip(self._num_layers, found, strict=True)
        )
        if saved <= 0:
            return None
        nobody = nothing_shared(size, rows_per_task(launch, self._group))
        return [tasks or nobody for tasks in found]

    def send(self, size: int, found: Sequence[SharedRows]) -> list[SharedTiles]:
        """Start to copy the tasks of a step of ``size`` rows to the device, and return them as tensors there. The
        tensors of a size always have the same addresses."""
        if size not in self._buffers:
            self._buffers[size] = StepBuffer(self._device)
        arrays = [array for tasks in found for array in (tasks.members, tasks.ends)]
        tensors = self._buffers[size].send(arrays)
        return [SharedTiles(*tensors[at : at + 2]) for at in range(0, len(tensors), 2)]
