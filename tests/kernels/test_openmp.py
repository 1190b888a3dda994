"""The OpenMP threads of PyTorch end when they are told to, and later operations give the same bits."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import os, threading, time
import torch
from chairlift.kernels.openmp import end_threads

torch.set_num_threads(3)
rows, weight = torch.randn(64, 512), torch.randn(1024, 512)
before = len(os.listdir("/proc/self/task"))
expected = rows @ weight.T + rows.exp().sum()
busy = len(os.listdir("/proc/self/task"))
assert busy > before, (busy, before)
assert end_threads()
end = time.monotonic() + 20
while len(os.listdir("/proc/self/task")) >= busy:
    assert time.monotonic() < end, "the threads go on"
assert torch.equal(rows @ weight.T + rows.exp().sum(), expected)
assert end_threads() and end_threads()
"""


def test_threads_end_and_results_stay() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=120)
