"""Settings of quantised checkpoints that are not followed, because they only make results less exact.

Fixed scales of activations, and scales for a KV cache in 8 bits, are stored beside the weights. Their tensors are not
read, and a note tells the user what is done instead.
"""

from __future__ import annotations

from typing import Final

from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings

__all__ = ["ACTIVATION_SCALES", "KV_SCALES", "STATIC_NOTE", "kv_notes"]

ACTIVATION_SCALES: Final = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "activation_scale", "input_quantizer_amax"}
)
"""Last parts of the names of tensors with fixed scales of a layer's activations, as the methods call them."""
KV_SCALES: Final = frozenset(
    {
        *("k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "output_scale"),
        *("k_zero_point", "v_zero_point", "q_zero_point"),
    }
)
"""Last parts of the names of tensors with scales for a KV cache in 8 bits. They belong to an attention layer or to its
projections of K and V."""
STATIC_NOTE: Final = (
    "the checkpoint's fixed scales of activations are not used: activations have the model's dtype, or 8 bits with a"
    " scale for every 32 numbers, both of which are more exact"
)


def kv_notes(settings: QuantizationSettings, *keys: str) -> tuple[str, ...]:
    """A note if the checkpoint asks for a KV cache with fewer bits under one of ``keys``; empty if it does not."""
    given = next((key for key in keys if settings.get(key)), None)
    if given is None:
        return ()
    return (
        f"the checkpoint's {given} is not followed: K and V have the model's dtype, or that of kv_cache_dtype (int8"
        " computes a scale for each token and head)",
    )
