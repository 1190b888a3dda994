"""Processors of this machine: their architecture, those that this process may use, and how many of them are large."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from chairlift.base.sysctl import sysctl_number

__all__ = ["allowed_processors", "architecture", "can_pin", "num_large_processors"]


def architecture() -> str:
    """Name of the processors' architecture: ``x86_64``, ``aarch64`` (which macOS calls ``arm64``), or another name."""
    machine = platform.machine()
    return "aarch64" if machine == "arm64" else machine


def allowed_processors() -> list[int]:
    """Numbers of the processors that this process may use, ascending. On systems without affinity, as macOS, these are
    all processors."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def can_pin() -> bool:
    """Whether the system lets a process choose its processors: Linux does, macOS does not."""
    return hasattr(os, "sched_setaffinity")


def num_large_processors(
    folder: Path = Path("/sys/devices/system/cpu"),
    processors: Sequence[int] | None = None,
    number_of: Callable[[str], int | None] = sysctl_number,
) -> int:
    """Number of allowed ``processors`` without the small cores of ARM64. All threads wait for the slowest after each
    operation, so small cores would slow large ones.

    Linux describes the cores in ``folder``: small ones have less than half of the capacity of the largest. macOS has
    the number of its performance cores in ``hw.perflevel0.logicalcpu``. On other architectures, and if the system does
    not describe its cores, all count.
    """
    allowed = allowed_processors() if processors is None else processors
    if architecture() != "aarch64":
        return len(allowed)
    if fast := number_of("hw.perflevel0.logicalcpu"):
        return min(fast, len(allowed))
    try:
        capacities = [int((folder / f"cpu{number}" / "cpu_capacity").read_text()) for number in allowed]
    except (OSError, ValueError):  # a kernel that does not describe its cores
        return len(allowed)
    return sum(2 * capacity >= max(capacities) for capacity in capacities)
