"""Configs as they are published load here and in transformers, and mean the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from chairlift.kernels.cpu.library import supported_isas
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from chairlift.models.registry import FAMILIES
from tests.models.logprobs import check_logprobs
from tests.models.paged import packed_logits
from tests.models.published import PUBLISHED
from tests.models.test_families import close, prompt
from tests.models.tiny import hf_logits

CASES = [
    pytest.param(family, name, id=f"{family}: {name}", marks=[] if place == 0 else [pytest.mark.nightly])
    for family, variants in PUBLISHED.items()
    for place, name in enumerate(variants)
]


STORED_HEADS = ("Mistral-Small-3.1-24B-Instruct-2503",)
"""Models whose files hold a head of its own, although their configs do not say so, and transformers' class ties it by
default. transformers then keeps the stored one."""


def auto_class(config: dict[str, Any]) -> Any:
    """transformers' class of classes for this model: for texts alone, or for images and texts."""
    whole = config["model_type"] in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if whole else AutoModelForCausalLM


def hf_model(model_dir: Path) -> PreTrainedModel:
    """Model in ``model_dir``, loaded by transformers with its plain (eager) attention."""
    found = auto_class(json.loads((model_dir / "config.json").read_text()))
    model: PreTrainedModel = found.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    model.eval()  # type: ignore[no-untyped-call]
    return model


def write(model_dir: Path, config: dict[str, Any], name: str = "") -> Path:
    """A random model of a config, whose ``config.json`` stays as it is."""
    model_dir.mkdir()
    text = json.dumps(config)
    (model_dir / "config.json").write_text(text)
    own = name in STORED_HEADS
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        given = AutoConfig.from_pretrained(model_dir, **({"tie_word_embeddings": False} if own else {}))
        model = auto_class(config).from_config(given, dtype=torch.float32)
        for place, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in place or ("ln_" in place and place.endswith("weight"))
            parameter.copy_(1 + 0.1 * values if norm else 0.25 * values)
    model.save_pretrained(model_dir)
    (model_dir / "config.json").write_text(text)
    return model_dir


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_published_config_gives_the_logits_of_transformers(family: str, name: str, tmp_path: Path) -> None:
    model_dir, tokens = write(tmp_path / "model", PUBLISHED[family][name], name), prompt(40)
    config = read_config(model_dir)
    assert config.model_type == family
    theirs = hf_model(model_dir)
    ours = load_model(model_dir, config.for_length(len(tokens)), torch.float32)
    assert close(packed_logits(ours, [tokens])[0], hf_logits(theirs, tokens))


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "name"), [case for case in CASES if not FAMILIES[case.values[0]].sees_images])
def test_the_engine_answers_as_transformers_does(family: str, name: str, tmp_path: Path) -> None:
    """Families that read images need more files; tests/models/vision compares their answers."""
    model_dir = write(tmp_path / "model", PUBLISHED[family][name], name)
    theirs = hf_model(model_dir)
    longest = min(1024, read_config(model_dir).max_model_len)
    for kernels in (*("auto" for _ in supported_isas()[:1]), "torch"):
        check_logprobs(model_dir, theirs, 1e-3, dtype="float32", kernels=kernels, max_model_len=longest)
