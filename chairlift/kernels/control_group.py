"""Limits on processors and memory that Linux control groups (versions 1 and 2) set for this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from chairlift.base.sysctl import sysctl_number

__all__ = ["memory_limit", "processor_limit", "total_memory"]

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")
_QUOTAS: Final = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""Names of the files with quota and period: one file in version 2, two in version 1."""
_MEMORY: Final = ("memory.max", "memory.limit_in_bytes")


def processor_limit() -> float | None:
    """Maximum number of processors for this process: the smallest quota of its control group and of all enclosing
    groups. None if there is no quota."""
    limits = []
    for folder in _folders("cpu"):
        for names in _QUOTAS:
            with contextlib.suppress(
                OSError, ValueError, ZeroDivisionError
            ):  # files of the other version, or "max": no quota
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                if quota > 0:  # -1 means no quota
                    limits.append(quota / period)
    return min(limits, default=None)


def memory_limit() -> int | None:
    """Maximum number of bytes of memory for this process: the smallest limit of its control group and of all enclosing
    groups. None if there is no limit."""
    limits = []
    for folder in _folders("memory"):
        for name in _MEMORY:
            with contextlib.suppress(OSError, ValueError):  # another version, or no limit ("max")
                limits.append(int((folder / name).read_text()))
    return min(limits, default=None)


def total_memory() -> int:
    """Bytes of memory that this process may use: the machine's memory, or the limit of its control groups if that is
    lower. 4 GiB if neither is known."""
    total = 0
    for line in _MEMINFO.read_text().splitlines() if _MEMINFO.exists() else []:
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    total = total or sysctl_number("hw.memsize") or 0  # macOS
    limit = memory_limit()
    return (total if limit is None else min(total or limit, limit)) or 4 << 30


def _folders(controller: str) -> Iterator[Path]:
    """Folders of this process's control group and of its enclosing groups.

    A container knows the names of groups outside it, but cannot see their folders. The files of the container's own
    group are then in the root folder.
    """
    bases: list[tuple[Path, str]] = [(_ROOT, "/"), (_ROOT / controller, "/")]
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if (number, controllers) == ("0", ""):
                bases += [(_ROOT, path), (_ROOT / "unified", path)]
            elif controller in controllers.split(","):
                bases += [(_ROOT / controllers, path), (_ROOT / controller, path)]
    for base, path in bases:
        parts = [part for part in path.split("/") if part]
        if ".." not in parts:  # a group that this process cannot see
            yield from (base.joinpath(*parts[:count]) for count in range(len(parts), -1, -1))
