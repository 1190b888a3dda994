"""Every model type of transformers is native and right, runs through transformers, or is refused by its name.

``test_recurrent_families.py`` compares native families with recurrent layers, ``test_transformers.py`` serves those
that run through transformers, ``tests/models/vision`` those that read images, and ``test_pooling.py`` the encoders.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from chairlift.errors import ModelLoadError
from chairlift.models.fallback.families import ALIASES, ALLOWED, INSIDE, REASONS, REFUSED
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_network
from chairlift.models.pooling import ENCODERS, read_pooled_config
from chairlift.models.registry import FAMILIES
from tests.models.paged import packed_logits
from tests.models.test_families import close, prompt
from tests.models.tiny import hf_logits, hf_model
from tests.models.tiny_transformers import tiny_transformers_model
from tools.popular_models import POPULAR_EMBEDDERS, POPULAR_TEXTS, runs

CAUSAL = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SERVED = FAMILIES.keys() | ALLOWED | INSIDE.keys() | ALIASES.keys()
OTHER = sorted((CAUSAL | set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)) - SERVED)
NATIVE = sorted(
    name for name in FAMILIES.keys() & CAUSAL if not FAMILIES[name].text_type and REFUSED.get(name) != "state"
)


def test_every_other_type_is_refused_by_name(tmp_path: Path) -> None:
    for model_type in OTHER:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 8}))
        with pytest.raises(ModelLoadError, match=f"model_type '{model_type}' is not supported") as refusal:
            read_network(tmp_path, "auto")
        assert model_type not in REFUSED or REASONS[REFUSED[model_type]] in str(refusal.value)


def test_every_other_encoder_is_refused_by_name(tmp_path: Path) -> None:
    for model_type in sorted(set(MODEL_FOR_MASKED_LM_MAPPING_NAMES) - ENCODERS.keys() - FAMILIES.keys()):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 8}))
        with pytest.raises(ModelLoadError, match=f"model_type '{model_type}' is not supported"):
            read_pooled_config(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", NATIVE)
def test_native_types_equal_transformers_with_the_settings_of_its_configs(model_type: str, tmp_path: Path) -> None:
    """The config has the defaults of transformers' class, except for sizes."""
    model_dir = tiny_transformers_model(tmp_path, model_type)
    network = read_network(model_dir, "auto")
    assert isinstance(network, NetworkConfig)
    ours = load_model(model_dir, network.for_length(40), torch.float32)
    assert close(packed_logits(ours, [prompt(40)])[0], hf_logits(hf_model(model_dir), prompt(40)))


def test_the_list_of_used_checkpoints_has_its_lengths() -> None:
    assert [sum(map(len, each.values())) for each in (POPULAR_TEXTS, POPULAR_EMBEDDERS)] == [40, 10]
    ways = [runs(kind, name) for kind, names in POPULAR_TEXTS.items() for name in names]
    assert sum(way.startswith("no:") for way in ways) == 3
