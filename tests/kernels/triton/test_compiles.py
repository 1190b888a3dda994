"""The compiler accepts every kernel that the interpreter accepts, for each kind of GPU that matters here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMES = {
    "_add_chosen", "_add_splits", "_attend", "_attend_shared", "_begin", "_choose", "_coded_product", "_combine",
    "_convolve", "_decode", "_delta_scan", "_expand", "_gated_norm", "_kept_ids", "_mamba_scan", "_of_pairs",
    "_of_tiles", "_product", "_rms_norm", "_rope_and_cache", "_rotary_table", "_route", "_settle", "_shrink",
    "_silu_and_mul", "_sort_pairs", "_store", "_write",
}  # fmt: skip


SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program may have: CUDA C++ Programming Guide, compute capabilities."""


@pytest.mark.nightly
@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_compiles_without_a_gpu(capability: int) -> None:
    command = [sys.executable, "-m", "tests.kernels.triton.compile_all", str(capability)]
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, env=compiled)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line for line in run.stdout.splitlines() if " registers, " in line]
    in_fp8 = {"_quantize_rows"} if capability >= 89 else set()
    assert {line.split(": ")[1].split(" ")[0] for line in lines} == NAMES | in_fp8
    # A launch that asks for more fails when it is first needed.
    assert [line for line in lines if int(line.split(" B shared")[0].split(", ")[-1]) > SHARED[capability] << 10] == []
    # A recurrent state stays in registers while a program computes the tokens of a row.
    scans = [line for line in lines if line.split(": ")[1].startswith(("_delta_scan", "_mamba_scan"))]
    assert scans and [line for line in scans if " 0 B stack" not in line] == []
    # The next keys, or weights, must be on their way while a tile of them is computed.
    loops = ("_attend", "_coded", "_of_tiles", "_product", "_shrink")
    idle = [line for line in lines if line.split(": ")[1].startswith(loops) and ", 0 copies" in line]
    chunks = "256, 256, 16"  # head size, padded, and size of a block: chunks with heads of 256
    wide = [f"8, 1, {chunks}, 64, 32, 1", f"2, 8, {chunks}, 4096, 72.13475204444816, 64, 32, 1"]
    wide += [f"8, 1, {chunks}, 1024, 64, 16, 1", f"32, 1, {chunks}, 64, 32, 1", f"32, 1, {chunks}, 32, 16, 1"]
    # The last constant of each launch says whether it waits for the launch before it.
    constants = [line.split("[")[1].split("]")[0].rpartition(", ")[0] for line in idle]
    assert constants == (wide if capability != 100 else [wide[2], wide[4]])
