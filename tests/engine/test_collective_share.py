"""The share of step time in which processes wait follows the last steps."""

from __future__ import annotations

import pytest

from chairlift.engine.collective_share import CollectiveShare


def test_the_share_is_that_of_the_last_steps() -> None:
    waited = [3.0]
    share = CollectiveShare(lambda: waited[0])
    assert share.share is None
    for seconds in [0.1] * 500 + [0.4] * 500:
        waited[0] += 0.1
        share.landed(seconds)
    assert share.share == pytest.approx(0.25, abs=0.01)
    waited[0] += 50.0
    share.landed(0.0)  # a step without time counts for nothing
    assert share.share == pytest.approx(0.25, abs=0.01)
    waited[0] += 100.0
    share.landed(1.0)
    assert share.share == 1.0
