"""Plans the size of the KV cache, and makes the tensors that hold it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chairlift.config import CPU_CACHE_SHARE, CacheGroup, SchedulerConfig
from chairlift.errors import ConfigError
from chairlift.executor.host_memory import host_memory
from chairlift.executor.state_plan import StatePlan, plan_states
from chairlift.kernels.control_group import total_memory
from chairlift.models.context import LayerCache, LayerState

__all__ = [
    "DEFAULT_SHARE",
    "KVPlan",
    "available_memory",
    "check_fits",
    "check_step_fits",
    "gpu_cache_memory",
    "make_host_blocks",
    "make_kv_caches",
    "plan_kv_cache",
]

DEFAULT_SHARE = CPU_CACHE_SHARE
"""Default fraction of the available memory that the KV cache takes on a CPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVPlan:
    """Plan of the KV cache: cache groups, layers, and their sizes in bytes."""

    groups: list[CacheGroup]
    layer_groups: list[int]
    """One entry per layer: index of the layer's cache group."""
    block_size: int
    dtype: torch.dtype
    """Data type of K and V in the cache. int8 means 8-bit codes with a scale and a minimum per token and head."""
    bytes_per_token: int
    """Bytes of one token's K and V, summed over all layers."""
    total_bytes: int
    block_bytes: list[int]
    """One entry per cache group: bytes of one block over all layers of the group."""
    swap_directory: str | None = None
    """Directory of the file with the host blocks; None: the host blocks are in memory."""
    gain: str = ""
    """Text that says how many more tokens fit into the cache than with the model's dtype; empty if K and V have the
    model's dtype."""
    states: StatePlan | None = None
    """Plan of the recurrent states; None if the model has none."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose K and V fit into the cache; 0 if no layer has K and V."""
        sizes = [group.num_blocks - 1 for group in self.groups if group.state_span is None]
        return min(sizes, default=0) * self.block_size

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in which the KV of preempted requests is stored."""
        return sum(group.num_host_blocks * size for group, size in zip(self.groups, self.block_bytes, strict=True))

    def describe(self, max_model_len: int) -> str:
        """Text for the user that describes the plan: sizes in bytes, and how many tokens and requests fit."""
        if self.states is None:
            return self._describe_tokens(max_model_len)
        states = f"{self.states.describe()}: {self.state_bytes / 2**30:.2f} GiB"
        if self.num_tokens:
            return f"{self._describe_tokens(max_model_len)}; {states}"
        hosts = min(group.num_host_blocks for group in self.groups)
        return f"{states}; swap space for {hosts:,} states: {self.host_bytes / 2**30:.2f} GiB"

    @property
    def state_bytes(self) -> int:
        """Bytes of all blocks for recurrent states; 0 if the model has none."""
        return 0 if self.states is None else self.states.nbytes * self.states.num_blocks

    def _describe_tokens(self, max_model_len: int) -> str:
        """Text that says how many tokens of K and V fit into the cache."""
        length = min(2048, max_model_len)
        chats = self.num_tokens // length
        size = (self.total_bytes - self.state_bytes) / 2**30
        room = f"room for about {chats:,} chats of {length:,} tokens at once"
        cache = f"KV cache: {size:.2f} GiB{' of int8' if self.gain else ''}"
        plan = f"{cache}, {self.num_tokens:,} tokens in blocks of {self.block_size}{self.gain}; {room}"
        hosts = min(group.num_host_blocks for group in self.groups if group.state_span is None)
        if not hosts:
            return f"{plan}; no swap space"
        where = "host memory" if self.swap_directory is None else f"a file in {self.swap_directory}"
        swap = f"swap space for {hosts * self.block_size:,} tokens of preempted requests"
        return f"{plan}; {swap}: {self.host_bytes / 2**30:.2f} GiB of {where}"


def available_memory(device: torch.device) -> int:
    """Bytes that this process may use: the free memory of the GPU, or on the CPU the memory limit of the machine and
    its control group."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return total_memory()


def check_fits(plan: KVPlan, device: torch.device, setting: int | None = None) -> None:
    """Raise ConfigError if the KV cache and the swap space in memory are larger than the machine's memory.

    ``setting`` is ``kv_cache_memory_bytes``. It must not exceed the machine's memory either, even if the plan uses less
    of it.

    On a CPU, memory is taken only when it is first written. Without this check, the operating system would kill the
    process later. On a GPU the allocation itself fails.
    """
    if device.type != "cpu":
        return
    limit = available_memory(device)
    if setting is not None and setting > limit:
        raise ConfigError(
            f"kv_cache_memory_bytes is {setting:,}, but this machine, or this process's control group, has"
            f" {limit:,} bytes of memory; lower it, or leave it out"
        )
    host = plan.host_bytes if plan.swap_directory is None else 0
    if plan.total_bytes + host <= limit:
        return
    swap = f" and the swap space {host:,} (swap_space_bytes)" if host else ""
    raise ConfigError(
        f"the KV cache would have {plan.total_bytes:,} bytes (kv_cache_memory_bytes, num_kv_blocks){swap}, but this"
        f" machine, or this process's control group, has {limit:,}; lower it"
    )


