"""Ministral 8B (Mistral AI, 2024): Mistral in which only some layers have a sliding window."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.mistral import MISTRAL
from chairlift.models.family import MAX_CONTEXT, Family, Fields, layer_windows

__all__ = ["MINISTRAL"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT)
    return {"layer_windows": layer_windows(fields, layers, window, 0)}


MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    models="Ministral 8B",
    differences="windows in some layers",
    read=_read,
    defaults=MISTRAL.defaults,
)
