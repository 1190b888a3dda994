"""Text models inside larger models run through transformers, and answer as the larger model does without images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM
from chairlift.errors import ModelLoadError
from chairlift.models.fallback.config import read_transformers_config
from chairlift.models.fallback.families import ALIASES, INSIDE
from chairlift.models.model_files import read_network
from tests.models.logprobs import check_logprobs
from tests.models.tiny import hf_model
from tests.models.tiny_transformers import tiny_transformers_model

PREFIXES = {"gemma3n": "model.language_model.", "gemma4": "model.language_model.", "llama4": "language_model.model."}
_CODE = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "modeling_deepseek.DeepseekV3Model"}


def wrap(folder: Path, family: str, text_dir: Path) -> Path:
    """A checkpoint of the larger model, as publishers write it, around the text model in ``text_dir``."""
    folder.mkdir()
    text = json.loads((text_dir / "config.json").read_text())
    prefix = PREFIXES.get(family, "language_model.model.")
    head = "" if prefix.startswith("model.") else "language_model."
    named: dict[str, torch.Tensor] = {"vision_tower.patch.weight": torch.ones(2), "model.audio_tower.x": torch.ones(2)}
    for name, tensor in load_file(text_dir / "model.safetensors").items():
        named[prefix + name.removeprefix("model.") if name.startswith("model.") else head + name] = tensor
    save_file(named, folder / "model.safetensors")
    whole = {"architectures": [f"{family}ForConditionalGeneration"], "model_type": family, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({**whole, "text_config": text, "vision_config": {}}))
    return folder


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama4"),
        *(pytest.param(family, marks=pytest.mark.nightly) for family in sorted(INSIDE) if family != "llama4"),
    ],
)
def test_the_text_model_of_a_larger_one_answers_as_transformers_does(family: str, tmp_path: Path) -> None:
    text_dir = tiny_transformers_model(tmp_path, INSIDE[family])
    folder = wrap(tmp_path / "whole", family, text_dir)
    assert read_network(folder, "auto").model_type == INSIDE[family]
    check_logprobs(folder, hf_model(text_dir), 2e-3, dtype="float32", block_size=4)


def test_attention_in_chunks_ends_where_it_differs(tmp_path: Path) -> None:
    """Within the first chunk, and before queries grow, it is plain attention."""
    for fields, longest in (({}, 128), ({"floor_scale": 64}, 63), ({"attn_temperature_tuning": False}, 128)):
        config = read_transformers_config(tiny_transformers_model(tmp_path / str(longest), "llama4_text", **fields))
        assert config.max_model_len == longest
        assert f"{longest:,} tokens" in config.notes()[0]
    llm = LLM(tmp_path / "128" / "llama4_text", num_kv_blocks=60, skip_tokenizer_init=True, dtype="float32")
    assert llm.info.max_model_len == 128


def published_kimi(model_dir: Path) -> dict[str, Any]:
    config = json.loads((model_dir / "config.json").read_text())
    code = {**_CODE, "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    return {**config, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "auto_map": code}


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    assert ALIASES["kimi_k2"] == "deepseek_v3"
    model_dir = tiny_transformers_model(tmp_path, "deepseek_v3")
    theirs = hf_model(model_dir)
    (model_dir / "config.json").write_text(json.dumps(published_kimi(model_dir)))
    check_logprobs(model_dir, theirs, 2e-3, dtype="float32")


def test_a_larger_model_without_a_text_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": None}))
    with pytest.raises(ModelLoadError, match="text_config must describe the text model"):
        read_network(tmp_path, "auto")
