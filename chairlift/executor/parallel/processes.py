"""The other processes of a model that several processes share: their start, what they are told, and their end.

Process 0 is the one that has the engine. It and each other process hold the two ends of a socket. While a process
loads, frames pass over it. Later it carries orders outside of steps, and shows that both live: when one ends, the
other's waits end, too. The kernel kills those that do not look, because they are stopped or hang. So no process
outlives process 0, however that ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, Final, cast

import torch

from chairlift.base.workers.frames import encode_frame, read_frame
from chairlift.config import CacheGroup, EngineConfig
from chairlift.errors import ConfigError, EngineDeadError
from chairlift.executor.kv_tensors import KVPlan
from chairlift.executor.parallel.orders import Orders
from chairlift.executor.parallel.parallel_runner import ParallelRunner
from chairlift.executor.parallel.process_memory import ProcessMemory, node_bytes, node_of
from chairlift.executor.parallel.shares import Share, divided_plan
from chairlift.kernels.cpu.communicator import Communicator, shared_file
from chairlift.kernels.cpu.library import ThreadPool, default_threads
from chairlift.models.causal_lm import CausalLM

__all__ = [
    "RankProcesses",
    "cache_bytes",
    "divide_processors",
    "on_processors",
    "plan_from",
    "rank_pool",
    "rank_threads",
    "runner_settings",
]

_PROGRAM: Final = """import sys
sys.path[:0] = sys.argv[1:2]
from chairlift.base.parent import die_with_parent
die_with_parent(int(sys.argv[4]))  # before the long imports
from chairlift.loading.rank_process import main
main()"""
_ROOT: Final = str(Path(__file__).parents[3])
_END_SECONDS: Final = 10.0


class RankProcesses:
    """Processes 1 to ``size`` - 1. They begin to load the model of ``config`` at once, for at most ``max_model_len``
    positions. Raises OSError if a process cannot be started."""

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        self.size = config.model.tensor_parallel_size
        self.share = Share(0, self.size)
        self._weights: list[int] = []
        """Bytes of the weights of each process, when they are loaded. The first entry is added with the runner."""
        self._caches: list[int] = []
        """Bytes of the cache of each process, when they are made."""
        self.processors = divide_processors(self.size, os.sched_getaffinity(0))
        """For each process: the processors that its threads use."""
        self.threads = rank_threads(config.model.threads, self.size)
        self.file = shared_file()
        self._sockets: list[socket.socket] = []
        self._pipes: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        ended = threading.Event()
        self._end = weakref.finalize(
            self, _end_processes, self._processes, self._sockets, self._pipes, self.file, ended
        )
        commands = [self._command(rank) for rank in range(1, self.size)]
        started = Future[None]()
        how = self._processes, commands, self.file, started, ended
        threading.Thread(target=_start_processes, args=how, name="rank-parent", daemon=True).start()
        try:
            started.result()
        except BaseException:
            self._end()
            raise
        about = {"settings": config.to_flat(), "max_model_len": max_model_len, "size": self.size}
        for rank in range(1, self.size):
            self._tell(rank, about | {"rank": rank, "processors": self.processors[rank], "threads": self.threads[rank]})

    def _command(self, rank: int) -> tuple[list[str], socket.socket]:
        """The command line of a process, and its end of its socket."""
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        self._pipes.append(cast("IO[bytes]", ours.makefile("rwb")))
        numbers = theirs.fileno(), self.file, os.getpid()
        return [sys.executable, "-P", "-c", _PROGRAM, _ROOT, *map(str, numbers)], theirs

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of all other processes, when they are loaded."""
        return sum(self._weights[1 - self.size :])

    @property
    def memory(self) -> list[ProcessMemory]:
        """What each process needs, after :meth:`make_runner`."""
        nodes = [node_of(processors[0]) for processors in self.processors]
        return [
            ProcessMemory(
                rank=rank,
                processors=self.processors[rank],
                threads=self.threads[rank],
                node=nodes[rank],
                node_bytes=node_bytes(nodes[rank]),
                weight_bytes=self._weights[rank],
                cache_bytes=self._caches[rank],
            )
            for rank in range(self.size)
        ]

    @property
    def pids(self) -> list[int]:
        """Ids of the processes."""
        return [process.pid for process in self._processes]

    def wait_until_loaded(self) -> None:
        """Wait until every process has its weights. Raises ConfigError for an error in one of them, and EngineDeadError
        if one ended."""
        self._weights = [int(self._answer(rank)["weight_bytes"]) for rank in range(1, self.size)]

    def make_runner(
        self, model: CausalLM, plan: KVPlan, config: EngineConfig, dtype: torch.dtype, max_model_len: int, isa: str
    ) -> ParallelRunner:
        """The runner of process 0. ``plan`` is that of the whole model. Raises the errors of
        :meth:`wait_until_loaded`, and MemoryError."""
        for rank in range(1, self.size):
            self._tell(rank, {"plan": _plan_fields(plan)})
        lives = [each.fileno() for each in self._sockets]
        comm = Communicator(self.file, 0, self.size, lives, config.model.tensor_parallel_timeout)
        with on_processors(self.processors[0]):
            pool = rank_pool(self.threads[0])
            own = divided_plan(plan, model)
            how = runner_settings(config) | {"isa": isa, "max_model_len": max_model_len}
            runner = ParallelRunner(model, own, dtype, pool, comm, **how)
        self._weights.insert(0, model.weight_bytes)
        self._caches = [cache_bytes(own), *(int(self._answer(rank)["cache_bytes"]) for rank in range(1, self.size))]
        runner.processes = self
        runner.use_orders(Orders(self._sockets, self._pipes, comm))
        return runner

    def kill(self) -> None:
        """End all processes at once."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """End all processes, and wait until they have ended."""
        self._end()

    def _tell(self, rank: int, fields: Mapping[str, Any]) -> None:
        pipe = self._pipes[rank - 1]
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            pipe.write(encode_frame(fields))
            pipe.flush()

    def _answer(self, rank: int) -> dict[str, Any]:
        answer = read_frame(self._pipes[rank - 1])
        if answer is None:
            code = self._processes[rank - 1].wait()
            raise EngineDeadError(
                f"process {rank} of tensor_parallel_size {self.size} ended with exit code {code} while it loaded the"
                " model; its messages are on the error output"
            )
        if "error" in answer:
            raise ConfigError(f"in process {rank} of tensor_parallel_size {self.size}: {answer['error']}")
        return answer


def _start_processes(
    processes: list[subprocess.Popen[bytes]],
    commands: Sequence[tuple[list[str], socket.socket]],
    file: int,
    started: Future[None],
    ended: threading.Event,
) -> None:
    """Start a process for each command, and add it to ``processes``. This is the main function of a thread, which stays
    until the processes have ended: the kernel kills a process when the thread that started it ends."""
    try:
        for command, sock in commands:
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(sock.fileno(), file),
                    start_new_session=True,  # signals of a terminal are for process 0, which ends the others
                )
            )
        started.set_result(None)
    except BaseException as error:
        started.set_exception(error)
    for _, sock in commands:
        sock.close()
    ended.wait()


def _end_processes(
    processes: Sequence[subprocess.Popen[bytes]],
    sockets: Sequence[socket.socket],
    pipes: Sequence[IO[bytes]],
    file: int,
    ended: threading.Event,
) -> None:
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.close()
    for each in sockets:
        each.close()  # a process ends when its socket closes
    os.close(file)
    for process in processes:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    ended.set()


def divide_processors(size: int, allowed: set[int], system: Path = Path("/sys/devices/system")) -> list[list[int]]:
    """The processors of each of ``size`` processes: neighbours, by memory node, so that with as many nodes as processes
    each has its own node. With fewer processors than processes, all may use all."""
    ordered = sorted(allowed, key=lambda processor: (node_of(processor, system), processor))
    if len(ordered) < size:
        return [ordered for _ in range(size)]
    ends = [len(ordered) * rank // size for rank in range(size + 1)]
    return [ordered[begin:end] for begin, end in itertools.pairwise(ends)]


def rank_threads(threads: int | None, size: int) -> list[int]:
    """Number of threads of each process. ``threads`` is the setting: the sum of all."""
    total = max(default_threads() if threads is None else threads, size)
    return [total * (rank + 1) // size - total * rank // size for rank in range(size)]


def rank_pool(threads: int) -> ThreadPool:
    """Threads on the processors that the calling thread may use, each on its own if there are as many. Raises
    ConfigError if the system does not allow so many."""
    try:
        return ThreadPool(threads)
    except OSError as error:
        raise ConfigError(f"threads: {error}") from None


@contextlib.contextmanager
def on_processors(processors: Sequence[int]) -> Iterator[None]:
    """Within this context, the calling thread and the threads that it starts use only ``processors``. Memory that they
    write first lies on the memory node of these."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cache_bytes(plan: KVPlan) -> int:
    """Bytes of the caches of one process, and of their swap space in memory."""
    return plan.total_bytes + (plan.host_bytes if plan.swap_directory is None else 0)


def runner_settings(config: EngineConfig) -> dict[str, Any]:
    """Arguments that the runners of all processes get from the settings."""
    scheduler = config.scheduler
    return {
        "max_tokens": scheduler.max_num_batched_tokens,
        "max_rows": scheduler.max_num_seqs,
        "lora": config.lora.active,
        "logprobs_mode": config.model.logprobs_mode,
    }


def _plan_fields(plan: KVPlan) -> dict[str, Any]:
    """What :func:`plan_from` needs of a plan, as plain data."""
    return {
        "groups": [dataclasses.asdict(group) for group in plan.groups],
        "layer_groups": plan.layer_groups,
        "block_size": plan.block_size,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "bytes_per_token": plan.bytes_per_token,
        "total_bytes": plan.total_bytes,
        "block_bytes": plan.block_bytes,
        "swap_directory": plan.swap_directory,
    }


def plan_from(fields: Mapping[str, Any]) -> KVPlan:
    """The plan of the whole model, as process 0 sent it."""
    groups = [CacheGroup(**group) for group in fields["groups"]]
    return KVPlan(**{**fields, "groups": groups, "dtype": getattr(torch, fields["dtype"])})
