"""Writers that are killed at their writes leave no wrong block, and lose none that was complete."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("writers", [10, pytest.param(1_000, marks=pytest.mark.nightly)])
def test_killed_writers_leave_no_wrong_block(writers: int) -> None:
    module = "tests.engine.kv_store.killed_writers"
    command = [sys.executable, "-W", "error", "-m", module, "--writers", str(writers)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith(f"{writers} writers died")
