"""Reads the shape of an image encoder, and how its images are cut, from a model's files. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.errors import ModelLoadError
from chairlift.models.family import Fields

__all__ = ["VisionConfig", "image_settings", "normalisation", "read_vision"]

_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_EDGE = 364
"""Default of ``max_image_size`` in transformers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Shape of an encoder like SigLIP's with a connector that merges neighbouring patches (Idefics 3, SmolVLM)."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    norm_eps: float
    activation: str
    """``gelu`` or ``gelu_tanh``."""
    image_size: int
    """Pixels of a side of a tile."""
    patch_size: int
    scale_factor: int
    """A square of this many patches a side becomes one row."""
    text_width: int
    """Width of a row: that of the text model's embeddings."""
    image_token_id: int

    @property
    def side(self) -> int:
        """Patches of a side of a tile."""
        return self.image_size // self.patch_size

    @property
    def rows_per_tile(self) -> int:
        return (self.side // self.scale_factor) ** 2


def read_vision(raw: Mapping[str, Any], where: str, text_width: int) -> VisionConfig:
    """The encoder in a ``config.json``. Raises :class:`~chairlift.errors.ModelLoadError`."""
    inner = raw.get("vision_config")
    whole = Fields(raw, where, {"scale_factor": 2, "image_token_id": 128_257})
    fields = Fields(inner if isinstance(inner, Mapping) else {}, f"{where}: vision_config", _DEFAULTS)
    activation = fields.get("hidden_act")
    if activation not in _ACTIVATIONS:
        fields.fail(f"hidden_act {activation!r:.80} is not one of {', '.join(_ACTIVATIONS)}")
    if fields.integer("num_channels", 1, 16) != 3:
        fields.fail(f"num_channels is {fields.get('num_channels')}, and images have 3")
    size = fields.integer("image_size", 1, 4_096)
    found = VisionConfig(
        hidden_size=fields.integer("hidden_size", 1, 16_384),
        intermediate_size=fields.integer("intermediate_size", 1, 2**17),
        num_hidden_layers=fields.integer("num_hidden_layers", 1, 256),
        num_attention_heads=fields.integer("num_attention_heads", 1, 256),
        norm_eps=fields.number("layer_norm_eps", 0.0, 1.0),
        activation=_ACTIVATIONS[activation],
        image_size=size,
        patch_size=fields.integer("patch_size", 1, size),
        scale_factor=whole.integer("scale_factor", 1, 64),
        text_width=text_width,
        image_token_id=whole.integer("image_token_id", 0, 2**22),
    )
    if found.hidden_size % found.num_attention_heads:
        fields.fail(f"hidden_size {found.hidden_size} is not a multiple of num_attention_heads")
    if not found.side or found.side % found.scale_factor:
        fields.fail(f"an image has {found.side} patches a side, no multiple of scale_factor {found.scale_factor}")
    return found


def image_settings(vision: VisionConfig, preprocessor: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Fields of :class:`~chairlift.vision.processor.ImageSettings` from ``preprocessor_config.json``.

    Raises :class:`~chairlift.errors.ModelLoadError` for settings that the encoder's shape does not allow.
    """
    fields = Fields(preprocessor, str(where))
    tile = Fields(preprocessor.get("max_image_size") or {}, f"{where}: max_image_size")
    size = tile.integer("longest_edge", 1, 4_096, default=_EDGE)
    if size != vision.image_size:
        fields.fail(f"max_image_size is {size}, but the encoder takes {vision.image_size} pixels a side")
    first = Fields(preprocessor.get("size") or {}, f"{where}: size")
    for key in ("do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.boolean(key, True):
            fields.fail(f"{key} is false")
    return {
        "tile_size": size,
        "longest_edge": first.integer("longest_edge", 1, 4_096, default=4 * _EDGE)
        if fields.boolean("do_resize", True)
        else None,
        "resample": fields.integer("resample", 0, 5, default=1),
        "splits": fields.boolean("do_image_splitting", True),
        "rows_per_tile": vision.rows_per_tile,
        "image_token_id": vision.image_token_id,
    }


def normalisation(preprocessor: Mapping[str, Any], where: Path) -> tuple[float, list[float], list[float]]:
    """Factor, means and deviations of the three channels: a pixel p becomes (factor p - mean) / deviation."""
    factor = Fields(preprocessor, str(where)).number("rescale_factor", 0.0, 1.0, default=1 / 255)
    found = []
    for key in ("image_mean", "image_std"):
        values = preprocessor.get(key, [0.5, 0.5, 0.5])
        good = isinstance(values, list) and len(values) == 3 and all(isinstance(each, (int, float)) for each in values)
        if not good or (key == "image_std" and not all(each > 0 for each in values)):
            raise ModelLoadError(f"{where}: {key} must be three numbers, got {values!r:.80}; download the file again")
        found.append([float(each) for each in values])
    return factor, found[0], found[1]