def check_step_fits(
    scheduler: SchedulerConfig, tokens: int, token_bytes: int, row_bytes: int, device: torch.device, settings: str
) -> None:
    """Raise ConfigError if the intermediate results of a step alone are larger than the memory of ``device``.

    A step has at most ``tokens`` tokens of ``token_bytes``, and the logits of ``max_num_seqs`` rows of ``row_bytes``.
    ``settings`` names the settings that determine ``tokens``. A step of the default size is never refused: on a machine
    that is too small for it, shorter texts may still be served.
    """
    defaults = SchedulerConfig()
    rows = min(scheduler.max_num_seqs, tokens) if row_bytes else 0
    if tokens <= defaults.max_num_batched_tokens and rows <= defaults.max_num_seqs:
        return
    limit = available_memory(device)
    logits = rows * row_bytes
    if tokens * token_bytes + logits <= limit:
        return
    needs = f"{tokens * token_bytes:,} bytes"
    remedy = f"at most about {(limit - logits) // token_bytes:,} tokens"
    if rows:
        needs = f"{needs}, and the logits of {rows:,} rows (max_num_seqs) {logits:,}"
        if limit - logits < rows * token_bytes:
            settings = f"{settings} or max_num_seqs"
            remedy = f"at most about {limit // (token_bytes + row_bytes):,} rows of one token"
    raise ConfigError(
        f"the intermediate results of a step of {tokens:,} tokens ({settings}) would have {needs}, but there are"
        f" {limit:,} bytes of memory; even without weights and KV cache, {remedy} fit: lower {settings}"
    )


