"""Rotary scaling is transformers', in the new and in the old spelling of config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from chairlift.models.hf_config import NetworkConfig, parse_config
from chairlift.models.layers.rotary import RotaryEmbedding, inverse_frequencies
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.paged import packed_logits
from tests.models.tiny import hf_logits, hf_model, tiny_hf_model

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-implicit-length": {"factor": 4.0},
    "yarn-mscale": {"factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-mscale-alone": {"factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7},
    "yarn-attention-factor": {"factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.5},
    "yarn-betas-exact": {
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-nulls-and-zeros": {
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 0,
        "beta_slow": None,
        "mscale": 0,
        "mscale_all_dim": 0.0,
        "truncate": None,
    },
}
BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}


def spelled(name: str, theta: float, *, old: bool) -> dict[str, Any]:
    rope_type = name.split("-")[0]
    if old:
        scaling = {"type": rope_type, **SCALINGS[name]} if rope_type != "default" else None
        return {"rope_theta": theta, "rope_scaling": scaling}
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **SCALINGS[name]}}


def ours_and_theirs(config: NetworkConfig, hf_config: LlamaConfig, positions: torch.Tensor) -> tuple[Any, Any]:
    ours = RotaryEmbedding(config.head_dim, config.rope, config.max_position_embeddings)(positions, torch.float32)
    theirs = LlamaRotaryEmbedding(hf_config)(torch.zeros(1), positions[None])
    # transformers repeats the frequencies for the second half of each head.
    return ours, tuple(x[0, :, None, : config.head_dim // 2] for x in theirs)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_cosines_and_sines_equal_transformers(name: str, theta: float, old: bool) -> None:
    raw = {**BASE, **spelled(name, theta, old=old)}
    fields = {key: value for key, value in spelled(name, theta, old=old).items() if value is not None}
    hf_config = LlamaConfig(**{key: value for key, value in BASE.items() if key != "model_type"}, **fields)
    ours, theirs = ours_and_theirs(parse_config(raw), hf_config, torch.arange(512))
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.equal(mine, reference)


def test_scalings_differ_from_each_other() -> None:
    seen = {name: parse_config({**BASE, **spelled(name, 1e4, old=False)}) for name in SCALINGS}
    tables = [inverse_frequencies(32, config.rope, 512) for config in seen.values()]
    signatures = {(tuple(frequencies.tolist()), factor) for frequencies, factor in tables}
    # An explicit mscale alone changes nothing: the factor is inferred only when mscale_all_dim is there as well.
    assert len(signatures) == len(tables) - 1


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_logits_with_scaled_positions_equal_transformers(name: str, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", **spelled(name, 10_000.0, old=False))
    tokens = [(7 * i) % 128 for i in range(200)]
    expected = hf_logits(hf_model(model_dir), tokens)
    ours = packed_logits(load_model(model_dir, read_config(model_dir)), [tokens])[0]
    assert float((ours - expected).abs().max() / expected.abs().max()) <= 1e-4
    raw = json.loads((model_dir / "config.json").read_text())
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    unscaled = packed_logits(load_model(model_dir, parse_config(raw)), [tokens])[0]
    assert float((unscaled - expected).abs().max() / expected.abs().max()) > 1e-2


def test_dynamic_scaling_is_static_at_the_longest_length() -> None:
    factor, raw = 4.0, {**BASE, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    config = parse_config(raw)
    assert config.max_model_len == 512 * 4
    hf_config = LlamaConfig(
        **{key: value for key, value in BASE.items() if key != "model_type"},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": factor},
    )
    # transformers grows its base with the longest position it has seen; at the end of the range both agree.
    ours, theirs = ours_and_theirs(config, hf_config, torch.arange(config.max_model_len))
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6)


def test_half_precision_keeps_float32_angles() -> None:
    config = parse_config(BASE)
    rotary = RotaryEmbedding(32, config.rope, 512).to(torch.bfloat16)
    positions = torch.tensor([0, 1, 4097, 100_003])
    exact, rounded = rotary(positions, torch.float32), rotary(positions, torch.bfloat16)
    for wide, narrow in zip(exact, rounded, strict=True):
        assert torch.equal(wide.to(torch.bfloat16), narrow)
