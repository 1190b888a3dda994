"""Describes the machine that a benchmark runs on, for the benchmark's record."""

from __future__ import annotations

import dataclasses
import os
import platform
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.base.processors import allowed_processors
from chairlift.kernels.cpu.library import default_threads, supported_isas
from chairlift.kernels.roof import ASSUMED_L3, l3_bytes

__all__ = ["HostMachine", "describe_machine", "machine_facts"]

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
"""Processor flags that determine which kernels can run, with Linux's names."""

_MOMENT = 0.25
"""Time in seconds over which the load of the machine is measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostMachine:
    """Properties of a machine, as plain data that can be written as JSON."""

    cpu: str
    flags: tuple[str, ...]
    """Flags of the processor that determine which kernels can run."""
    processors: int
    """Number of processors that this process may use."""
    l3_bytes: int
    """Total size of the last-level caches of the processors that this process may use. 64 MiB if the system does not
    report it."""
    memory_bytes: int
    """Size of the machine's memory in bytes. 0 if the system does not report it."""
    system: str
    isas: tuple[str, ...]
    """Instruction sets whose kernels run on this machine, slowest first."""
    busy: float
    """Fraction of the time of all processors that other programs used while this process waited."""


_WIDTH = 76
"""Maximum number of characters per line in the list of instruction sets."""


def machine_facts(machine: Mapping[str, Any]) -> dict[str, str]:
    """Facts for a report: label -> text. ``machine`` has the fields of a :class:`HostMachine` as plain data."""
    return {
        "processor": f"{machine['cpu']}, {machine['processors']} in use",
        "system": str(machine["system"]),
        "instruction sets": textwrap.fill(", ".join(machine["flags"]), _WIDTH) or "unknown",
        "L3 cache": f"{machine['l3_bytes'] >> 20:,} MiB",
        "busy before the start": f"{machine['busy']:.0%}",
    }


def describe_machine() -> HostMachine:
    """Read the properties of this machine from the operating system."""
    cpu, flags = _cpuinfo(Path("/proc/cpuinfo"))
    return HostMachine(
        cpu=cpu or platform.processor() or platform.machine(),
        flags=tuple(flag for flag in _FLAGS if flag in flags),
        processors=default_threads(),
        l3_bytes=l3_bytes(Path("/sys/devices/system/cpu"), allowed_processors()) or ASSUMED_L3,
        memory_bytes=_memory_bytes(),
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        isas=supported_isas(),
        busy=_busy(Path("/proc/stat")),
    )


def _cpuinfo(path: Path) -> tuple[str, frozenset[str]]:
    """(name, flags) of the first processor. Both are empty if the file does not exist."""
    fields: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields.get("model name", ""), frozenset(fields.get("flags", "").split())


def _busy(path: Path) -> float:
    """Measure :attr:`HostMachine.busy` from ``/proc/stat``. 0 if the file does not exist."""
    counts = []
    for wait in (_MOMENT, 0.0):
        fields = path.read_text().splitlines()[0].split()[1:9] if path.exists() else []
        counts.append([int(field) for field in fields])
        time.sleep(wait)
    spent = [after - before for before, after in zip(*counts, strict=True)]
    idle = sum(spent[3:5])  # idle time and time spent waiting for disks
    return 1 - idle / sum(spent) if sum(spent) else 0.0


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
