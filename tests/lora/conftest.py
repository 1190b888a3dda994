"""A small model and its layers that adapters may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.lora.sites import Sites, sites_of
from tests.models.test_families import load
from tests.models.tiny import tiny_hf_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def sites(model_dir: Path) -> Sites:
    return sites_of(load(model_dir))
