"""Main program of a process that has a part of a model: process 1 or later of ``tensor_parallel_size``.

It loads its part of the weights, makes its part of the KV cache, and computes the steps that process 0 sends. It ends
when process 0 ends.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import socket
import sys
from typing import IO, Any, cast

from chairlift.base.workers.frames import encode_frame, read_frame
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, EngineDeadError
from chairlift.executor.kv_tensors import KVPlan
from chairlift.executor.parallel.orders import OrderThread
from chairlift.executor.parallel.parallel_runner import RankRunner
from chairlift.executor.parallel.processes import cache_bytes, plan_from, rank_pool, runner_settings
from chairlift.executor.parallel.shares import Share, divide_model, divided_plan
from chairlift.executor.select import choose_backend, choose_dtype
from chairlift.kernels.cpu.communicator import Communicator
from chairlift.loading.model import find_device, model_directory
from chairlift.models.causal_lm import CausalLM
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_network

__all__ = ["load_rank", "main"]

_log = logging.getLogger(__name__)


def main() -> None:
    """Load, and serve until process 0 ends. The arguments of the command line are a folder to import from, the file
    descriptor of the socket to process 0, that of the shared memory, and the id of process 0."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[2]))
    pipe = cast("IO[bytes]", sock.makefile("rwb"))
    try:
        runner = load_rank(pipe, sock, int(sys.argv[3]))
    except (ChairliftError, OSError, MemoryError) as error:
        _answer(pipe, {"error": f"{error}" or type(error).__name__})
        sys.exit(2)
    if runner is None:
        sys.exit(1)
    OrderThread(pipe, runner).start()
    try:
        runner.serve()
    except EngineDeadError:
        os._exit(0)  # process 0 has said why, or has ended
    except BaseException:
        _log.exception("a process of tensor_parallel_size failed")
        runner.end()
        os._exit(3)


def load_rank(pipe: IO[bytes], sock: socket.socket, file: int) -> RankRunner | None:
    """The runner of a process, with its part of the weights. ``pipe`` is a file over ``sock``, the socket to process 0;
    ``file`` is the shared memory. None if process 0 ended. Raises ChairliftError, OSError and MemoryError."""
    about = read_frame(pipe)
    if about is None:
        return None
    os.sched_setaffinity(0, about["processors"])
    config = EngineConfig.from_flat(about["settings"])
    rank, size = about["rank"], about["size"]
    model_dir = model_directory(config)
    network = read_network(model_dir, config.model.model_impl, config.model.mmproj)
    network = network.for_length(about["max_model_len"])
    device = find_device("cpu")
    dtype = choose_dtype(network, config.model.dtype, device)
    if not isinstance(network, NetworkConfig):
        raise EngineDeadError("process 0 refuses such models")
    backend = choose_backend(config, network, dtype, device)
    how: dict[str, Any] = {"weight_format": backend.weight_format(config.model.quantization, config.model.dtype)}
    divide = functools.partial(divide_model, share=Share(rank, size))
    model: CausalLM = load_model(model_dir, network, dtype, device, divide=divide, **how)
    _answer(pipe, {"weight_bytes": model.weight_bytes})
    given = read_frame(pipe)
    if given is None:
        return None
    plan: KVPlan = divided_plan(plan_from(given["plan"]), model)
    comm = Communicator(file, rank, size, [sock.fileno()], config.model.tensor_parallel_timeout)
    how = runner_settings(config) | {"isa": backend.kernels, "max_model_len": about["max_model_len"]}
    runner = RankRunner(model, plan, dtype, rank_pool(about["threads"]), comm, **how)
    _answer(pipe, {"cache_bytes": cache_bytes(plan)})
    return runner


def _answer(pipe: IO[bytes], fields: dict[str, Any]) -> None:
    """Send a frame to process 0. If that has ended, this process ends, too."""
    try:
        pipe.write(encode_frame(fields))
        pipe.flush()
    except BrokenPipeError:
        os._exit(0)
