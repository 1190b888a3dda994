"""``config.json`` of published models with recurrent layers; see :mod:`tests.models.published`."""

from __future__ import annotations

from typing import Any

from tests.models.published_config import config_of

__all__ = ["PUBLISHED_RECURRENT"]


def _nemotron_h(pattern: str, **more: Any) -> dict[str, Any]:
    mamba = {"conv_kernel": 4, "expand": 2, "mamba_head_dim": 16, "mamba_hidden_act": "silu", "mamba_num_heads": 8}
    mamba |= {"chunk_size": 16, "mamba_proj_bias": False, "n_groups": 2, "ssm_state_size": 16, "use_conv_bias": True}
    # The least step time is a number to begin training from, which transformers also applies to prompts.
    steps = {"time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1}
    other = {"attention_bias": False, "layer_norm_epsilon": 1e-5, "mlp_bias": False, "mlp_hidden_act": "relu2"}
    other |= {"rescale_prenorm_residual": True, "residual_in_fp32": False, "sliding_window": None, "use_bias": False}
    given = {"head_dim": 16, "hidden_dropout": 0.0, "num_logits_to_keep": 1, "tie_word_embeddings": False}
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}, "use_mamba_kernels": True}
    layers = {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern), "time_step_min": 1e-12}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    parts = (mamba, steps, other, given, code, layers, ids, more)
    return config_of("nemotron_h", "NemotronHForCausalLM", "bfloat16", *parts)


PUBLISHED_RECURRENT: dict[str, dict[str, dict[str, Any]]] = {
    "nemotron_h": {
        "Nemotron-H-8B-Base-8K": _nemotron_h("M-M*-", max_position_embeddings=8192, rms_norm_eps=1e-5),
        "NVIDIA-Nemotron-Nano-9B-v2": _nemotron_h(
            *("M-MM*-",),
            **{"bos_token_id": 1, "eos_token_id": 12, "head_dim": 16, "max_position_embeddings": 131072},
        ),
    },
}
