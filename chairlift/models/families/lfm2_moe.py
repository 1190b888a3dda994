"""LFM2-8B-A1B (Liquid AI, 2025): LFM2 with experts in all layers but the first."""

from __future__ import annotations

import dataclasses
from typing import Any

from chairlift.models.families.lfm2 import LFM2, lfm2_layers
from chairlift.models.family import EXPERT_KEYS, Fields, read_experts

__all__ = ["LFM2_MOE"]

_OURS = "model.layers.*.mlp"
_THEIRS = "model.layers.*.feed_forward"


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    dense = fields.integer("num_dense_layers", 0, 1_024)
    return {
        **lfm2_layers(fields, layers),
        "experts": read_experts(
            fields,
            tuple(layer >= dense for layer in range(layers)),
            fields.integer("moe_intermediate_size", 1, 2**20),
            correction=fields.boolean("use_expert_bias", True),
            scoring="sigmoid",
            normalise=fields.boolean("norm_topk_prob", True),
            epsilon=1e-6,
            scale=fields.number("routed_scaling_factor", 0.0, 1e6),
        ),
    }


LFM2_MOE = dataclasses.replace(
    LFM2,
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    models="LFM2-8B-A1B",
    differences="as `lfm2`; experts, chosen with a correction",
    read=_read,
    defaults={
        **{key: value for key, value in LFM2.defaults.items() if not key.startswith("block_")},
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.0,
    },
    own_keys=EXPERT_KEYS,
    tensors={
        **LFM2.tensors,
        f"{_OURS}.gate": (f"{_THEIRS}.gate",),
        f"{_OURS}.experts.gate_up_proj": (f"{_THEIRS}.experts.#.w1", f"{_THEIRS}.experts.#.w3"),
        f"{_OURS}.experts.down_proj": (f"{_THEIRS}.experts.#.w2",),
    },
    renamed={f"{_OURS}.gate.e_score_correction_bias": f"{_THEIRS}.expert_bias"},
)
