"""MiMo-7B (Xiaomi, 2025): Qwen2, with a layer that predicts one more token, which is left out."""

from __future__ import annotations

import dataclasses

from chairlift.models.families.qwen2 import QWEN2

__all__ = ["MIMO"]

MIMO = dataclasses.replace(
    QWEN2,
    model_type="mimo",
    architecture="MiMoForCausalLM",
    models="MiMo-7B (texts only)",
    differences="as `qwen2`; its layer for a further token drafts with `mtp`",
    known_code=("modeling_mimo.MiMoForCausalLM",),
    ignored_tensors=rf"{QWEN2.ignored_tensors}|^model\.mtp_layers\.",
)
