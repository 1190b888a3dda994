"""Granite 4 (IBM, 2025): Mamba-2 in most layers, attention without rotation in the others, experts and an MLP side by
side."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.granite import GRANITE, read_factors
from chairlift.models.families.mamba2 import Mamba2Keys, read_mamba2
from chairlift.models.family import EXPERT_KEYS, SPLIT_NAMES, Family, Fields, read_experts

__all__ = ["GRANITEMOEHYBRID", "HYBRID_KEYS"]

_LAYER = "model.layers.*"
_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}
"""Name of a layer type -> whether the layer is recurrent."""

HYBRID_KEYS = Mamba2Keys(
    heads="mamba_n_heads",
    head_dim="mamba_d_head",
    state="mamba_d_state",
    groups="mamba_n_groups",
    taps="mamba_d_conv",
    expand="mamba_expand",
    conv_bias="mamba_conv_bias",
    bias="mamba_proj_bias",
)


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    kinds = fields.get("layer_types") or fields.get("layers_block_type") or ["mamba"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or not _KINDS.keys() >= set(map(str, kinds)):
        fields.fail(f"layer_types must name mamba or attention for each of {layers} layers, got {kinds!r:.160}")
    mixer = read_mamba2(fields, HYBRID_KEYS)
    shared = fields.integer("shared_intermediate_size", 1, 2**20)
    rotated = fields.get("position_embedding_type")
    if rotated not in (None, "nope", "rope"):
        fields.fail(f"position_embedding_type must be rope, nope or null, got {rotated!r:.80}")
    how: dict[str, Any] = {"intermediate_size": shared}
    if fields.integer("num_local_experts", 0, 4_096):
        size = fields.integer("intermediate_size", 1, 2**20)
        every = (True,) * layers
        how["experts"] = read_experts(
            fields, every, size, scoring="softmax_chosen", shared_size=shared, count_keys=("num_local_experts",)
        )
    return {
        **read_factors(fields, layers),
        **how,
        "layer_windows": (None,) * layers,
        **dict.fromkeys(("qkv_bias", "o_bias"), fields.boolean("attention_bias", False)),
        "mixers": tuple(mixer if _KINDS[kind] else None for kind in kinds),
        "rope_layers": tuple(rotated == "rope" and not _KINDS[kind] for kind in kinds),
    }


GRANITEMOEHYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    models="Granite 4 (hybrid and dense)",
    differences="Mamba-2 in most layers, no rotation in the others; experts beside an MLP; factors as in `granite`",
    read=_read,
    defaults={
        **GRANITE.defaults,
        "intermediate_size": 11008,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": "auto",
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "shared_intermediate_size": 1024,
    },
    own_keys=(*EXPERT_KEYS, *GRANITE.own_keys),
    tensors={
        **SPLIT_NAMES,
        f"{_LAYER}.mlp.gate": (f"{_LAYER}.block_sparse_moe.router.layer",),
        f"{_LAYER}.mlp.experts.gate_up_proj": (f"{_LAYER}.block_sparse_moe.input_linear",),
        f"{_LAYER}.mlp.experts.down_proj": (f"{_LAYER}.block_sparse_moe.output_linear",),
        **{
            f"{_LAYER}.{ours}.{name}": (f"{_LAYER}.shared_mlp.{theirs}",)
            for ours in ("mlp", "mlp.shared_expert")
            for name, theirs in (("gate_up_proj", "input_linear"), ("down_proj", "output_linear"))
        },
        f"{_LAYER}.mixer": (f"{_LAYER}.mamba",),
        f"{_LAYER}.mixer.conv": (f"{_LAYER}.mamba.conv1d",),
        **{f"{_LAYER}.mixer.{name}": (f"{_LAYER}.mamba.{name}",) for name in ("in_proj", "norm", "out_proj")},
    },
)
