"""Support for tests of fp8 matmuls with one scale per row, which some versions of PyTorch cannot compute on a CPU (2.11
cannot)."""

from __future__ import annotations

import functools

import pytest
import torch

__all__ = ["needs_rowwise_products"]


@functools.cache
def _on_the_cpu() -> bool:
    ones, values = torch.ones(16, 1), torch.ones(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(values, values.t(), ones, ones.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def needs_rowwise_products(device: torch.device) -> None:
    """Skip the test if ``device`` cannot compute fp8 matmuls with one scale per row."""
    if device.type == "cpu" and not _on_the_cpu():
        pytest.skip(f"PyTorch {torch.__version__} scales rows of fp8 on GPUs only")
