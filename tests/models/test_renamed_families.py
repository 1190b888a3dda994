"""Families that transformers lacks compute what the class of transformers with the same mathematics computes.

MiMo is Qwen2. Ling 2 is GLM-4.5 with norms of heads, under other names, and with q, k and v in one tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from chairlift.errors import ModelLoadError
from chairlift.kernels.weights import PLAIN
from chairlift.models.causal_lm import CausalLM
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.hf_config import parse_config
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.logprobs import check_logprobs
from tests.models.paged import packed_logits
from tests.models.published_renamed import PUBLISHED_RENAMED
from tests.models.test_families import check_packed_and_chunked, close, prompt
from tests.models.tiny import hf_logits, hf_model

_KEYS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
}
CASES = [
    pytest.param(family, name, id=f"{family}: {name}", marks=[] if place == 0 else [pytest.mark.nightly])
    for family, variants in PUBLISHED_RENAMED.items()
    for place, name in enumerate(variants)
]


def load(model_dir: Path) -> CausalLM:
    return load_model(model_dir, read_config(model_dir), torch.float32, weight_format=PLAIN)


def like(config: dict[str, Any]) -> dict[str, Any]:
    """The config of transformers' class that computes the same."""
    kept = {key: value for key, value in config.items() if key != "auto_map"}
    if config["model_type"] == "mimo":
        return {**kept, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    renamed = {_KEYS.get(key, key): value for key, value in kept.items()}
    return {**renamed, "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "attention_bias": False}


def renamed(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors under the publisher's names."""
    if config["model_type"] == "mimo":
        return {**tensors, "model.mtp_layers.0.input_layernorm.weight": torch.ones(64)}
    found = {}
    for name, tensor in tensors.items():
        if ".self_attn.q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif ".self_attn.k_proj." not in name and ".self_attn.v_proj." not in name:
            for theirs, usual in _NAMES.items():
                name = name.replace(theirs, usual)
            found[name] = tensor
    return found


def write(folder: Path, config: dict[str, Any]) -> tuple[Path, Any]:
    """A random model in the publisher's layout, and transformers' model with the same weights."""
    plain, published = folder / "plain", folder / "published"
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**like(config)), dtype=torch.float32)  # type: ignore[no-untyped-call]
    corrections = [each for each in model.named_buffers() if each[0].endswith("correction_bias")]
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *corrections):
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * values if "norm" in name else 0.25 * values)
    model.save_pretrained(plain)
    published.mkdir()
    save_file(renamed(load_file(plain / "model.safetensors"), config), published / "model.safetensors")
    (published / "config.json").write_text(json.dumps(config))
    return published, hf_model(plain)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_logits_and_answers_equal_transformers(family: str, name: str, tmp_path: Path) -> None:
    model_dir, theirs = write(tmp_path, PUBLISHED_RENAMED[family][name])
    check_packed_and_chunked(load(model_dir), theirs)
    notes = check_logprobs(model_dir, theirs, 1e-3, dtype="float32", max_model_len=1024)
    assert not any("auto_map" in note for note in notes)


@pytest.mark.parametrize("family", PUBLISHED_RENAMED)
def test_saved_weights_equal_the_loaded_ones(family: str, tmp_path: Path) -> None:
    config = next(iter(PUBLISHED_RENAMED[family].values()))
    model_dir, _ = write(tmp_path, config)
    saved, stored = hf_state_dict(load(model_dir)), load_file(model_dir / "model.safetensors")
    assert saved.keys() == {name for name in stored if "mtp_layers" not in name}
    assert all(torch.equal(saved[name], stored[name]) for name in saved)


@pytest.mark.planted("test_logits_and_answers_equal_transformers[bailing_moe: Ling-mini-2.0]")
@pytest.mark.parametrize(
    "change",
    [
        {"moe_router_enable_expert_bias": False},
        {"use_qk_norm": False},
        {"partial_rotary_factor": 1.0},
        {"n_group": 1, "topk_group": 1},
        {"routed_scaling_factor": 1.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_setting_that_is_ignored_is_noticed(change: dict[str, Any], tmp_path: Path) -> None:
    config = PUBLISHED_RENAMED["bailing_moe"]["Ling-mini-2.0"]
    model_dir, theirs = write(tmp_path, config)
    tensors = load_file(model_dir / "model.safetensors")
    dropped = {"moe_router_enable_expert_bias": "expert_bias", "use_qk_norm": "y_layernorm"}.get(next(iter(change)))
    save_file(
        {name: tensor for name, tensor in tensors.items() if dropped is None or dropped not in name},
        model_dir / "model.safetensors",
    )
    (model_dir / "config.json").write_text(json.dumps({**config, **change}))
    assert not close(packed_logits(load(model_dir), [prompt(40)])[0], hf_logits(theirs, prompt(40)), 0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"score_function": "softmax"}, "only sigmoid"), ({"norm_head": True}, "norm_head is true")],
)
def test_ling_1_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        parse_config({**PUBLISHED_RENAMED["bailing_moe"]["Ling-mini-2.0"], **change})
