"""The latency bound of running requests limits the prompt tokens of a step, however long the prompt already is.

Changes that must make these fail: the price of a chunk without the tokens before it; no limit while a prompt runs.
"""

from __future__ import annotations

import pytest

from chairlift.core.scheduler.cost_model import CostModel, Roofline
from chairlift.core.scheduler.costs import Costs
from tests.core.scheduler.driver import Driver, request

PRICES = Roofline(weight_seconds=1e-3, token_seconds=1e-4, pair_seconds=1e-6)
SECONDS = 0.05


def chunks(pace: float | None) -> list[tuple[int, float]]:
    """(prompt tokens, predicted seconds) of each step that computes a prompt of 1,000 tokens beside a decode row."""
    costs = Costs([1], CostModel(PRICES))
    drive = Driver(num_blocks=400, costs=costs, max_num_batched_tokens=512, max_model_len=2000)
    drive.add(request("r0", range(8), 500))
    drive.step()
    if pace is not None:
        drive.scheduler.batch.paced["r0"] = pace
    drive.add(request("r1", range(100, 1100), 5))
    found = []
    for _ in range(200):
        out = drive.step()
        size = sum(chunk.num_tokens for chunk in out.chunks)
        if not size:
            return found
        pairs = sum(chunk.num_tokens * (chunk.start + (chunk.num_tokens + 1) / 2) for chunk in out.chunks)
        features = drive.scheduler.batch.features(out.num_decodes)._replace(prefill_tokens=size, prefill_context=pairs)
        found.append((size, costs.model.step_seconds(features)))
    raise AssertionError("the prompt did not end")


def test_steps_beside_a_paced_row_take_no_longer_than_its_bound() -> None:
    paced = chunks(SECONDS)
    assert sum(size for size, _ in paced) == 1000
    assert max(seconds for _, seconds in paced) <= SECONDS
    assert paced[0][0] > 2 * paced[-2][0]  # later chunks attend to more tokens, so they are smaller
    assert max(seconds for _, seconds in chunks(None)) > 3 * SECONDS


@pytest.mark.parametrize("begin", [0, 1000])
def test_a_budget_is_the_largest_chunk_within_the_bound(begin: int) -> None:
    costs = Costs([1], CostModel(PRICES))
    decodes = Driver().scheduler.batch.features(0)
    size = costs.chunk_budget(decodes, SECONDS, 512, begin=begin)
    seconds = [
        costs.model.step_seconds(
            decodes._replace(prefill_tokens=count, prefill_context=count * begin + count * (count + 1) / 2)
        )
        for count in (size, size + 1)
    ]
    assert seconds[0] <= SECONDS < seconds[1]
