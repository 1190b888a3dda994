from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chairlift.errors import EngineDeadError
from chairlift_lab.bench.startup import measure_startup, startup_lines

pytestmark = pytest.mark.full


@pytest.mark.nightly
def test_phases_follow_each_other() -> None:
    seconds = measure_startup({"model": "hashlm", "max_num_seqs": 2}, rounds=1)
    python = ("interpreter", "import", "load", "first token")
    served = ("server ready", "first token over HTTP")
    assert list(seconds) == [*python, "in all", *served, "server in all"]
    assert all(len(values) == 1 and values[0] > 0 for values in seconds.values())
    assert seconds["in all"][0] == pytest.approx(sum(seconds[name][0] for name in python), abs=0.001)
    assert seconds["server in all"][0] == pytest.approx(sum(seconds[name][0] for name in served), abs=0.001)


def test_a_model_that_does_not_load_says_why() -> None:
    with pytest.raises(EngineDeadError, match="'/no/such/model' is not a directory"):
        measure_startup({"model": "/no/such/model"}, rounds=1)


def test_sigterm_ends_what_was_started_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "chairlift", "bench", "startup", "hashlm"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(tmp_path)})
    while not (servers := list(tmp_path.glob("chairlift-startup-*/log"))):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    assert process.wait(120) == 143
    assert not servers[0].parent.exists(), "it is removed when the server has ended"


def test_the_report_has_median_and_range() -> None:
    assert list(startup_lines({"load": [3.0, 1.0, 2.0]})) == [
        "load                   median   2.00 s, from 1.00 to 3.00"
    ]
