"""Tiny random models of any family in transformers, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["tiny_transformers_model"]

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "n_inner": 96,
    "expert_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "mlp_intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "decoder_layers": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "decoder_attention_heads": 4,
    "attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "max_seq_len": 512,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "top_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "sliding_window": 9,
    "max_window_layers": 2,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Name of a size -> value. Each family uses the names that its config has."""
_OWN: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
    },
    "llama4_text": {"attention_chunk_size": 128, "floor_scale": 256, "no_rope_layer_interval": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 9},
    "longcat_flash": {"moe_topk": 2, "zero_expert_num": 2, "num_layers": 2},
    "modernbert-decoder": {"pad_token_id": 0},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "opt": {"word_embed_proj_dim": 64},
}
"""Family -> further config fields that this family needs."""


def _takes(config: Any, name: str) -> bool:
    """Whether the config has a field of that name that can be set."""
    if isinstance(getattr(type(config), name, None), property) and name not in type(config).attribute_map:
        return False
    return name in type(config).attribute_map or name in vars(config) or name in type(config).__dataclass_fields__


def tiny_transformers_model(directory: Path, model_type: str, *, seed: int = 0, std: float = 0.25, **more: Any) -> Path:
    """Write a random model of a family and return its directory.

    Matrices and biases have standard deviation ``std``; norms are around 1. ``more`` are fields of the family's config.
    """
    known = CONFIG_MAPPING[model_type]()
    fields = {name: value for name, value in _SIZES.items() if _takes(known, name)}
    if "qk_rope_head_dim" in fields:
        fields |= {"head_dim": fields["qk_rope_head_dim"], "num_key_value_heads": 4}
    if getattr(known, "layer_types", None) is not None:
        kinds = list(dict.fromkeys(known.layer_types))
        fields["layer_types"] = [kinds[i % len(kinds)] for i in range(4)]
    config = AutoConfig.for_model(model_type, **{**fields, **_OWN.get(model_type, {}), **more})
    with torch.device("meta"):
        count = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())  # type: ignore[no-untyped-call]
    if count > 2_000_000:
        raise ValueError(f"{model_type} has {count:,} parameters; say in _OWN what makes it small")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in name or name.split(".")[-2].startswith("ln")
            parameter.copy_(1 + 0.1 * values if norm and name.endswith("weight") else std * values)
    model_dir = directory / model_type
    model.save_pretrained(model_dir)
    return model_dir
