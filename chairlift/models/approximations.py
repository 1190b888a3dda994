"""Names every way in which a loaded model computes less exactly than its checkpoint and its dtype say.

The banner of the server, ``/v1/models``, ``system_fingerprint``, ``chairlift check`` and ``LLM.info`` show this list.
Arithmetic in the model's dtype is no approximation, because the dtype is shown beside the list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn

from chairlift.models.layers.linear import Matrix

__all__ = ["approximations_of", "holds_exactly"]

_HELD: Final = {
    torch.float32: {"F32", "F16", "BF16"},
    torch.bfloat16: {"BF16"},
    torch.float16: {"F16"},
}
"""Dtype -> stored dtypes, as safetensors names them, whose numbers it represents exactly."""
_STATIC_ROTATION: Final = "rotation with the base of the longest text at every length (rope_type dynamic)"


def holds_exactly(dtype: torch.dtype, stored: str) -> bool:
    """Whether ``dtype`` represents all numbers of the stored dtype ``stored``. Integers in groups are stored as
    ``F32``, because their values are float32."""
    return stored in _HELD.get(dtype, ())


def approximations_of(
    model: nn.Module,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    rope_types: Iterable[str] = (),
    *,
    rounds_encoder: bool = False,
    lora: bool = False,
) -> tuple[str, ...]:
    """Approximations of a model of ``dtype`` with its weights in memory, in words.

    ``kv_dtype`` is the dtype of K and V; None if there are none. ``rope_types`` are the types of its rotations.
    ``rounds_encoder``: whether weights of its image encoder are rounded. ``lora``: whether adapters may be loaded. An
    adapter's scale is float32, so the scaled matrices fit only into float32.
    """
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, Matrix)]
    found = [loss for layer in layers for loss in layer.format.losses(layer.weight)]
    rounded = f"rounded to {str(dtype).removeprefix('torch.')}"
    if getattr(model, "rounds_floats", False):
        found.append(f"weights {rounded}")
    if rounds_encoder:
        found.append(f"weights of the image encoder {rounded}")
    if lora and dtype != torch.float32:
        found.append(f"scaled matrices of adapters {rounded}")
    if kv_dtype == torch.int8:
        found.append("8-bit K and V")
    if "dynamic" in rope_types:
        found.append(_STATIC_ROTATION)
    return tuple(dict.fromkeys(found))
