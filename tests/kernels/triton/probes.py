"""Kernels that make parts of other kernels testable, random cases, and numbers of seeds."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.sampling import _rough_noise, _words

__all__ = ["TOLERANCE", "mutated", "needs_fp8", "normal", "random_words", "rough_noise", "seeds"]

needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU does not know fp8"
)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def seeds(default: int) -> list[object]:
    """Values for ``pytest.mark.parametrize``: ``default`` seeds, and more seeds in nightly runs."""
    return [default, pytest.param(20 * default, marks=pytest.mark.nightly)]


def normal(*shape: int, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@triton.jit
def _words_of(
    out_ptr: tl.tensor, seed_ptr: tl.tensor, position: tl.tensor, first: tl.tensor, NUM: tl.constexpr
) -> None:
    words = _words(tl.load(seed_ptr), position, first, NUM)
    tl.store(out_ptr + tl.arange(0, NUM), words.to(tl.int64))


@triton.jit
def _noise_of(out_ptr: tl.tensor, words_ptr: tl.tensor, NUM: tl.constexpr) -> None:
    at = tl.arange(0, NUM)
    tl.store(out_ptr + at, _rough_noise(tl.load(words_ptr + at).to(tl.uint32)))


def random_words(seed: int, position: int, first: int, device: torch.device) -> Tensor:
    """Random words of 64 token ids, beginning with the id ``first``: int64 [64]. ``seed`` is an int64."""
    out = torch.zeros(64, dtype=torch.int64, device=device)
    _words_of[(1,)](out, torch.tensor([seed], device=device), position, first, NUM=64)
    return out


def rough_noise(words: Tensor) -> Tensor:
    """Approximate Gumbel noise in float32 that the kernel makes of random ``words`` (int64). The number of words must
    be a power of 2."""
    out = torch.zeros(len(words), dtype=torch.float32, device=words.device)
    _noise_of[(1,)](out, words, NUM=len(words))
    return out


def mutated(kernels: ModuleType, old: str, new: str, where: Path) -> ModuleType:
    """A copy of a module of kernels, written into the directory ``where``, with one text replaced by another."""
    source = inspect.getsource(kernels)
    assert source.count(old) == 1, old
    path = where / "mutated_kernels.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutated_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mutated_kernels", module)  # dataclasses look there
        spec.loader.exec_module(module)
    return module
