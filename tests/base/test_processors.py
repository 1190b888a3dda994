"""Processors: what systems say about them, and what is taken if they say nothing. No ARM machine is needed."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import pytest

from chairlift.base.processors import allowed_processors, architecture, can_pin, num_large_processors
from chairlift.base.sysctl import sysctl_number
from chairlift.fleet.local import machine_processors


class Sysctl:
    """A C library as that of macOS: it has ``sysctlbyname``."""

    def __init__(self, numbers: dict[bytes, Any]) -> None:
        self._numbers = numbers

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: object, new_size: Any) -> int:
        found = self._numbers.get(name)
        if found is None or new is not None or new_size.value != 0 or size._obj.value < ctypes.sizeof(found):
            return -1
        ctypes.memmove(value, ctypes.byref(found), ctypes.sizeof(found))
        size._obj.value = ctypes.sizeof(found)
        return 0


def capacities_in(folder: Path, capacities: list[int | None]) -> list[int]:
    for processor, capacity in enumerate(capacities):
        (folder / f"cpu{processor}").mkdir()
        if capacity is not None:
            (folder / f"cpu{processor}" / "cpu_capacity").write_text(f"{capacity}\n")
    return list(range(len(capacities)))


@pytest.mark.parametrize(
    ("machine", "capacities", "count"),
    [
        ("aarch64", [250, 250, 870, 1024], 2),
        ("aarch64", [1024, 1024, 1024, 1024], 4),
        ("aarch64", [250, 250, None, 1024], 4),
        ("x86_64", [250, 250, 870, 1024], 4),
    ],
)
def test_small_cores_of_arm64_get_no_thread(
    machine: str, capacities: list[int | None], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert num_large_processors(tmp_path, capacities_in(tmp_path, capacities)) == count


def test_of_allowed_small_cores_all_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capacities_in(tmp_path, [250, 250, 1024])
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert num_large_processors(tmp_path, [0, 1]) == 2


@pytest.mark.parametrize(("numbers", "count"), [({b"hw.perflevel0.logicalcpu": ctypes.c_int32(4)}, 4), ({}, 10)])
def test_macos_says_how_many_performance_cores_there_are(
    numbers: dict[bytes, Any], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert architecture() == "aarch64"
    library = Sysctl(numbers)
    assert num_large_processors(tmp_path, range(10), lambda name: sysctl_number(name, library)) == count


def test_sysctl_reads_integers_of_four_and_eight_bytes() -> None:
    library = Sysctl({b"hw.ncpu": ctypes.c_int32(12), b"hw.memsize": ctypes.c_uint64(48 << 30)})
    assert sysctl_number("hw.ncpu", library) == 12
    assert sysctl_number("hw.memsize", library) == 48 << 30
    assert sysctl_number("hw.nothing", library) is None
    assert sysctl_number("hw.ncpu", object()) is None  # a library without the function, as that of Linux


def test_without_affinity_all_processors_count_and_none_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert allowed_processors() == [0, 1, 2]
    assert not can_pin()
    assert machine_processors() == []
