"""The processes that share a model, as threads of one process. Each has its own weights, caches and threads."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import torch

from chairlift.config import LoRAConfig
from chairlift.errors import EngineDeadError
from chairlift.executor.backends.native.native_runner import NativeModelRunner
from chairlift.executor.kv_tensors import KVPlan, plan_kv_cache
from chairlift.executor.parallel.orders import Orders, OrderThread
from chairlift.executor.parallel.parallel_runner import ParallelRunner, RankRunner
from chairlift.executor.parallel.shares import Share, divide_model, divided_plan
from chairlift.kernels.cpu.communicator import Communicator, shared_file
from chairlift.kernels.cpu.library import ThreadPool, supported_isas
from chairlift.kernels.weights import NATIVE, WeightFormat
from chairlift.models.causal_lm import CausalLM
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config

__all__ = ["Ranks", "load", "plan_of"]

BLOCK, BLOCKS, SLOTS, LENGTH, BUDGET = 16, 100, 8, 160, 96


def load(
    model_dir: Path, dtype: torch.dtype, weight_format: WeightFormat = NATIVE, share: Share | None = None
) -> CausalLM:
    divide: Callable[[CausalLM], None] | None = None
    if share is not None:
        part = share

        def divide(model: CausalLM) -> None:
            divide_model(model, part)

    return load_model(model_dir, read_config(model_dir), dtype, weight_format=weight_format, divide=divide)


def plan_of(model: CausalLM, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, swap_bytes: int = 0) -> KVPlan:
    sizes: dict[str, Any] = {"block_size": BLOCK, "memory_bytes": 0, "num_blocks": BLOCKS, "most_tokens": 0}
    if any(type(layer).__name__ == "LayerState" for layer in model.kv_cache_spec()):
        sizes |= {"memory_bytes": 64 << 20, "rows": SLOTS}
    return plan_kv_cache(model.kv_cache_spec(), dtype=dtype, kv_dtype=kv_dtype, swap_bytes=swap_bytes, **sizes)


class Ranks:
    """A model on one process, ``alone``, and the same model divided among ``size``, of which ``first`` is number 0."""

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        size: int,
        *,
        weight_format: WeightFormat = NATIVE,
        kv_dtype: torch.dtype | None = None,
        swap_bytes: int = 0,
        num_threads: int = 1,
        isa: str | None = None,
        budget: int = BUDGET,
        lora: LoRAConfig | None = None,
    ) -> None:
        isa = isa or supported_isas()[-1]
        whole = load(model_dir, dtype, weight_format)
        self.plan = plan_of(whole, dtype, kv_dtype, swap_bytes)
        how: dict[str, Any] = {"isa": isa, "max_tokens": budget, "lora": lora}
        self.alone = NativeModelRunner(whole, self.plan, dtype, ThreadPool(1, pin=False), **how)
        self.file = shared_file()
        self.errors: list[BaseException] = []
        self.runners: list[RankRunner] = []
        sizes: dict[str, Any] = {**how, "max_rows": SLOTS, "max_model_len": max(LENGTH, budget)}
        for rank in range(size):
            model = load(model_dir, dtype, weight_format, Share(rank, size))
            kind = RankRunner if rank else ParallelRunner
            pool = ThreadPool(num_threads, pin=False)
            comm = Communicator(self.file, rank, size, patience=60.0)
            self.runners.append(kind(model, divided_plan(self.plan, model), dtype, pool, comm, **sizes))
        first = self.runners[0]
        assert isinstance(first, ParallelRunner)
        self.first = first
        self.threads = [threading.Thread(target=self._serve, args=(each,), daemon=True) for each in self.runners[1:]]
        for thread in self.threads:
            thread.start()
        pairs = [socket.socketpair() for _ in self.threads]
        for runner, (_, theirs) in zip(self.runners[1:], pairs, strict=True):
            OrderThread(cast("IO[bytes]", theirs.makefile("rwb")), runner).start()
        ours = [each for each, _ in pairs]
        self.pipes = [cast("IO[bytes]", each.makefile("rwb")) for each in ours]
        self.sockets = [each for pair in pairs for each in pair]
        self.first.use_orders(Orders(ours, self.pipes, self.first._comm))

    def _serve(self, runner: RankRunner) -> None:
        try:
            runner.serve()
        except EngineDeadError:
            pass
        except BaseException as error:
            self.errors.append(error)
            runner._comm.end()

    def close(self) -> None:
        self.first.shutdown()
        for thread in self.threads:
            thread.join(30)
        for each in (*self.pipes, *self.sockets):
            each.close()
        os.close(self.file)
        assert not self.errors, self.errors
        assert not any(thread.is_alive() for thread in self.threads)
