"""Fixtures for the compiled kernels. If the kernels are missing, tests are skipped with a reason, except on a CI
machine, where they fail."""

from __future__ import annotations

import os

import pytest
import torch

from chairlift.kernels.cpu.library import Library, load, supported_isas, why_unavailable
from tests.kernels.cpu.one_op import Machine


@pytest.fixture(scope="session")
def native_library() -> Library:
    library = load()
    if library is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must test the kernels: {why_unavailable()}")
        pytest.skip(why_unavailable())
    return library


@pytest.fixture(params=supported_isas() or ("none",))
def isa(request: pytest.FixtureRequest, native_library: Library) -> str:
    """Name of each instruction-set path that this machine can run."""
    name = request.param
    assert isinstance(name, str)
    return name


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each dtype in which the kernels compute."""
    name = request.param
    assert isinstance(name, torch.dtype)
    return name


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def machine(request: pytest.FixtureRequest, isa: str, dtype: torch.dtype) -> Machine:
    """Each combination of instruction-set path, dtype and number of threads."""
    return Machine(isa, dtype, int(request.param))