def gpu_cache_memory(free: int, total: int, utilization: float, step_bytes: int) -> int:
    """Bytes for the KV cache such that a fraction ``utilization`` of the GPU's ``total`` bytes is used, including the
    memory for steps.

    ``free`` is the free memory after the weights were loaded; other processes may use memory too. Raises ConfigError if
    no memory remains.
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
    spec: Sequence[LayerCache | LayerState],
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    block_size: int,
    memory_bytes: int,
    num_blocks: int | None,
    most_tokens: int,
    swap_bytes: int | None = 0,
    swap_directory: str | None = None,
    rows: int = 1,
    caching: bool = True,
    snapshot_interval: int | None = None,
) -> KVPlan:
    """Divide ``memory_bytes`` into blocks: into ``num_blocks`` if it is given, otherwise into at most as many as
    ``most_tokens`` tokens need.

    Layers with the same window form a group, and so do the recurrent layers. Every group of K and V gets the same
    number of blocks, and as many host blocks as fit into ``swap_bytes`` (None: a tenth of the blocks, rounded up).
    ``dtype`` is the model's data type, ``kv_dtype`` that of K and V (None: the same). ``rows``, ``caching`` and
    ``snapshot_interval`` are arguments of :func:`~chairlift.executor.state_plan.plan_states`. Raises ConfigError if
    fewer than two blocks, or not even the state of one request, fit.
    """
    cache_dtype = dtype if kv_dtype is None else kv_dtype
    layers = [layer for layer in spec if isinstance(layer, LayerCache)]
    windows = list(dict.fromkeys(layer.window for layer in layers))
    by_window = [
        sum(layer.token_bytes(cache_dtype) for layer in layers if layer.window == window) for window in windows
    ]
    bytes_per_token = sum(by_window)
    states = None
    blocks = 0
    if state_bytes := sum(sum(layer.part_bytes(dtype)) for layer in spec if isinstance(layer, LayerState)):
        how: dict[str, Any] = {"memory_bytes": memory_bytes, "rows": rows, "caching": caching}
        how |= {"token_bytes": bytes_per_token, "block_size": block_size, "interval": snapshot_interval}
        states = plan_states(state_bytes, **how)
    if layers:
        max_blocks = -(-most_tokens // block_size) + 1
        blocks = _num_kv_blocks(bytes_per_token, memory_bytes, num_blocks, max_blocks, block_size, states)
    if states is not None:
        states = states.with_snapshots(blocks * block_size, memory_bytes, most_tokens)
    num_host, state_hosts = _num_host_blocks(blocks, bytes_per_token * block_size, states, swap_bytes)
    total = blocks * bytes_per_token * block_size
    block_bytes = [block_size * each for each in by_window]
    groups = [CacheGroup(blocks, window, num_host) for window in windows]
    if states is not None:
        groups.append(CacheGroup(states.num_blocks, None, state_hosts, states.span))
        total = total + states.nbytes * states.num_blocks
        block_bytes = [*block_bytes, states.nbytes]
    more = sum(layer.token_bytes(dtype) for layer in layers) / max(bytes_per_token, 1)
    return KVPlan(
        groups=groups,
        layer_groups=[windows.index(e.window) if isinstance(e, LayerCache) else len(windows) for e in spec],
        block_size=block_size,
        dtype=cache_dtype,
        bytes_per_token=bytes_per_token,
        total_bytes=total,
        block_bytes=block_bytes,
        swap_directory=swap_directory,
        gain=""
        if cache_dtype == dtype
        else f", {more:.1f} times as many per GiB as in {str(dtype).removeprefix('torch.')}",
        states=states,
    )


def _num_kv_blocks(
    bytes_per_token: int,
    memory_bytes: int,
    setting: int | None,
    max_blocks: int,
    block_size: int,
    states: StatePlan | None,
) -> int:
    """Number of blocks of each group of K and V, at most ``max_blocks``. A token takes ``bytes_per_token`` in all
    groups together."""
    remaining = memory_bytes
    each = bytes_per_token * block_size
    if states is not None:
        remaining -= states.num_blocks * states.nbytes
        each += math.ceil(states.token_bytes() * block_size)
    num_blocks = min(remaining // each, max_blocks) if setting is None else setting
    if num_blocks < 2:
        raise ConfigError(
            f"the KV cache has {remaining:,} bytes, but two blocks of {block_size} tokens need {2 * each:,};"
            " raise kv_cache_memory_bytes or lower block_size"
        )
    return num_blocks


def _num_host_blocks(
    num_blocks: int, block_bytes: int, states: StatePlan | None, swap_bytes: int | None
) -> tuple[int, int]:
    """(host blocks per group of K and V, host blocks of the group of states). If the model has both, half of the bytes
    are for states."""
    if swap_bytes is None:
        return -(-num_blocks // 10), 0 if states is None else -(-states.num_blocks // 10)
    if states is None:
        return swap_bytes // block_bytes, 0
    share = swap_bytes // 2 if block_bytes else swap_bytes
    return (swap_bytes - share) // block_bytes if block_bytes else 0, min(share // states.nbytes, states.num_blocks)


def make_kv_caches(
    spec: Sequence[LayerCache | LayerState], plan: KVPlan, dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Tensor, ...]]:
    """Per layer: (K, V), each ``[num_blocks, block_size, num_kv_heads, head_dim]`` (V: ``value_dim``), filled with
    zeros. In int8: (codes of K, codes of V, scales of K, scales of V). Codes are uint8 of that shape, and scales are
    float32 ``[num_blocks, block_size, num_kv_heads, 2]``: a scale and a minimum.

    Per recurrent layer: the parts of its states, each ``[num_blocks, ...]``.
    """
    caches: list[tuple[torch.Tensor, ...]] = []
    for layer, group in zip(spec, plan.layer_groups, strict=True):
        count = plan.groups[group].num_blocks
        if isinstance(layer, LayerState):
            caches.append(tuple(_zeros((count, *part.shape), part.dtype or dtype, device) for part in layer.parts))
            continue
        shape = (count, plan.block_size, layer.num_kv_heads)
        widths = (layer.head_dim, layer.head_dim if layer.value_dim is None else layer.value_dim)
        kept = torch.uint8 if plan.dtype == torch.int8 else dtype
        keys, values = (_zeros((*shape, width), kept, device) for width in widths)
        scales = [_zeros((*shape, 2), torch.float32, device) for _ in widths] if plan.dtype == torch.int8 else []
        caches.append((keys, values, *scales))
    return caches


def make_host_blocks(plan: KVPlan) -> list[npt.NDArray[np.uint8]]:
    """Per group: uint8 [num_host_blocks, bytes of a block], filled with zeros. A host block has the bytes of all layers
    of the group one after another, so that a single copy moves it.

    All groups share one allocation or file. Raises ConfigError if the memory or file cannot be allocated.
    """
    memory = host_memory(plan.host_bytes, plan.swap_directory)
    offset = 0
    hosts = []
    for group, size in zip(plan.groups, plan.block_bytes, strict=True):
        end = offset + group.num_host_blocks * size
        hosts.append(memory[offset:end].reshape(group.num_host_blocks, size))
        offset = end
    return hosts


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy allocates a zero page when it is first used; torch.zeros would write to all pages at once.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
