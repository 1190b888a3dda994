"""Granite 3 with experts (IBM, 2024): Granite with a router whose softmax is over the chosen experts only."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.granite import GRANITE
from chairlift.models.family import EXPERT_KEYS, SPLIT_NAMES, Family, Fields, read_experts

__all__ = ["GRANITEMOE"]

_OURS = "model.layers.*.mlp"
_THEIRS = "model.layers.*.block_sparse_moe"


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    size = fields.integer("intermediate_size", 1, 2**20)
    experts = read_experts(fields, (True,) * layers, size, scoring="softmax_chosen")
    return {**GRANITE.read(fields, layers), "mlp_bias": False, "experts": experts}


GRANITEMOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    models="Granite 3 MoE",
    differences="experts; factors as in `granite`",
    read=_read,
    defaults={**GRANITE.defaults, "intermediate_size": 11008, "num_experts": 8, "num_experts_per_tok": 2},
    own_keys=(*EXPERT_KEYS, *GRANITE.own_keys),
    tensors={
        **SPLIT_NAMES,
        f"{_OURS}.gate": (f"{_THEIRS}.router.layer",),
        f"{_OURS}.experts.gate_up_proj": (f"{_THEIRS}.input_linear",),
        f"{_OURS}.experts.down_proj": (f"{_THEIRS}.output_linear",),
    },
)
