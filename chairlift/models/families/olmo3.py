"""OLMo 3 (Ai2, 2025): OLMo 2 with a sliding window in three of four layers; these layers have no rotary scaling."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.olmo2 import OLMO2
from chairlift.models.family import MAX_CONTEXT, Family, Fields, every_nth, pattern_windows

__all__ = ["OLMO3"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT)
    windows = pattern_windows(fields, layers, window, every_nth(fields, layers))
    return {**OLMO2.read(fields, layers), "layer_windows": windows}


OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    models="OLMo 3",
    differences="as `olmo2`; windows in three of four layers",
    read=_read,
    defaults={**OLMO2.defaults, "rope_theta": 5e5, "sliding_window": 4096},
    tensors=OLMO2.tensors,
    window_rope=True,
)
