from __future__ import annotations

import pytest

from chairlift.bench.startup import measure_startup, startup_lines
from chairlift.errors import EngineDeadError


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


def test_median_and_range() -> None:
    assert list(startup_lines({"load": [3.0, 1.0, 2.0]})) == [
        "load                   median   2.00 s, from 1.00 to 3.00"
    ]
