"""Mixtral (Jiang et al., 2024): Mistral with experts in all layers."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.mistral import MISTRAL
from chairlift.models.family import EXPERT_KEYS, SPLIT_NAMES, Family, Fields, read_experts

__all__ = ["MIXTRAL"]

_OURS = "model.layers.*.mlp"
_THEIRS = "model.layers.*.block_sparse_moe"


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    size = fields.integer("intermediate_size", 1, 2**20)
    return {**MISTRAL.read(fields, layers), "experts": read_experts(fields, (True,) * layers, size, normalise=True)}


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    models="Mixtral 8x7B, 8x22B",
    differences="experts in all layers",
    read=_read,
    defaults={
        "eos_token_id": 2,
        "hidden_act": "silu",
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    own_keys=EXPERT_KEYS,
    tensors={
        **SPLIT_NAMES,
        f"{_OURS}.gate": (f"{_THEIRS}.gate",),
        f"{_OURS}.experts.gate_up_proj": (f"{_THEIRS}.experts.#.w1", f"{_THEIRS}.experts.#.w3"),
        f"{_OURS}.experts.down_proj": (f"{_THEIRS}.experts.#.w2",),
    },
)
