"""Every model type of transformers is native and right, runs through transformers, or is refused by its name.

``test_recurrent_families.py`` compares native families with recurrent layers, ``test_transformers.py`` serves those
that run through transformers, ``tests/models/vision`` those that read images, and ``test_pooling.py`` the encoders.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from chairlift.cli.main import main
from chairlift.errors import ModelLoadError
from chairlift.models.fallback.families import ALIASES, ALLOWED, INSIDE, REASONS, REFUSED
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_network
from chairlift.models.pooling import ENCODERS, read_pooled_config
from chairlift.models.registry import FAMILIES
from tests.models.paged import packed_logits
from tests.models.pooled import EMBEDDERS, pooled_model
from tests.models.test_families import close, prompt
from tests.models.tiny import hf_logits, hf_model
from tests.models.tiny_transformers import tiny_transformers_model
from tests.models.vision.tiny import (
    VISION_FAMILIES,
    tiny_gemma,
    tiny_intern,
    tiny_llava,
    tiny_mistral,
    tiny_qwen,
    tiny_vlm,
)
from tools.popular_models import POPULAR_EMBEDDERS, POPULAR_EYES, POPULAR_TEXTS, runs, sees

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


def compared(model_dir: Path, *flags: str) -> None:
    """Fail unless ``chairlift check`` finds the model equal to transformers'."""
    sizes = ("--num-kv-blocks", "64", "--max-model-len", "120")
    assert main(["check", str(model_dir), "--compare", "transformers", "--dtype", "float32", *sizes, *flags]) == 0


ELSEWHERE = (FAMILIES.keys() & REFUSED.keys()) | INSIDE.keys() | {*VISION_FAMILIES}
"""Types that ``test_recurrent_families.py``, ``test_whole_transformers.py`` or a test below compares."""


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", sorted((CAUSAL & SERVED) - ELSEWHERE))
def test_each_served_type_passes_the_check(model_type: str, tmp_path: Path) -> None:
    """With a config of transformers' class, except for sizes."""
    compared(tiny_transformers_model(tmp_path, model_type), "--skip-tokenizer-init")


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", sorted(EMBEDDERS))
def test_each_embedder_passes_the_check(model_type: str, tmp_path: Path) -> None:
    compared(pooled_model(tmp_path, model_type)[0], "--skip-tokenizer-init", "--runner", "pooling")


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", VISION_FAMILIES)
def test_texts_of_each_type_that_reads_images_pass_the_check(model_type: str, tmp_path: Path) -> None:
    makers: dict[str, Callable[[Path], Path]] = {
        **{"gemma3": tiny_gemma, "internvl": tiny_intern, "llava": tiny_llava, "mistral3": tiny_mistral},
        **{name: functools.partial(tiny_vlm, family=name) for name in ("idefics3", "smolvlm")},
    }
    make = makers.get(model_type, functools.partial(tiny_qwen, family=model_type))
    compared(make(tmp_path / "model"))


def test_the_list_of_used_checkpoints_has_its_lengths() -> None:
    lists = (POPULAR_TEXTS, POPULAR_EMBEDDERS, POPULAR_EYES)
    assert [sum(map(len, each.values())) for each in lists] == [40, 10, 10]
    ways = [runs(kind, name) for each in lists[:2] for kind, names in each.items() for name in names]
    ways += [sees(kind) for kind, names in POPULAR_EYES.items() for _ in names]
    assert len(ways) - sum(way.startswith("no:") for way in ways) == 55
