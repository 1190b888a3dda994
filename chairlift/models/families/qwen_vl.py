"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3 that read images (Bai et al., 2025).

Each token of an image has a position in time, one in height and one in width. Each rotary frequency uses one of the
three.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from chairlift.models.families.qwen2 import QWEN2
from chairlift.models.families.qwen2_moe import read_qwen_experts
from chairlift.models.families.qwen3 import QWEN3
from chairlift.models.families.qwen3_moe import QWEN3_MOE
from chairlift.models.family import ROPE_TYPES, Fields, inner_names

__all__ = ["QWEN2_5_VL", "QWEN2_VL", "QWEN3_VL", "QWEN3_VL_MOE"]

_INNER = "model.language_model."

QWEN2_5_VL = dataclasses.replace(
    QWEN2,
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    models="Qwen2.5-VL",
    differences="reads images: windows of patches, positions on three axes",
    called_out="the image encoder",
    other_names={"model.visual.": "visual.", _INNER: "model."},
    encoder="patches",
    text_type="qwen2_5_vl_text",
    flat_text=True,
    rope_types={**ROPE_TYPES, "mrope": "default"},
    rope_sections=(16, 24, 24),
    ignored_tensors=r"rotary_emb\.inv_freq|^visual\.",
    defaults={**QWEN2.defaults, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
)
QWEN2_VL = dataclasses.replace(
    QWEN2_5_VL,
    model_type="qwen2_vl",
    architecture="Qwen2VLForConditionalGeneration",
    models="Qwen2-VL",
    differences="reads images: patches, positions on three axes",
    encoder="plain_patches",
    text_type="qwen2_vl_text",
)
QWEN3_VL = dataclasses.replace(
    QWEN3,
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    models="Qwen3-VL",
    differences="reads images: positions on three axes, rows added after the first layers",
    called_out="the image encoder",
    tensors=inner_names(_INNER, "self_attn.q_norm", "self_attn.k_norm"),
    encoder="deep_patches",
    text_type="qwen3_vl_text",
    rope_sections=(24, 20, 20),
    interleaved_sections=True,
    ignored_tensors=r"rotary_emb\.inv_freq|^model\.visual\.",
    defaults={**QWEN3.defaults, "rope_theta": 5e5, "max_position_embeddings": 128_000},
)


def _read_moe(fields: Fields, layers: int) -> dict[str, Any]:
    experts = read_qwen_experts(fields, layers, shared=False, normalise=True)
    if not all(experts.layers):
        fields.fail("layers without experts (mlp_only_layers, decoder_sparse_step) are not supported for this family")
    return {**QWEN3_MOE.read(fields, layers), "experts": experts}


_EXPERTS = "model.layers.*.mlp.experts"

QWEN3_VL_MOE = dataclasses.replace(
    QWEN3_MOE,
    model_type="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    models="Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
    differences="as `qwen3_vl`; experts",
    called_out=QWEN3_VL.called_out,
    read=_read_moe,
    tensors=inner_names(_INNER, "self_attn.q_norm", "self_attn.k_norm", "mlp.gate"),
    transposed=("down_proj", "gate_up_proj"),
    renamed={
        f"{_EXPERTS}.{name}.weight": f"{_INNER}layers.*.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj")
    },
    encoder=QWEN3_VL.encoder,
    text_type="qwen3_vl_moe_text",
    rope_sections=QWEN3_VL.rope_sections,
    interleaved_sections=True,
    ignored_tensors=QWEN3_VL.ignored_tensors,
    defaults={**QWEN3_MOE.defaults, "rope_theta": 5e5, "max_position_embeddings": 128_000},
)
