"""Loading a quantised model never holds much more than the weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models.quantized import packers
from tests.models.quantized.make import model_pair
from tests.models.test_loader import MEASURE
from tests.native import needs_kernels


@pytest.mark.nightly
@needs_kernels
@pytest.mark.parametrize(
    ("made", "codes_stay"),
    [(packers.gptq(symmetric=False), True), (packers.awq(), True), (packers.block_fp8(), False)],
)
def test_rows_are_read_in_pieces(tmp_path: Path, made: Any, codes_stay: bool) -> None:
    """``codes_stay``: the kernels multiply with the codes themselves; floats take eight times as much."""
    warm, _ = model_pair(tmp_path / "warm", *made)
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 8, "num_key_value_heads": 8}
    measured, twin = model_pair(tmp_path / "measured", *made, head_dim=128, num_hidden_layers=2, **sizes)
    weights = (twin / "model.safetensors").stat().st_size
    assert weights > 220 << 20
    done = subprocess.run([sys.executable, "-c", MEASURE, warm, measured], capture_output=True, text=True, check=True)
    if codes_stay:
        assert weights * 0.125 < int(done.stdout) < weights * 0.5
    else:  # a piece of 16 MiB goes through several hands, as codes, scales and products
        assert weights * 0.95 < int(done.stdout) < weights + (150 << 20)
