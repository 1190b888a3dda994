"""Runs the kernels on the GPU if there is one, otherwise in Triton's interpreter on the CPU.

Triton reads an environment variable when a kernel is defined, and interprets the kernel if it is set. The kernels are
therefore imported here with the variable set. The variable is also set during each test of this folder, and Triton's
own library functions are replaced by interpreted ones, because another module may have imported Triton earlier. Other
tests are not affected.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
KERNELS = (
    *("coded_linear", "decode_state", "experts", "kv8", "linear_small", "norms", "paged_attention", "rope_cache"),
    *("low_rank", "recurrences", "routing", "sampling"),
)
LIBRARY = ("triton.language", "triton.language.core", "triton.language.standard", "triton.language.random")

try:
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setenv("TRITON_INTERPRET", "1")
        import triton.language
        from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
        from triton.runtime.jit import JITFunction

        PLAIN_CAST, PLAIN_CONVERT = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp
        for name in (*KERNELS, "scaled"):
            importlib.import_module(f"chairlift.kernels.triton.{name}")
        importlib.import_module("tests.kernels.triton.probes")
    MISSING = ""
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "triton":
        raise
    MISSING = "Triton is not installed; it is part of the extra 'test'"


class _Skipped(pytest.Module):
    """A file of tests that is skipped because it cannot be imported."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(MISSING, allow_module_level=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: object, parent: pytest.Collector) -> pytest.Module | None:
    return _Skipped.from_parent(parent, path=module_path) if MISSING else None


def cast(self: Any, source: Any, target: Any) -> Any:
    """Convert between dtypes with a GPU's rounding. Triton's interpreter, which stores bfloat16 as 16-bit integers,
    truncates instead."""
    old, new = source.dtype.scalar, target.scalar
    if old.is_fp32() and new.is_bf16():
        rounded = torch.from_numpy(np.array(source.data)).to(torch.bfloat16).view(torch.int16)
        return TensorHandle(rounded.numpy().view(np.uint16), new)
    if old.is_bf16() and new.is_fp32():
        return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), new)
    return PLAIN_CAST(self, source, target)


def convert(self: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert from and to fp8. Triton's interpreter rounds fp8 wrongly, and has no NaN in fp8."""
    old, new = source.dtype.scalar, target.scalar
    if old.is_fp32() and new.is_fp8e4nv():
        rounded = torch.from_numpy(np.array(source.data)).to(torch.float8_e4m3fn)
        return TensorHandle(rounded.view(torch.uint8).numpy(), new)
    if old.is_fp8e4nv():
        wide = torch.from_numpy(np.array(source.data)).view(torch.float8_e4m3fn).float()
        return self.cast_impl(TensorHandle(wide.numpy(), triton.language.float32), target)
    return PLAIN_CONVERT(self, source, target, rounding)


def dot(self: Any, a: Any, b: Any, c: Any, *how: Any) -> Any:
    """Matmul that is also correct for bfloat16, and whose rows do not depend on their index in the tile.

    It sums in float64, because a BLAS may round a row differently at another index.
    """
    wide = (x if x.dtype.scalar.is_fp32() else self.create_fp_ext(x, c.dtype.scalar) for x in (a, b))
    product = np.matmul(*(x.data.astype(np.float64) for x in wide))
    return TensorHandle(product.astype(c.data.dtype) + c.data, c.dtype.scalar)


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        if not ON_GPU:
            patch.setenv("TRITON_INTERPRET", "1")
            for library in map(importlib.import_module, LIBRARY):
                for name, value in vars(library).copy().items():
                    if isinstance(value, JITFunction):
                        patch.setattr(library, name, InterpretedFunction(value.fn))
            patch.setattr(InterpreterBuilder, "create_dot", dot)
            patch.setattr(InterpreterBuilder, "cast_impl", cast)
            patch.setattr(InterpreterBuilder, "create_fp_to_fp", convert)
            importlib.import_module("triton.experimental.gluon")  # otherwise Triton imports it at the first launch
        yield


@pytest.fixture(
    params=[
        pytest.param("cpu", id="interpreter", marks=pytest.mark.skipif(ON_GPU, reason="the GPU runs the kernels")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="no GPU is there")]),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
