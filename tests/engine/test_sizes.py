"""The memory of a model is known before it is loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM
from chairlift.config import EngineConfig
from chairlift.loading.model import kv_plan
from chairlift.loading.sizes import ADAPTERS, PROCESS_BYTES, needed_bytes, sizes_of
from chairlift.models.model_files import read_network
from tests.models.vision.tiny import tiny_vlm

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
def test_drafts_and_adapters_count(tmp_path: Path) -> None:
    draft, adapter = tmp_path / "draft", tmp_path / "adapter"
    for folder, nbytes in ((draft, 5000), (adapter, 700)):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(nbytes))
        (folder / "config.json").write_text("{}")
    alone = needed_bytes(EngineConfig.from_flat(SETTINGS))
    drafts = SETTINGS | {"speculative_config": {"method": "draft_model", "model": str(draft)}}
    assert needed_bytes(EngineConfig.from_flat(drafts), [str(adapter)]) == alone + 5700
    assert asyncio.run(sizes_of([SETTINGS | {ADAPTERS: [str(adapter)]}])) == [alone + 700]


@pytest.mark.full
def test_the_image_encoder_counts(tmp_path: Path) -> None:
    model = tiny_vlm(tmp_path / "model")
    config = EngineConfig.from_flat({"model": str(model), "kv_cache_memory_bytes": 1 << 20, "swap_space_bytes": 0})
    stored = (model / "model.safetensors").stat().st_size
    parameters, plan = kv_plan(config, read_network(model, "auto"))
    assert parameters < stored
    assert needed_bytes(config) == PROCESS_BYTES + stored + plan


@pytest.mark.full
def test_another_process_computes_the_sizes_and_says_what_is_wrong() -> None:
    fine, wrong, hashlm = asyncio.run(
        sizes_of([SETTINGS, {"model": "/nowhere"}, {"model": "hashlm:seed=3", "num_kv_blocks": 10}])
    )
    assert fine == needed_bytes(EngineConfig.from_flat(SETTINGS))
    assert isinstance(wrong, str) and "/nowhere" in wrong
    assert hashlm == PROCESS_BYTES + 10 * 16 * 16
