"""InternLM 3 (Shanghai AI Laboratory, 2025): Llama with one config key for all biases."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import Family, Fields

__all__ = ["INTERNLM3"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    """Read the key that turns biases on. transformers writes ``attention_bias`` and ``mlp_bias``; the model's own files
    have ``qkv_bias`` and ``bias``."""
    names = [("qkv_bias", "attention_bias"), ("bias", "mlp_bias")]
    attention, mlp = (fields.boolean(own if fields.get(own) is not None else usual, False) for own, usual in names)
    if attention != mlp:
        fields.fail(f"qkv_bias {attention} must equal bias {mlp}, as in transformers")
    return {"qkv_bias": mlp, "o_bias": mlp, "mlp_bias": mlp, "layer_windows": (None,) * layers}


INTERNLM3 = Family(
    model_type="internlm3",
    architecture="LlamaForCausalLM",
    models="InternLM 3",
    differences="biases",
    read=_read,
    defaults={
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
    },
    known_code=("modeling_internlm3.InternLM3ForCausalLM",),
)
