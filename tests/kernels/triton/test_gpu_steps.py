"""``benchmarks/gpu_steps.py`` times steps of several variants that compute the same bits."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.kernels.triton import program
from tests.models.tiny import tiny_hf_model

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    spec = importlib.util.spec_from_file_location("gpu_steps_script", BENCHMARKS / "gpu_steps.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
@pytest.mark.parametrize("wrong", [False, True])
def test_variants_are_timed_and_compared(
    wrong: bool, script: Any, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_hf_model(tmp_path, "qwen2", num_hidden_layers=1, intermediate_size=32)
    report = tmp_path / "report.json"
    flags = ["--rows", "20", "--context", "5", "--rounds", "1", "--steps", "2", "--dtype", "float32"]
    monkeypatch.setattr(
        sys, "argv", ["gpu_steps.py", "--model", str(model), "--device", device.type, "--json", str(report), *flags]
    )
    linear_small = program.linear_small

    def other_bits(*args: Any, gated: bool, **how: Any) -> Tensor:
        out = linear_small(*args, gated=gated, **how)
        return out + 1 if gated else out

    if wrong:
        monkeypatch.setattr(program, "linear_small", other_bits)
        with pytest.raises(SystemExit, match="other bits"):
            script.main()
    else:
        script.main()
    (record,) = json.loads(report.read_text())[model.name]
    assert record["rows"] == 20 and record["same_bits"] != wrong
    assert list(record["median_ms"]) == ["before", "swiglu", "and norms", "all"] and record["ratio"]["before"] == 1.0
    assert all(len(times) == 1 and times[0] > 0 for times in record["ms"].values())
