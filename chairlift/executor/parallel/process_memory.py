"""The memory that each process of a divided model needs, and the memory node on which it should lie."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["ProcessMemory", "memory_notes", "node_bytes", "node_of"]

_SYSTEM: Final = Path("/sys/devices/system")
_MIB: Final = 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Where a process computes, and what it keeps in memory."""

    rank: int
    processors: Sequence[int]
    threads: int
    node: int
    """Number of the memory node of its first processor."""
    node_bytes: int
    """Memory of that node; 0 if the system does not say."""
    weight_bytes: int
    cache_bytes: int
    """Bytes of its part of the KV cache, of recurrent states and of swap space in memory."""

    def words(self) -> str:
        """Text for the user."""
        of = f" of {self.node_bytes / _MIB:,.0f} MiB" if self.node_bytes else ""
        needs = f"{self.weight_bytes / _MIB:,.0f} MiB of weights and {self.cache_bytes / _MIB:,.0f} MiB of cache"
        where = f"processors {_ranges(self.processors)}, {self.threads} thread{'s' * (self.threads != 1)}"
        return f"{needs} on memory node {self.node}{of}; {where}"


def memory_notes(processes: Sequence[ProcessMemory]) -> list[str]:
    """Notes about memory nodes that are too small for their processes."""
    found = []
    by_node = defaultdict(list)
    for each in processes:
        by_node[each.node].append(each)
    for node, those in sorted(by_node.items()):
        needed = sum(each.weight_bytes + each.cache_bytes for each in those)
        if 0 < those[0].node_bytes < needed:
            names = ", ".join(str(each.rank) for each in those)
            found.append(
                f"memory node {node} has {those[0].node_bytes / _MIB:,.0f} MiB, but its processes of"
                f" tensor_parallel_size ({names}) need {needed / _MIB:,.0f} MiB: the rest will lie on other nodes,"
                " which they read more slowly; lower kv_cache_memory_bytes, or use more processes"
            )
    return found


def node_of(processor: int, system: Path = _SYSTEM) -> int:
    """Number of the memory node of a processor; 0 if the system does not say."""
    nodes = [each.name.removeprefix("node") for each in (system / f"cpu/cpu{processor}").glob("node[0-9]*")]
    return int(nodes[0]) if nodes else 0


def node_bytes(node: int, system: Path = _SYSTEM) -> int:
    """Memory of a node in bytes; 0 if the system does not say."""
    try:
        lines = (system / f"node/node{node}/meminfo").read_text().splitlines()
    except OSError:
        return 0
    sizes = [line.split()[-2] for line in lines if "MemTotal:" in line]
    return int(sizes[0]) << 10 if sizes else 0


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as text, such as ``0-3, 8``."""
    groups = itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
