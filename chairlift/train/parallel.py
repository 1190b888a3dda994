"""Data parallelism over processes: ranks, gradients summed in flat buckets, and a launcher for one machine.

Gradients are summed, not averaged: each rank's loss is already divided by the constant of the whole step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Final

import torch
from torch import Tensor, distributed

from chairlift.errors import ConfigError
from chairlift.parent import die_with_parent

__all__ = [
    "Ranks",
    "join_over_ranks",
    "launch",
    "num_ranks",
    "process_group",
    "settle",
    "sum_gradients",
    "sum_over_group",
    "sum_over_ranks",
    "world_size",
]

_LAUNCHER: Final = "CHAIRLIFT_LAUNCHER"
"""Environment variable with the process id of the launcher, set by :func:`launch`."""
_BUCKET: Final = 1 << 24
"""Numbers per all-reduce: 64 MiB of float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """Rank of this process, and number of processes that train together."""

    rank: int = 0
    size: int = 1


def world_size() -> int:
    """Number of processes that train together, from the launcher's environment variables."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def process_group(device: str = "cpu") -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` or :func:`launch` has started, for as long as the context lasts.

    They exchange by gloo, or for ``device`` ``cuda`` by NCCL, each with the device of its local rank.
    """
    size = world_size()
    if launcher := os.environ.get(_LAUNCHER):
        die_with_parent(int(launcher))
    if size == 1:
        yield Ranks()
        return
    # This module keeps the group of the moment at which it is imported in its defaults, and an optimizer's first step
    # imports it. A group that is kept so long ends with the interpreter, whose end its threads sometimes abort.
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
    """Let a process group's threads drop their references. Must run between the last exchange and the group's end.

    What autograd keeps for the calling thread travels with every exchange. Whoever drops it last needs the
    interpreter's lock, and gloo's group keeps that lock while it waits for its threads to end (PyTorch 2.13): a thread
    that was slow to drop its work would be waited for without end.
    """
    time.sleep(0.1)


def num_ranks(group: distributed.ProcessGroup | None = None) -> int:
    """Number of ranks in a group, or of all ranks; 1 without torch.distributed."""
    return distributed.get_world_size(group) if distributed.is_available() and distributed.is_initialized() else 1


def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace each gradient by its sum over the ranks; the same on all of them, bit for bit. No gradient counts as 0.

    Buckets are cut in the order of ``parameters``, which must be the same everywhere.
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
    """The sums over the ranks of a group of float64 ``values``, both on the CPU. Every rank must call it."""
    if num_ranks(group) == 1:
        return values
    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    summed = values.to(device, copy=True)
    distributed.all_reduce(summed, group=group)
    return summed.cpu()


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """The sums over all ranks, in double precision. Every rank must call it."""
    return [float(value) for value in sum_over_group(torch.tensor(values, dtype=torch.float64))]


def join_over_ranks(values: Sequence[float]) -> list[float]:
    """The values of all ranks, those of rank 0 first, in double precision. Every rank must call it."""
    if num_ranks() == 1:
        return list(values)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    counts = [int(count) for count in sum_over_ranks([len(values) * (each == rank) for each in range(size)])]
    return sum_over_ranks([*[0.0] * sum(counts[:rank]), *values, *[0.0] * sum(counts[rank + 1 :])])


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run ``python -m chairlift ARGUMENTS`` in so many processes here; returns the exit code of the first that fails.

    When one fails, or this process is killed, the others are ended. Ctrl-C reaches them all, and is waited for. Raises
    ConfigError for none.
    """
    if processes < 1:
        raise ConfigError(f"processes must be at least 1, got {processes}")
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, processes, is_master=True, wait_for_workers=False
    )
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is this process's; nobody else opens one
        "WORLD_SIZE": str(processes),
        _LAUNCHER: str(os.getpid()),
    }
    command = [sys.executable, "-m", "chairlift", *arguments]
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.terminate()  # not SIGINT: a terminal has sent them that already, and twice means at once

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


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, or one has failed and the others had time to report an error of their own."""
    waiting, code = list(children), 0
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
