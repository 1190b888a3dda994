"""Tiny random models of Hugging Face families by name, for tests of packing."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["EXACT", "LEAKING", "VOCABULARY", "tiny"]

VOCABULARY = 96

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,  # so large that one token visibly affects another
}
_GQA: dict[str, Any] = _BASE | {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256}
_MOE: dict[str, Any] = _GQA | {"head_dim": 8, "num_experts_per_tok": 2}
_NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# Name -> (model_type, settings). Windows are shorter than the sequences in the tests.
_EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GQA),
    "qwen3": ("qwen3", _GQA | {"head_dim": 8}),
    "mistral": ("mistral", _GQA | {"head_dim": 8, "sliding_window": 5}),
    "gemma3": (
        "gemma3_text",
        _GQA
        | {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("phi3", _GQA | {"original_max_position_embeddings": 256, "resid_pdrop": 0.0}),
    "mixtral": ("mixtral", _MOE | {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", _MOE | {"num_experts": 4, "moe_intermediate_size": 24}),
    "gpt2": ("gpt2", _BASE | _NO_DROPOUT | {"n_positions": 256}),
    "gpt_neox": ("gpt_neox", _BASE | {"intermediate_size": 48, "max_position_embeddings": 256}),
}
_LEAKING: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": (
        "opt",
        {key: value for key, value in _BASE.items() if key != "initializer_range"}
        | {"ffn_dim": 48, "max_position_embeddings": 256, "dropout": 0.0, "init_std": 0.2, "word_embed_proj_dim": 32},
    ),
    "bloom": ("bloom", _BASE),
    "mpt": ("mpt", _BASE | {"max_seq_len": 256}),
    "mamba": ("mamba", {key: value for key, value in _BASE.items() if "attention" not in key} | {"state_size": 8}),
    "mamba2": (
        "mamba2",
        {key: value for key, value in _BASE.items() if "attention" not in key}
        | {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    ),
    "qwen3_next": (
        "qwen3_next",
        _MOE
        | {
            "num_experts": 4,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "lfm2": ("lfm2", _GQA | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {key: value for key, value in _GQA.items() if key not in {"initializer_range", "max_position_embeddings"}}
        | {"num_hidden_layers": 3, "attention_window_size": 64, "w_init_variance_scale": 1.0},
    ),
}

EXACT = tuple(_EXACT)
"""Families that keep packed sequences separate when ``position_ids`` restart and no mask is given."""

LEAKING = tuple(_LEAKING)
"""Families that mix packed sequences without raising an error."""


def tiny(name: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, attention: str | None = None) -> Any:
    """A random model of the family in ``eval`` mode (no dropout), with weights drawn from ``seed``. The global random
    generator is not changed.

    ``attention`` is ``attn_implementation`` of transformers; by default transformers chooses.
    """
    import transformers

    model_type, settings = (_EXACT | _LEAKING)[name]
    config = transformers.AutoConfig.for_model(model_type, **settings)
    config.use_cache = False
    chosen = {} if attention is None else {"attn_implementation": attention}
    if "num_experts_per_tok" in settings:
        chosen["experts_implementation"] = "eager"  # the grouped matrix product has no float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, **chosen).to(dtype).eval()
