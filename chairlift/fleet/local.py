"""Runs replicas on this machine: engine processes, each with a part of the processors and of the memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from chairlift.base.processors import allowed_processors, can_pin
from chairlift.config import CPU_CACHE_SHARE, EngineConfig
from chairlift.engine.process.process_client import EngineEvents, ProcessClient, ThisMachine
from chairlift.errors import ConfigError
from chairlift.fleet.member import ConnectReplica
from chairlift.kernels.control_group import processor_limit, total_memory

__all__ = ["local_replicas", "machine_processors", "processors_by_replica"]

_TOPOLOGY: Final = "/sys/devices/system/cpu/cpu{}/topology/{}"


def local_replicas(config: EngineConfig, count: int) -> ConnectReplica:
    """Function that creates the engine process of a replica, given its index. There are ``count`` replicas.

    The processors that this process may use, and the memory that a single engine would use for its KV cache, are
    divided among the replicas. Raises ConfigError for a model on a GPU.
    """
    if config.model.device != "cpu":
        raise ConfigError(
            f"replicas are processes on the processors of this machine, and device is {config.model.device!r}; start a"
            " server for each GPU, with CUDA_VISIBLE_DEVICES"
        )
    settings = config.to_flat()
    cache = config.cache
    if cache.kv_cache_memory_bytes is None and cache.num_kv_blocks is None:
        settings["kv_cache_memory_bytes"] = int(total_memory() * CPU_CACHE_SHARE) // count
    processor_sets = processors_by_replica(machine_processors(), count)

    def connect(index: int, events: EngineEvents) -> ProcessClient:
        return ProcessClient(settings, events, ThisMachine(processor_sets[index]))

    return connect


def processors_by_replica(processors: Sequence[tuple[Any, ...]], count: int) -> list[list[int]]:
    """Divide processors among ``count`` replicas. Returns the numbers of the processors of each replica.

    ``processors`` has tuples such as (socket, core, number). Processors of the same socket and core stay together if
    possible. With fewer processors than replicas, all lists are empty: the replicas may use all processors.
    """
    if len(processors) < count:
        return [[] for _ in range(count)]
    ordered = [each[-1] for each in sorted(processors)]
    bounds = [len(ordered) * index // count for index in range(count + 1)]
    return [ordered[begin:end] for begin, end in itertools.pairwise(bounds)]


def machine_processors() -> list[tuple[int, int, int]]:
    """(socket, core, number) of each processor that this process may use, limited by its control groups. Empty if the
    system lets no process choose its processors."""
    if not can_pin():
        return []
    found = sorted(
        (_topology(each, "physical_package_id"), _topology(each, "core_id"), each) for each in allowed_processors()
    )
    limit = processor_limit()
    return found if limit is None else found[: max(1, round(limit))]


def _topology(processor: int, what: str) -> int:
    try:
        return int(Path(_TOPOLOGY.format(processor, what)).read_text())
    except (OSError, ValueError):  # some containers hide the topology
        return 0
