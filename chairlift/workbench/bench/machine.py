"""Description of the machine that a benchmark ran on: a figure without its machine is worth nothing."""

from __future__ import annotations

import dataclasses
import os
import platform
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.kernels.cpu.library import default_threads, supported_isas
from chairlift.kernels.roof import ASSUMED_L3, l3_bytes

__all__ = ["Machine", "describe_machine", "machine_facts"]

_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
"""Processor flags that decide which kernels can run, as Linux spells them."""

_MOMENT = 0.25
"""Seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Description of a machine as plain data, ready for JSON."""

    cpu: str
    flags: tuple[str, ...]
    """Flags of the processor that matter to kernels."""
    processors: int
    """Number of processors that this process may use."""
    l3_bytes: int
    """Last-level cache of those processors together; 64 MiB where the system doesn't tell."""
    memory_bytes: int
    """Memory of the whole machine; 0 where the system doesn't tell."""
    system: str
    isas: tuple[str, ...]
    """Instruction-set paths of the kernels that run here, weakest first."""
    busy: float
    """Share of all processors' time that other programs used while this process waited."""


_WIDTH = 76
"""Columns of a line of facts beside its label."""


def machine_facts(machine: Mapping[str, Any]) -> dict[str, str]:
    """Lines of a report about a :class:`Machine`, given as plain data: label -> text."""
    return {
        "processor": f"{machine['cpu']}, {machine['processors']} in use",
        "system": str(machine["system"]),
        "instruction sets": textwrap.fill(", ".join(machine["flags"]), _WIDTH) or "unknown",
        "L3 cache": f"{machine['l3_bytes'] >> 20:,} MiB",
        "busy before the start": f"{machine['busy']:.0%}",
    }


def describe_machine() -> Machine:
    """Description of this machine, as far as the system tells."""
    cpu, flags = _cpuinfo(Path("/proc/cpuinfo"))
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Machine(
        cpu=cpu or platform.processor() or platform.machine(),
        flags=tuple(flag for flag in _FLAGS if flag in flags),
        processors=default_threads(),
        l3_bytes=l3_bytes(Path("/sys/devices/system/cpu"), allowed) or ASSUMED_L3,
        memory_bytes=_memory_bytes(),
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        isas=supported_isas(),
        busy=_busy(Path("/proc/stat")),
    )


def _cpuinfo(path: Path) -> tuple[str, frozenset[str]]:
    """Name and flags of the first processor; empty where there is no such file."""
    fields: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields.get("model name", ""), frozenset(fields.get("flags", "").split())


def _busy(path: Path) -> float:
    """0 where there is no such file."""
    counts = []
    for wait in (_MOMENT, 0.0):
        fields = path.read_text().splitlines()[0].split()[1:9] if path.exists() else []
        counts.append([int(field) for field in fields])
        time.sleep(wait)
    spent = [after - before for before, after in zip(*counts, strict=True)]
    idle = sum(spent[3:5])  # also that of waiting for disks
    return 1 - idle / sum(spent) if sum(spent) else 0.0


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
