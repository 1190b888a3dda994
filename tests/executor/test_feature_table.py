"""docs/features.md agrees with the checks that refuse settings."""

from __future__ import annotations

import importlib.util

import pytest

from chairlift.kernels.cpu.library import supported_isas
from tools import feature_table, markdown


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton's checks need the package triton")
@pytest.mark.skipif("avx2" not in supported_isas(), reason="the native kernels' checks need AVX2 and the kernels")
def test_the_table_of_features_is_current() -> None:
    page = feature_table.PAGE.read_text(encoding="utf-8")
    made = markdown.replaced(page, feature_table.BEGIN, feature_table.feature_table())
    assert made == page, "run tools/feature_table.py"
