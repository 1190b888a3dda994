"""Configs as they are published load here and in transformers, and mean the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chairlift.kernels.cpu.library import supported_isas
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.logprobs import check_logprobs
from tests.models.paged import packed_logits
from tests.models.published import PUBLISHED
from tests.models.test_families import close, prompt
from tests.models.tiny import hf_logits, hf_model

CASES = [
    pytest.param(family, name, id=f"{family}: {name}", marks=[] if place == 0 else [pytest.mark.nightly])
    for family, variants in PUBLISHED.items()
    for place, name in enumerate(variants)
]


def write(model_dir: Path, config: dict[str, Any]) -> Path:
    """A random model of a config, whose ``config.json`` stays as it is."""
    model_dir.mkdir()
    text = json.dumps(config)
    (model_dir / "config.json").write_text(text)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        given = AutoConfig.from_pretrained(model_dir)
        model = AutoModelForCausalLM.from_config(given, dtype=torch.float32)  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in name or ("ln_" in name and name.endswith("weight"))
            parameter.copy_(1 + 0.1 * values if norm else 0.25 * values)
    model.save_pretrained(model_dir)
    (model_dir / "config.json").write_text(text)
    return model_dir


@pytest.mark.parametrize(("family", "name"), CASES)
def test_it_is_what_transformers_makes_of_it(family: str, name: str, tmp_path: Path) -> None:
    model_dir, tokens = write(tmp_path / "model", PUBLISHED[family][name]), prompt(40)
    config = read_config(model_dir)
    assert config.model_type == family
    theirs = hf_model(model_dir)
    ours = load_model(model_dir, config.for_length(len(tokens)), torch.float32)
    assert close(packed_logits(ours, [tokens])[0], hf_logits(theirs, tokens))


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_engine_answers_as_transformers_does(family: str, name: str, tmp_path: Path) -> None:
    model_dir = write(tmp_path / "model", PUBLISHED[family][name])
    theirs = hf_model(model_dir)
    for kernels in (*("auto" for _ in supported_isas()[:1]), "torch"):
        check_logprobs(model_dir, theirs, 1e-3, dtype="float32", kernels=kernels, max_model_len=1024)
