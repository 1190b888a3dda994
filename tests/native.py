"""A pytest mark for tests that need the compiled kernels, which not every machine has."""

from __future__ import annotations

import pytest

from chairlift.kernels.cpu.library import load, why_unavailable

__all__ = ["needs_kernels"]

needs_kernels = pytest.mark.skipif(load() is None, reason=why_unavailable() or "never")
