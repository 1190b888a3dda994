"""Settings that a native family lacks run through transformers if its class has them, and are refused otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM
from chairlift.errors import ModelLoadError
from chairlift.models.fallback.config import TransformersConfig
from chairlift.models.model_files import read_network
from tests.models.logprobs import check_logprobs
from tests.models.tiny import hf_model
from tests.models.tiny_transformers import tiny_transformers_model

_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
_LONG |= {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama, LongRoPE": ("llama", {"rope_parameters": _LONG}, "rope_type 'longrope'"),
    "llama, GELU": ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "stablelm, norms of heads": ("stablelm", {"qk_layernorm": True}, "qk_layernorm = True"),
    "phi, norms of heads": ("phi", {"qk_layernorm": True}, "qk_layernorm = True"),
    "cohere, norms of heads": ("cohere", {"use_qk_norm": True}, "use_qk_norm is true"),
}
_PHIMOE_CODE = {
    "AutoConfig": "configuration_phimoe.PhiMoEConfig",
    "AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM",
}


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_what_the_native_family_lacks(case: str, tmp_path: Path) -> None:
    family, fields, words = CASES[case]
    model_dir = tiny_transformers_model(tmp_path, family, **fields)
    network = read_network(model_dir, "auto")
    assert isinstance(network, TransformersConfig)
    assert words in network.notes()[0]
    with pytest.raises(ModelLoadError, match="not supported"):
        read_network(model_dir, "native")
    check_logprobs(model_dir, hf_model(model_dir), 2e-3, dtype="float32", block_size=4)


@pytest.mark.parametrize(
    "change",
    [
        {"alibi": True},  # transformers' Llama has no such setting
        {"partial_rotary_factor": 0.5},
        {"kv_lora_rank": 4},
        {"hidden_act": "no-such-activation"},
        {"rope_scaling": {"rope_type": "no-such-type", "factor": 2.0}},
        {"num_hidden_layers": "many"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_settings_that_transformers_ignores_or_lacks_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    model_dir = tiny_transformers_model(tmp_path, "llama")
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelLoadError, match=f"{next(iter(change))}|no-such-type"):
        LLM(model_dir, num_kv_blocks=20, skip_tokenizer_init=True)


def test_phimoe_as_published_ends_where_its_magnitude_changes(tmp_path: Path) -> None:
    """Phi-3.5-MoE: from the original length on, transformers multiplies the rotation of the whole batch by another
    magnitude."""
    model_dir = tiny_transformers_model(tmp_path, "phimoe", lm_head_bias=True, attention_bias=True)
    path = model_dir / "config.json"
    factors = {"long_factor": [1.0 + i for i in range(8)], "short_factor": [1.0 + i / 9 for i in range(8)]}
    rope = {"type": "longrope", **factors, "long_mscale": 1.24, "short_mscale": 1.1}
    config = {key: value for key, value in json.loads(path.read_text()).items() if key != "rope_parameters"}
    config |= {"rope_scaling": {**rope, "original_max_position_embeddings": 64}, "rope_theta": 10000.0}
    config |= {"original_max_position_embeddings": 64, "input_jitter_noise": 0.01, "router_jitter_noise": 0.01}
    path.write_text(json.dumps({**config, "architectures": ["PhiMoEForCausalLM"], "auto_map": _PHIMOE_CODE}))
    assert read_network(model_dir, "auto").max_model_len == 64
    check_logprobs(model_dir, hf_model(model_dir), 2e-3, dtype="float32")
