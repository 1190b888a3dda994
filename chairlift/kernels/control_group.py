"""What the control groups of this process allow: processors and memory. Linux, version 1 and 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["memory_limit", "processor_limit"]

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_QUOTAS: Final = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""Files with quota and period, of version 2 and of version 1."""
_MEMORY: Final = ("memory.max", "memory.limit_in_bytes")


def processor_limit() -> float | None:
    """Processors' worth of time that the smallest quota allows, of this process's group and of all groups around it;
    None without a quota."""
    limits = []
    for folder in _folders("cpu"):
        for names in _QUOTAS:
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # another version, or no quota ("max")
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                if quota > 0:  # -1 is none
                    limits.append(quota / period)
    return min(limits, default=None)


def memory_limit() -> int | None:
    """Bytes that the smallest limit allows, of this process's group and of all groups around it; None without one."""
    limits = []
    for folder in _folders("memory"):
        for name in _MEMORY:
            with contextlib.suppress(OSError, ValueError):  # another version, or no limit ("max")
                limits.append(int((folder / name).read_text()))
    return min(limits, default=None)


def _folders(controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those around it. In a container the groups outside of it are named,
    but have no folders: the files of the container's own group then lie in the root."""
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
        if ".." not in parts:  # a group outside of what this process can see
            yield from (base.joinpath(*parts[:count]) for count in range(len(parts), -1, -1))
