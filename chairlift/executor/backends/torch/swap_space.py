"""Host memory to which the KV blocks of preempted requests are copied, for PyTorch's KV tensors."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from chairlift.executor.backends.torch.step_buffer import to_device
from chairlift.executor.host_memory import HostBlocks, HostMoves, host_moves
from chairlift.executor.kv_tensors import KVPlan, make_host_blocks

__all__ = ["CudaHostBlocks", "make_swap_space"]

_log = logging.getLogger(__name__)


def make_swap_space(kv_caches: list[tuple[Tensor, ...]], plan: KVPlan) -> HostBlocks | CudaHostBlocks:
    """Host memory for ``kv_caches`` according to ``plan``, with the copies from and to it. Raises ConfigError if there
    is not enough memory."""
    caches: list[list[Tensor]] = [[] for _ in plan.groups]
    for pair, group in zip(kv_caches, plan.layer_groups, strict=True):
        caches[group] += pair
    arrays = make_host_blocks(plan)
    device = kv_caches[0][0].device
    if device.type == "cpu":
        byte_views = [[cache.view(torch.uint8).view(len(cache), -1).numpy() for cache in group] for group in caches]
        return HostBlocks(byte_views, arrays)
    if plan.swap_directory is None and plan.host_bytes:
        _pin(arrays[0].base, device)
    # The parts of a state may have different dtypes, so they are copied as bytes.
    caches = [group if len({cache.dtype for cache in group}) == 1 else list(map(_as_bytes, group)) for group in caches]
    hosts = [torch.from_numpy(array).view(group[0].dtype) for array, group in zip(arrays, caches, strict=True)]
    return CudaHostBlocks(caches, hosts)


def _as_bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8)


def _pin(memory: Any, device: torch.device) -> None:
    """Let CUDA access the memory of an array directly as long as the array exists. (PyTorch's own pinned memory may
    take twice the size.)"""
    address, cudart = memory.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostRegister(address, memory.nbytes, 1)  # 1: for all devices
    if int(status) == 0:
        weakref.finalize(memory, _unpin, address, device)
        return
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)  # the first launch after a failure reports it, whatever its cause
    _log.warning(
        "CUDA cannot pin the %s bytes of the swap space (%s), so swapping delays steps; lower swap_space_bytes",
        f"{memory.nbytes:,}",
        cudart.cudaGetErrorString(status),
    )


def _unpin(address: int, device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)  # copies may be in progress
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


_MAX_STAGED = 128 << 20
"""Maximum number of bytes that are copied to a staging buffer at a time (or one block, if a block is larger). At most
twice as many bytes may be in progress."""


class CudaHostBlocks:
    """Copies blocks between KV on a CUDA device and host memory. Per group, ``caches`` are tensors [number of blocks,
    ...], and ``hosts`` is a tensor [number of host blocks, elements of a block in all caches].

    Copies run on a separate stream. Blocks to save are first copied to a staging buffer on the step's stream, so that
    the step may overwrite them at once; the copy to the host runs in parallel with the step. The step waits for blocks
    that are loaded. Copies in progress take device memory, so the host waits when they take too much.
    """

    def __init__(self, caches: list[list[Tensor]], hosts: list[Tensor]) -> None:
        self._caches = caches
        self._hosts = hosts
        self._device = caches[0][0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def swap_out(self, saved: Iterable[tuple[int, int, int]]) -> None:
        """Save blocks in host memory; ``saved`` has (group, block, host block). The saved content is the content after
        all earlier steps."""
        current = torch.cuda.current_stream(self._device)
        under_way = 0
        for moves in self._parts((group, host, block) for group, block, host in saved):
            blocks = to_device(moves.blocks, self._device)
            host = self._hosts[moves.group]
            parts = [cache.index_select(0, blocks).flatten(1) for cache in self._caches[moves.group]]
            staged = torch.cat(parts, dim=1)
            del parts
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for entries, hosts in moves.runs():
                    host[hosts].copy_(staged[entries], non_blocking=True)
                staged.record_stream(self._stream)  # its memory is not reused before the copy is done
            under_way = _limit_in_progress(self._stream, under_way + staged.nbytes)

    def swap_in(self, loaded: Iterable[tuple[int, int, int]]) -> None:
        """Copy blocks from host memory to the device before the step is computed; ``loaded`` has (group, host block,
        block)."""
        current = torch.cuda.current_stream(self._device)
        under_way = 0
        for moves in self._parts(loaded):
            blocks = to_device(moves.blocks, self._device)
            host = self._hosts[moves.group]
            with torch.cuda.stream(self._stream):  # after every save, so that it reads what was saved
                staged = torch.empty((len(blocks), host.shape[1]), dtype=host.dtype, device=self._device)
                for entries, hosts in moves.runs():
                    staged[entries].copy_(host[hosts], non_blocking=True)
            current.wait_stream(self._stream)
            end = 0
            for cache in self._caches[moves.group]:
                start, end = end, end + cache[0].numel()
                cache.index_copy_(0, blocks, staged[:, start:end].view(-1, *cache.shape[1:]))
            staged.record_stream(current)
            under_way = _limit_in_progress(current, under_way + staged.nbytes)

    def _parts(self, triples: Iterable[tuple[int, int, int]]) -> Iterator[HostMoves]:
        for moves in host_moves(triples):
            yield from moves.parts(max(1, _MAX_STAGED // self._hosts[moves.group][0].nbytes))


def _limit_in_progress(stream: torch.cuda.Stream, under_way: int) -> int:
    """Return the number of bytes of copies in progress. If there are too many, wait until all copies are done and
    return 0."""
    if under_way <= 2 * _MAX_STAGED:
        return under_way
    stream.synchronize()
    return 0
