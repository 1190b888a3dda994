"""Tiny random Hugging Face models that transformers writes, and transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

__all__ = [
    "EXPERT_FAMILIES",
    "FAMILIES",
    "MORE_FAMILIES",
    "RECURRENT_FAMILIES",
    "hf_logits",
    "hf_model",
    "tiny_hf_model",
]

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# The tiny models keep the differences between families. For example, Qwen3's head size is not hidden size / heads, and
# Mistral has a short window.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 24},
    "gpt2": {"n_inner": 96},
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
"""Families that all equivalence tests use. Together they have the features that matter to kernels and caches."""
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {},
    "cohere2": {"sliding_window": 9, "num_hidden_layers": 4},
    "cwm": {"head_dim": 32, "sliding_window": 9},
    "ernie4_5": {"head_dim": 32},
    "exaone": {},
    "exaone4": {"sliding_window": 9, "num_hidden_layers": 4},
    "falcon": {"ffn_hidden_size": 96, "num_kv_heads": 2},
    "gemma": {"head_dim": 32},
    "gemma2": {
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 12.0,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 40,
        "sliding_window": 9,
    },
    "gemma3_text": {
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 40,
        "sliding_window": 9,
    },
    "glm": {"head_dim": 32, "pad_token_id": None, "partial_rotary_factor": 0.5},
    "glm4": {"head_dim": 32, "pad_token_id": None, "partial_rotary_factor": 0.5},
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 9},
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": 4},
    "granite": {},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hyperclovax": {"head_dim": 32},
    "internlm3": {"head_dim": 32},
    "ministral": {"head_dim": 32, "sliding_window": 9},
    "ministral3": {"head_dim": 32},
    "olmo2": {},
    "olmo3": {"sliding_window": 9, "num_hidden_layers": 4},
    "opt": {"ffn_dim": 96, "pad_token_id": None, "word_embed_proj_dim": 64},
    "phi": {},
    "phi3": {"pad_token_id": None},
    "seed_oss": {"head_dim": 32},
    "smollm3": {"num_hidden_layers": 4, "pad_token_id": None},
    "stablelm": {"partial_rotary_factor": 0.5},
    "starcoder2": {},
}
"""Family -> fields of its tiny config, for the families that test_more_families.py compares with transformers."""
EXPERT_FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 40,
        "n_group": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "topk_group": 2,
    },
    "gpt_oss": {
        "head_dim": 32,
        "num_experts_per_tok": 2,
        "num_local_experts": 5,
        "sliding_window": 9,
        "swiglu_limit": 1.5,
    },
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None},
    "qwen2_moe": {
        "moe_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 72,
    },
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 3},
}
"""Family -> fields of its tiny config, for the families with experts, which test_expert_families.py compares with
transformers."""
_DELTA_NETS: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
}
_SHARED_EXPERT: dict[str, Any] = {
    "moe_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 72,
}

RECURRENT_FAMILIES: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        **{"attention_in_multiplier": 0.5, "attention_out_multiplier": 0.75, "embedding_multiplier": 3.0},
        **{"key_multiplier": 0.5, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.75, 0.5]},
        **{"ssm_in_multiplier": 1.5, "ssm_multipliers": [0.7, 0.5, 1.25, 0.8, 0.6], "ssm_out_multiplier": 0.3},
        "mamba_d_ssm": 128,
        "mamba_d_state": 32,
        "mamba_n_groups": 2,
        "mamba_n_heads": 8,
    },
    "granitemoehybrid": {
        "attention_multiplier": 0.25,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "mamba_n_heads": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 5,
        "shared_intermediate_size": 64,
    },
    "lfm2": {
        "block_multiple_of": 32,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_hidden_layers": 4,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "moe_intermediate_size": 40,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 4,
    },
    "mamba2": {
        "chunk_size": 8,
        "expand": 2,
        "head_dim": 16,
        "n_groups": 2,
        "num_heads": 8,
        "state_size": 24,
    },
    "nemotron_h": {
        "head_dim": 32,
        "hybrid_override_pattern": "M-*M-",
        "mamba_head_dim": 16,
        "mamba_num_heads": 8,
        "n_groups": 2,
        "num_hidden_layers": 5,
        "ssm_state_size": 32,
    },
    "qwen3_5_text": _DELTA_NETS,
    "qwen3_5_moe_text": {**_DELTA_NETS, **_SHARED_EXPERT},
    "qwen3_next": {**_DELTA_NETS, **_SHARED_EXPERT},
}
"""Family -> fields of its tiny config, for the families with recurrent layers, which test_recurrent_families.py
compares with transformers."""
WHOLE_FAMILIES = ("mistral3", "qwen3_5", "qwen3_5_moe")
"""Families of larger models (for example with an image encoder) whose text model belongs to one of the families
above."""


def tiny_fields(family: str) -> dict[str, Any]:
    """Fields of the transformers config of a family's tiny model."""
    own = {**_FAMILY_DEFAULTS, **MORE_FAMILIES, **EXPERT_FAMILIES, **RECURRENT_FAMILIES}.get(family, {})
    return {**_DEFAULTS, **own}


def tiny_hf_model(
    tmp_path: Path,
    family: str,
    *,
    seed: int = 0,
    std: float = 0.25,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a random model of a family from one of the lists above, and return its directory.

    Matrices and biases have standard deviation ``std`` (with 0.25, logits are far apart, so that greedy decoding has no
    ties); norms are around 1. ``overrides`` are fields of the family's transformers config. There is no tokenizer.
    """
    config = AutoConfig.for_model(family, **{**tiny_fields(family), **overrides})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        corrections = [(name, each) for name, each in model.named_buffers() if name.endswith("correction_bias")]
        for name, parameter in (*model.named_parameters(), *corrections):
            values = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in name or ("ln_" in name and name.endswith("weight"))
            parameter.copy_(1 + 0.1 * values if norm else std * values)
    model_dir = tmp_path / f"{family}-{seed}"
    model.to(dtype).save_pretrained(model_dir)
    return model_dir


def hf_model(model_dir: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Model in ``model_dir``, loaded by transformers with its plain (eager) attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager")
    model.eval()  # type: ignore[no-untyped-call]
    return model


def hf_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Logits [n, vocab] of one sequence."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits
