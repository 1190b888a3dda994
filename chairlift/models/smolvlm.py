"""Idefics 3 and SmolVLM: a Llama that reads images (Laurencon et al., 2024; Marafioti et al., 2025)."""

from __future__ import annotations

import dataclasses

from chairlift.models.family import SPLIT_NAMES
from chairlift.models.llama import LLAMA

__all__ = ["IDEFICS3", "SMOLVLM"]

_OWN = (
    *("model.embed_tokens", "model.norm", "model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"),
    *("model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"),
)
_NAMES = {
    layer: tuple(f"model.text_model.{name.removeprefix('model.')}" for name in names)
    for layer, names in {**SPLIT_NAMES, **{name: (name,) for name in _OWN}}.items()
}

IDEFICS3 = dataclasses.replace(
    LLAMA,
    model_type="idefics3",
    architecture="Idefics3ForConditionalGeneration",
    models="Idefics 3",
    differences="reads images: SigLIP, squares of patches merged",
    called_out="the image encoder",
    tensors=_NAMES,
    sees_images=True,
    ignored_tensors=r"rotary_emb\.inv_freq|^model\.(vision_model|connector)\.",
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
)
SMOLVLM = dataclasses.replace(
    IDEFICS3,
    model_type="smolvlm",
    architecture="SmolVLMForConditionalGeneration",
    models="SmolVLM, SmolVLM 2",
    differences="as `idefics3`",
)
