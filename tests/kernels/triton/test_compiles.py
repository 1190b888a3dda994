"""What the interpreter accepts the compiler accepts too, for the oldest and the newest GPU that matter here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMES = {
    "_add_splits", "_attend", "_begin", "_choose", "_combine", "_kept_ids", "_product", "_rms_norm", "_rope_and_cache",
    "_rotary_table", "_settle", "_silu_and_mul", "_store", "_write",
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_without_a_gpu(capability: int) -> None:
    command = [sys.executable, "-m", "tests.kernels.triton.compile_all", str(capability)]
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, env=compiled)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line for line in run.stdout.splitlines() if " registers, " in line]
    assert {line.split(": ")[1].split(" ")[0] for line in lines} == NAMES
    # The next keys, or weights, must be on their way while a tile of them is computed.
    idle = [line for line in lines if line.split(": ")[1].startswith(("_attend", "_product")) and ", 0 copies" in line]
    assert [line.split("[")[1].split("]")[0] for line in idle] == ["8, 1, 256, 256, 16, 64, 32, 1"]
