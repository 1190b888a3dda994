"""Files that llama.cpp's own converter writes are the models that they were made from, for each architecture: alone,
in company, in chunks and preempted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from chairlift.models.hf_config import read_json
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.gguf.make import converted
from tests.models.gguf.test_model import FURTHER, parameters
from tests.models.paged import packed_logits
from tests.models.preempted import check_company_and_preemption
from tests.models.published_renamed import PUBLISHED_RENAMED
from tests.models.test_families import check_packed_and_chunked, close, prompt
from tests.models.test_renamed_families import write as write_renamed
from tests.models.tiny import hf_logits, hf_model, tiny_hf_model
from tests.models.vision.tiny import tiny_qwen

_YARN: Final = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3: Final = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
_MULTIPLIERS: Final = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.5,
}
_GPT_OSS_ROPE: Final = {**_YARN, "factor": 8.0, "beta_fast": 4.0, "truncate": False}
_OLMO3_ROPES: Final = {
    "full_attention": {**_YARN, "attention_factor": 1.2},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_MAMBA: Final = {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_groups": 1}
_NETS: Final = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "partial_rotary_factor": 0.5}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    **FURTHER,
    "arcee": ("arcee", {}),
    "cohere": ("cohere", {"logit_scale": 0.7}),
    "cohere2": ("cohere2", {"logit_scale": 0.5}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "exaone": ("exaone", {"rope_parameters": _LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "exaone4": ("exaone4", {}),
    "exaone4-whole": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "falcon": ("falcon", {"ffn_hidden_size": 256, "num_kv_heads": 1}),
    "falcon-groups": ("falcon", {"ffn_hidden_size": 256, "new_decoder_architecture": True}),
    "falcon_h1": ("falcon_h1", {"head_dim": 16}),
    "falcon_h1-norm": ("falcon_h1", {"head_dim": 16, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "glm": ("glm", {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-norms": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False}),
    "gpt2": ("gpt2", {"n_inner": None}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-in-turn": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_oss": ("gpt_oss", {"swiglu_limit": 7.0, "rope_parameters": _GPT_OSS_ROPE}),
    "granite": ("granite", {**_MULTIPLIERS, "attention_bias": True, "mlp_bias": True}),
    "granitemoe": ("granitemoe", _MULTIPLIERS),
    "granitemoehybrid": ("granitemoehybrid", {**_MAMBA, **_MULTIPLIERS}),
    "granitemoehybrid-dense": ("granitemoehybrid", {**_MAMBA, "num_local_experts": 0, "num_experts_per_tok": 0}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "internlm3": ("internlm3", {}),
    "lfm2": ("lfm2", {}),
    "lfm2_moe": ("lfm2_moe", {}),
    "mamba2": ("mamba2", {"intermediate_size": 128}),
    "ministral3": ("ministral3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h-experts": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "ME*E-",
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 72,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "olmo3-yarn": ("olmo3", {"rope_parameters": _OLMO3_ROPES}),
    "olmoe": ("olmoe", {}),
    "phi": ("phi", {"num_key_value_heads": 4, "intermediate_size": 256}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_5_text": ("qwen3_5_text", _NETS),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", _NETS),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_next": ("qwen3_next", _NETS),
    "seed_oss": ("seed_oss", {"attention_out_bias": True}),
    "smollm3": ("smollm3", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-side-by-side": ("stablelm", {"use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": _YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": _YARN | {"beta_fast": 16.0, "attention_factor": 1.2}}),
}
_PUBLISHED: Final = {
    "exaone": {"activation_function": "hidden_act"},
    "cohere2": {"rotary_pct": "partial_rotary_factor"},
    "gpt2": {"n_ctx": "n_positions"},
    "gpt_neox": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
}
"""Family -> key that published ``config.json`` files have and the converter reads -> the key in which transformers 5
writes it, also within ``rope_parameters``."""
REARRANGED: Final = ("falcon_h1", "nemotron_h")
"""Families whose weights differ, although the logits are equal: the converter multiplies the factors of Falcon-H1 into
the weights, and reorders the rows of q and k of Nemotron-H, which are not rotated."""
_KINDS: Final = {"full_attention": "attention", "linear_attention": "mamba"}
"""Type of a layer of Granite 4 that transformers 5 writes -> that of published files, which the converter reads."""


LING: Final = PUBLISHED_RENAMED["bailing_moe"]["Ling-mini-2.0"]
"""``config.json`` of Ling 2, for which transformers has no class."""


def convert(folder: Path, name: str) -> tuple[Path, Path]:
    """Write the random model ``name`` and let llama.cpp convert it. Returns its directory and the file."""
    family, overrides = MODELS[name]
    model_dir, path = tiny_hf_model(folder, family, **overrides), folder / "model.gguf"
    config = read_json(model_dir / "config.json")
    for key, written in _PUBLISHED.get(family, {}).items():
        config[key] = {"partial_rotary_factor": 1.0, **config, **config.get("rope_parameters", {})}[written]
    if family == "granitemoehybrid":
        config["layer_types"] = [_KINDS[kind] for kind in config["layer_types"]]
    (model_dir / "config.json").write_text(json.dumps(config))
    return model_dir, converted(model_dir, path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    model_dir, path = convert(tmp_path, name)
    family = MODELS[name][0]
    _check_file(path, model_dir, family)
    model = hf_model(model_dir)
    if name == "phi3-longrope":  # transformers has other factors for short texts, and here all texts have the same
        long = load_model(path, read_config(path).for_length(40), "float32")
        assert close(packed_logits(long, [prompt(40)])[0], hf_logits(model, prompt(40)))
        check_company_and_preemption(path, None)
        return
    check_packed_and_chunked(load_model(path, read_config(path).for_length(61), "float32"), model)
    check_company_and_preemption(path, model)


def _check_file(path: Path, model_dir: Path, family: str) -> None:
    """Fail unless a file has the weights of the model that it was made from."""
    ours, theirs = parameters(path), parameters(model_dir)
    assert ours.keys() == theirs.keys()
    for each in ours if family not in REARRANGED else ():
        torch.testing.assert_close(ours[each], theirs[each], rtol=0, atol=5e-7)


@pytest.mark.nightly
def test_a_converted_ling_gives_the_logits_of_the_class_with_the_same_mathematics(tmp_path: Path) -> None:
    """transformers has no class for Ling 2."""
    model_dir, model = write_renamed(tmp_path, LING)
    path = converted(model_dir, tmp_path / "model.gguf")
    _check_file(path, model_dir, "bailing_moe")
    check_packed_and_chunked(load_model(path, read_config(path).for_length(61), "float32"), model)
    check_company_and_preemption(path, model)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_text_model_of_a_model_that_reads_images_is_converted(tmp_path: Path, family: str) -> None:
    """For texts, positions on three axes are equal, so the file is read as a model of texts only."""
    model_dir, path = tiny_qwen(tmp_path / "model", family), tmp_path / "model.gguf"
    converted(model_dir, path)
    _check_file(path, model_dir, family)
    tokens = prompt(40)
    found, wanted = (
        packed_logits(load_model(each, read_config(each), "float32"), [tokens])[0] for each in (path, model_dir)
    )
    assert close(found, wanted)
