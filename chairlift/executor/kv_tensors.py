"""How large the KV cache is, and the tensors that hold it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import torch

from chairlift.config import CacheGroup
from chairlift.errors import ConfigError
from chairlift.models.context import LayerCache

__all__ = ["DEFAULT_SHARE", "KVPlan", "available_memory", "make_kv_caches", "plan_kv_cache"]

DEFAULT_SHARE = 0.4
"""Share of the memory this process may use that goes to the KV cache when nothing else is asked."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVPlan:
    """Cache groups, which layer belongs to which, and what they cost."""

    groups: list[CacheGroup]
    layer_groups: list[int]
    """Layer -> group."""
    block_size: int
    bytes_per_token: int
    """Of all layers together, for K and V."""
    total_bytes: int

    @property
    def num_tokens(self) -> int:
        """Positions that fit into every group."""
        return min(group.num_blocks - 1 for group in self.groups) * self.block_size

    def describe(self, max_model_len: int) -> str:
        """The plan in plain words."""
        length = min(2048, max_model_len)
        chats = self.num_tokens // length
        size = self.total_bytes / 2**30
        room = f"room for about {chats:,} chats of {length:,} tokens at once"
        return f"KV cache: {size:.2f} GiB, {self.num_tokens:,} tokens in blocks of {self.block_size}; {room}"


def available_memory(device: torch.device) -> int:
    """Bytes this process may use: of the GPU what is free, of the CPU what the machine and its control group allow."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    total = 0
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        if path.exists() and (text := path.read_text().strip()).isdigit():
            total = min(total or int(text), int(text))
    return total or 4 << 30


def plan_kv_cache(
    spec: list[LayerCache],
    *,
    dtype: torch.dtype,
    block_size: int,
    memory_bytes: int,
    num_blocks: int | None,
    most_tokens: int,
) -> KVPlan:
    """Divide ``memory_bytes`` into blocks; ``num_blocks`` overrides the count. Never more than ``most_tokens`` need.

    Layers with the same window share a group; every group gets the same number of blocks. Raises ConfigError when not
    even two blocks fit.
    """
    windows = list(dict.fromkeys(layer.window for layer in spec))
    layer_groups = [windows.index(layer.window) for layer in spec]
    bytes_per_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in spec) * dtype.itemsize
    if num_blocks is None:
        num_blocks = min(memory_bytes // (bytes_per_token * block_size), -(-most_tokens // block_size) + 1)
    if num_blocks < 2:
        need = 2 * bytes_per_token * block_size
        raise ConfigError(
            f"the KV cache has {memory_bytes:,} bytes, but two blocks of {block_size} tokens need {need:,};"
            " raise kv_cache_memory_bytes or lower block_size"
        )
    groups = [CacheGroup(num_blocks, window) for window in windows]
    return KVPlan(groups, layer_groups, block_size, bytes_per_token, num_blocks * bytes_per_token * block_size)


def make_kv_caches(
    spec: list[LayerCache], plan: KVPlan, dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer K and V, each ``[num_blocks, block_size, num_kv_heads, head_dim]``, zero."""
    caches = []
    for layer, group in zip(spec, plan.layer_groups, strict=True):
        shape = (plan.groups[group].num_blocks, plan.block_size, layer.num_kv_heads, layer.head_dim)
        caches.append((_zeros(shape, dtype, device), _zeros(shape, dtype, device)))
    return caches


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy takes zero pages from the system as they are touched; torch.zeros would touch them all at start.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
