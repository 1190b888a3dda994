"""The memory of a model is known before it is loaded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chairlift import LLM
from chairlift.config import EngineConfig
from chairlift.loading.sizes import PROCESS_BYTES, needed_bytes, sizes_of

SETTINGS: dict[str, Any] = {
    "model": "bundled",
    "kv_cache_memory_bytes": 8 << 20,
    "swap_space_bytes": 1 << 20,
    "max_num_seqs": 4,
}


@pytest.mark.full
def test_the_plan_is_that_of_the_engine() -> None:
    llm = LLM(**SETTINGS)
    kv = llm.info.num_blocks * llm.info.block_bytes
    planned = needed_bytes(EngineConfig.from_flat(SETTINGS)) - PROCESS_BYTES
    assert planned == pytest.approx(llm.info.weight_bytes + kv + (1 << 20), rel=0.02)


@pytest.mark.full
def test_another_process_computes_the_sizes_and_says_what_is_wrong() -> None:
    fine, wrong, hashlm = asyncio.run(
        sizes_of([SETTINGS, {"model": "/nowhere"}, {"model": "hashlm:seed=3", "num_kv_blocks": 10}])
    )
    assert fine == needed_bytes(EngineConfig.from_flat(SETTINGS))
    assert isinstance(wrong, str) and "/nowhere" in wrong
    assert hashlm == PROCESS_BYTES + 10 * 16 * 16
