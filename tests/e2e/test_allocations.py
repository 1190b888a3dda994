"""One allocation fails at a time: no answer is wrong, and an error ends the request that needed the memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.allocation_sweep import NEIGHBOURS, PARTS
from tests.native import needs_kernels

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD needs Linux")]

_COMPILERS = ("g++", "c++", "clang++")
_ERROR = re.compile(r"MemoryError|its output could not be made \((MemoryError|RuntimeError)\)")
_STEP = re.compile("the step failed: (MemoryError|SystemError)$")
_MAX_DEATHS = 5
"""Maximum number of processes that may die in one sweep."""


@pytest.fixture(scope="session")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library that lets allocations fail."""
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler on the PATH, which the failing allocator needs")
    library = tmp_path_factory.mktemp("allocator") / "failing_allocator.so"
    source = Path(__file__).with_name("failing_allocator.cpp")
    command = [compiler, "-O1", "-shared", "-fPIC", "-std=c++17", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return library


def sweep(allocator: Path, kernels: str, least: int, part: str, sites: int) -> tuple[dict[int, dict[str, str]], str]:
    """Let the allocations fail. Returns (number of the allocation -> fates of the requests, errors of the processes
    that died). A process that died is replaced, and the sweep goes on after the allocation that ended it."""
    fates: dict[int, dict[str, str]] = {}
    deaths, first, seen = "", 0, 1
    environment = {**os.environ, "LD_PRELOAD": str(allocator)}
    for _ in range(_MAX_DEATHS):
        command = [
            sys.executable,
            "-m",
            "tests.e2e.allocation_sweep",
            kernels,
            str(least),
            part,
            str(first),
            str(sites),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        said = [json.loads(line) for line in done.stdout.splitlines()]
        fates |= {line["ended"]: line["fates"] for line in said if line.get("failed")}
        if done.returncode == 0:
            return fates, deaths
        begun = [line["begins"] for line in said if "begins" in line]
        assert begun, done.stderr
        deaths += f"{part}, allocation {begun[-1]}: exit code {done.returncode}\n{done.stderr}\n"
        first, seen = begun[-1] + said[0]["step"], said[0]["seen"]
        if first >= seen:
            return fates, deaths
    raise AssertionError(f"{_MAX_DEATHS} processes died:\n{deaths[-8000:]}")


def check(fates: dict[int, dict[str, str]]) -> None:
    """A neighbour is answered, unless the engine could not plan or store the whole step (docs/operations.md)."""
    for number, fate in fates.items():
        if any(_STEP.match(each) for each in fate.values()):
            assert all(_STEP.match(each) or each == "answered" for each in fate.values()), (number, fate)
            continue
        assert all(fate[name] == "answered" for name in NEIGHBOURS), (number, fate)
        assert fate["victim"] == "answered" or _ERROR.search(fate["victim"]), (number, fate)


@needs_kernels
@pytest.mark.parametrize("part", PARTS)
def test_a_failed_allocation_ends_at_most_its_own_request(part: str, allocator: Path) -> None:
    fates, deaths = sweep(allocator, "auto", 4096, part, 60)
    assert not deaths
    assert fates or part == "plain", "a plain request may need no such allocation"
    check(fates)


@pytest.mark.parametrize("part", PARTS)
def test_a_failed_allocation_in_pytorch_ends_at_most_its_own_request_or_the_process(part: str, allocator: Path) -> None:
    """oneDNN, which PyTorch calls for products, does not notice all failures of its own allocations."""
    fates, deaths = sweep(allocator, "torch", 16384, part, 60)
    assert fates
    check(fates)
    for death in deaths.split(f"{part}, allocation ")[1:]:
        assert "Segmentation fault" not in death or "in packed_linear" in death, death
