"""Data parallelism over processes: ranks, sums of gradients over ranks, and a launcher for one machine.

Gradients are summed, not averaged, because the loss of each rank is already divided by the constant of the whole step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, distributed

from chairlift.base.parent import die_with_parent
from chairlift.errors import ConfigError

__all__ = [
    "Ranks",
    "join_over_ranks",
    "launch",
    "max_over_group",
    "num_ranks",
    "process_group",
    "settle",
    "sum_gradients",
    "sum_over_group",
    "sum_over_ranks",
    "world_size",
]

_LAUNCHER: Final = "CHAIRLIFT_LAUNCHER"
"""Name of the environment variable in which :func:`launch` passes its process id to the processes that it starts."""
_BUCKET: Final = 1 << 24
"""Number of values in one all-reduce: 64 MiB in float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """Rank of this process (from 0), and number of processes that train together."""

    rank: int = 0
    size: int = 1


def world_size() -> int:
    """Number of processes that train together, from the launcher's environment variables."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def process_group(device: str = "cpu") -> Iterator[Ranks]:
    """Context in which this process belongs to the group of processes that ``torchrun`` or :func:`launch` has started.
    The processes communicate by gloo. With ``device`` ``cuda`` they communicate by NCCL, and each process uses the GPU
    of its local rank.
    """
    size = world_size()
    if launcher := os.environ.get(_LAUNCHER):
        die_with_parent(int(launcher))
    if size == 1:
        yield Ranks()
        return
    # This module stores the group that exists when it is imported in its default arguments, and the first step of an
    # optimizer imports it. A stored group is destroyed only at the interpreter's exit, and its threads can then abort
    # the process. So the module is imported before the group exists.
    importlib.import_module("torch.distributed.nn.functional")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield Ranks(distributed.get_rank(), size)
    finally:
        settle()
        distributed.destroy_process_group()


def settle() -> None:
    """Give the threads of the process group time to release their work. Call this between the last collective operation
    and the end of the group.

    Otherwise there can be a deadlock (PyTorch 2.13). Each operation has a reference to the caller's autograd state, and
    the thread that drops the last reference needs the interpreter's lock. The gloo group holds this lock while it waits
    for its threads to end.
    """
    time.sleep(0.1)


def num_ranks(group: distributed.ProcessGroup | None = None) -> int:
    """Number of ranks in a group, or of all ranks. 1 if torch.distributed is not initialised."""
    return distributed.get_world_size(group) if distributed.is_available() and distributed.is_initialized() else 1


def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace each gradient by its sum over all ranks. The results are identical on all ranks.

    A missing gradient counts as 0. The order of ``parameters`` must be the same on all ranks.
    """
    if num_ranks() == 1:
        return
    bucket: list[Tensor] = []
    for index, parameter in enumerate(parameters):
        bucket.append(parameter)
        if index == len(parameters) - 1 or sum(part.numel() for part in bucket) >= _BUCKET:
            flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in bucket])
            distributed.all_reduce(flat)
            for part, values in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                part.grad = values.view_as(part)
            bucket = []


def sum_over_group(values: Tensor, group: distributed.ProcessGroup | None = None) -> Tensor:
    """Sum a float64 tensor on the CPU over the ranks of a group. Every rank must call this function."""
    return _reduced(values, distributed.ReduceOp.SUM, group) if num_ranks(group) > 1 else values


def max_over_group(value: float, group: distributed.ProcessGroup | None = None) -> float:
    """Largest ``value`` of the ranks of a group, in double precision. Every rank must call this function."""
    if num_ranks(group) == 1:
        return value
    return float(_reduced(torch.tensor(value, dtype=torch.float64), distributed.ReduceOp.MAX, group))


def _reduced(values: Tensor, how: Any, group: distributed.ProcessGroup | None) -> Tensor:
    """All-reduce of a tensor on the CPU, on the device that the group's backend needs."""
    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    reduced = values.to(device, copy=True)
    distributed.all_reduce(reduced, how, group=group)
    return reduced.cpu()


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Sum each value over all ranks, in double precision. Every rank must call this function."""
    return [float(value) for value in sum_over_group(torch.tensor(values, dtype=torch.float64))]


def join_over_ranks(values: Sequence[float]) -> list[float]:
    """Concatenate the values of all ranks in the order of the ranks, in double precision. Every rank must call this
    function."""
    if num_ranks() == 1:
        return list(values)
    rank = distributed.get_rank()
    size = distributed.get_world_size()
    counts = [int(count) for count in sum_over_ranks([len(values) * (each == rank) for each in range(size)])]
    return sum_over_ranks([*[0.0] * sum(counts[:rank]), *values, *[0.0] * sum(counts[rank + 1 :])])


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run ``python -m chairlift ARGUMENTS`` in several processes on this machine. Returns 0, or the exit code of the
    first process that fails.

    If a process fails, or if this process is killed, the other processes are ended. After Ctrl-C, this function waits
    until all processes have ended. Raises ConfigError if ``processes`` is below 1.
    """
    if processes < 1:
        raise ConfigError(f"processes must be at least 1, got {processes}")
    store = _local_store(processes)
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **_on_loopback(),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the children connect to the store of this process
        "WORLD_SIZE": str(processes),
        _LAUNCHER: str(os.getpid()),
    }
    command = [sys.executable, "-m", "chairlift", *arguments]
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.terminate()  # the terminal sent SIGINT already; a second one would end them at once

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            children.append(subprocess.Popen(command, env=environment | own))
        return _wait(children)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _local_store(processes: int) -> Any:
    """The store in which the processes find each other. Only this machine can reach it: it obeys everybody who can."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, processes, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _on_loopback() -> dict[str, str]:
    """Environment variables that make gloo and NCCL listen on the loopback interface only."""
    name = next((name for _, name in socket.if_nameindex() if re.fullmatch("lo[0-9]*", name)), None)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all processes have ended. After a failure, wait only a few seconds for the errors of the others.

    Returns the exit code of the first process that failed, or 0.
    """
    waiting = list(children)
    code = 0
    while waiting:
        for child in list(waiting):
            try:
                ended = child.wait(timeout=0.1 if code == 0 else 5.0)
            except subprocess.TimeoutExpired:
                if code:
                    return code
                continue
            waiting.remove(child)
            code = code or (ended if ended >= 0 else 128 - ended)
    return code
