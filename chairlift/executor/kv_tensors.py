"""Size of the KV cache, and the tensors that hold it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from chairlift.config import CacheGroup
from chairlift.errors import ConfigError
from chairlift.executor.host_memory import host_memory
from chairlift.kernels.control_group import memory_limit
from chairlift.models.context import LayerCache

__all__ = [
    "DEFAULT_SHARE",
    "KVPlan",
    "available_memory",
    "gpu_cache_memory",
    "make_host_blocks",
    "make_kv_caches",
    "plan_kv_cache",
]

DEFAULT_SHARE = 0.4
"""Default share of the available memory that the KV cache takes on a CPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVPlan:
    """Plan of the KV cache: cache groups, layers, and their bytes."""

    groups: list[CacheGroup]
    layer_groups: list[int]
    """Layer -> group."""
    block_size: int
    dtype: torch.dtype
    """Dtype of K and V in the cache. int8 means codes with a scale and a minimum of each token and head."""
    bytes_per_token: int
    """Bytes of one token's K and V in all layers together."""
    total_bytes: int
    block_bytes: list[int]
    """Per group, bytes of one block in all its layers, K and V."""
    swap_directory: str | None = None
    """Directory of the file with the host blocks; None: they are in memory."""
    gain: str = ""
    """How many more tokens fit than in the model's dtype, in words; empty if K and V have that dtype."""

    @property
    def num_tokens(self) -> int:
        """Number of positions that fit into every group."""
        return min(group.num_blocks - 1 for group in self.groups) * self.block_size

    @property
    def host_bytes(self) -> int:
        """Host memory for the KV of preempted requests."""
        return sum(group.num_host_blocks * size for group, size in zip(self.groups, self.block_bytes, strict=True))

    def describe(self, max_model_len: int) -> str:
        """The plan in words."""
        length = min(2048, max_model_len)
        chats = self.num_tokens // length
        size = self.total_bytes / 2**30
        room = f"room for about {chats:,} chats of {length:,} tokens at once"
        kept = f"KV cache: {size:.2f} GiB{' of int8' if self.gain else ''}"
        plan = f"{kept}, {self.num_tokens:,} tokens in blocks of {self.block_size}{self.gain}; {room}"
        hosts = min(group.num_host_blocks for group in self.groups)
        if not hosts:
            return f"{plan}; no swap space"
        where = "host memory" if self.swap_directory is None else f"a file in {self.swap_directory}"
        swap = f"swap space for {hosts * self.block_size:,} tokens of preempted requests"
        return f"{plan}; {swap}: {self.host_bytes / 2**30:.2f} GiB of {where}"


def available_memory(device: torch.device) -> int:
    """Bytes that this process may use: free memory of the GPU, or on the CPU the limit of the machine and its control
    group."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    total = 0
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limit = memory_limit()
    return (total if limit is None else min(total or limit, limit)) or 4 << 30


def gpu_cache_memory(free: int, total: int, utilization: float, step_bytes: int) -> int:
    """Bytes for the KV cache such that ``utilization`` of a GPU with ``total`` bytes is in use, steps included.

    ``free`` is the free memory after the weights were loaded; others may use memory, too. Raises ConfigError when
    nothing is left.
    """
    cache = int(total * utilization) - (total - free) - step_bytes
    if cache <= 0:
        raise ConfigError(
            f"of the GPU's {total:,} bytes {total - free:,} are in use and a step may need {step_bytes:,}, so within "
            f"gpu_memory_utilization {utilization:g} nothing is left for the KV cache; raise it, lower "
            "max_num_batched_tokens, or free memory"
        )
    return cache


def plan_kv_cache(
    spec: list[LayerCache],
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    block_size: int,
    memory_bytes: int,
    num_blocks: int | None,
    most_tokens: int,
    swap_bytes: int | None = 0,
    swap_directory: str | None = None,
) -> KVPlan:
    """Divide ``memory_bytes`` into blocks. ``num_blocks`` overrides the number. There are never more than
    ``most_tokens`` need.

    Layers with the same window share a group. Every group gets the same number of blocks, and as many host blocks as
    fit into ``swap_bytes`` (None: a tenth of the number of blocks, rounded up). ``dtype`` is the model's; K and V have
    ``kv_dtype`` if given. Raises ConfigError when not even two blocks fit.
    """
    kept = dtype if kv_dtype is None else kv_dtype
    windows = list(dict.fromkeys(layer.window for layer in spec))
    layer_groups = [windows.index(layer.window) for layer in spec]
    by_window = [sum(layer.token_bytes(kept) for layer in spec if layer.window == window) for window in windows]
    bytes_per_token = sum(by_window)
    more = sum(layer.token_bytes(dtype) for layer in spec) / bytes_per_token
    if num_blocks is None:
        num_blocks = min(memory_bytes // (bytes_per_token * block_size), -(-most_tokens // block_size) + 1)
    if num_blocks < 2:
        need = 2 * bytes_per_token * block_size
        raise ConfigError(
            f"the KV cache has {memory_bytes:,} bytes, but two blocks of {block_size} tokens need {need:,};"
            " raise kv_cache_memory_bytes or lower block_size"
        )
    num_host = -(-num_blocks // 10) if swap_bytes is None else swap_bytes // (bytes_per_token * block_size)
    return KVPlan(
        groups=[CacheGroup(num_blocks, window, num_host) for window in windows],
        layer_groups=layer_groups,
        block_size=block_size,
        dtype=kept,
        bytes_per_token=bytes_per_token,
        total_bytes=num_blocks * bytes_per_token * block_size,
        block_bytes=[block_size * token_bytes for token_bytes in by_window],
        swap_directory=swap_directory,
        gain="" if kept == dtype else f", {more:.1f} times as many per GiB as in {str(dtype).removeprefix('torch.')}",
    )


def make_kv_caches(
    spec: list[LayerCache], plan: KVPlan, dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer K and V, each ``[num_blocks, block_size, num_kv_heads, head_dim]`` (V: ``value_dim``), zero."""
    caches = []
    for layer, group in zip(spec, plan.layer_groups, strict=True):
        shape = (plan.groups[group].num_blocks, plan.block_size, layer.num_kv_heads)
        widths = (layer.head_dim, layer.head_dim if layer.value_dim is None else layer.value_dim)
        keys, values = (_zeros((*shape, width), dtype, device) for width in widths)
        caches.append((keys, values))
    return caches


def make_host_blocks(plan: KVPlan) -> list[npt.NDArray[np.uint8]]:
    """Per group uint8 [num_host_blocks, bytes of a block], zero. A host block has the bytes of all layers of the group
    side by side, so that one copy moves it.

    All groups share one allocation or file. Raises ConfigError when the file cannot be made.
    """
    memory, offset = host_memory(plan.host_bytes, plan.swap_directory), 0
    hosts = []
    for group, size in zip(plan.groups, plan.block_bytes, strict=True):
        end = offset + group.num_host_blocks * size
        hosts.append(memory[offset:end].reshape(group.num_host_blocks, size))
        offset = end
    return hosts


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy allocates zero pages at first use; torch.zeros would write to all of them at start.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
