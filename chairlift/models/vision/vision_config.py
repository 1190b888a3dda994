"""Reads the shape of an image encoder, and the settings for cutting images, from a model's files. The module does not
import torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.errors import ModelLoadError
from chairlift.models.family import Fields

__all__ = [
    "InternConfig",
    "LineConfig",
    "LlavaConfig",
    "PatchConfig",
    "PooledTowerConfig",
    "SquareConfig",
    "VisionConfig",
    "aspect_settings",
    "line_settings",
    "normalisation",
    "patch_settings",
    "read_vision",
    "square_settings",
    "tile_settings",
]

_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_CLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
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
_SIGLIP = {**_CLIP, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_CLIP_CHANNELS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_PATCHES = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_INTERN = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "norm_type": "layer_norm",
}
_PIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 1540,
    "patch_size": 14,
    "hidden_act": "gelu",
}
_PLAIN = {
    **{key: value for key, value in _PATCHES.items() if key != "out_hidden_size"},
    "embed_dim": 1280,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
}
_DEEP = {
    **_PATCHES,
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_EDGE = 364
"""Default in transformers of the longest edge in ``max_image_size``, in pixels."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SquareConfig:
    """Shape of an encoder like SigLIP's or CLIP's, for square images of one size."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    norm_eps: float
    activation: str
    """``gelu``, ``gelu_tanh`` or ``quick_gelu``."""
    image_size: int
    """Length of an image's side in pixels."""
    patch_size: int
    text_width: int
    """Width of an output row. It equals the width of the text model's embeddings."""
    image_token_id: int

    @property
    def side(self) -> int:
        """Number of patches along one side of an image."""
        return self.image_size // self.patch_size

    @property
    def rows_per_tile(self) -> int:
        """Number of output rows of an image."""
        return self.side**2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(SquareConfig):
    """Shape of SigLIP with a connector that merges neighbouring patches (Idefics 3, SmolVLM)."""

    scale_factor: int
    """Side, in patches, of the squares that are merged into one output row."""

    @property
    def rows_per_tile(self) -> int:
        return (self.side // self.scale_factor) ** 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InternConfig(VisionConfig):
    """Shape of InternVL's encoder and projector."""

    rms: bool
    """Whether the norms of the layers are RMSNorm. Otherwise they are LayerNorm."""
    attention_bias: bool
    qk_norm: bool
    """Whether q and k pass a norm over all heads."""
    mean_pooling: bool
    """Whether the encoder ends without a norm."""
    projector_activation: str
    """Activation between the projector's linear layers, with the same values as :attr:`activation`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlavaConfig(SquareConfig):
    """Shape of CLIP with a projector of two linear layers (LLaVA)."""

    feature_layers: tuple[int, ...]
    """Indices of encoder layers. The inputs of these layers, joined in this order, are the projector's input. An index
    equal to the number of layers stands for the result of the last layer."""
    keeps_class: bool
    """Whether the class embedding's row is an output row, before the rows of patches."""
    projector_activation: str
    """Activation between the projector's linear layers, with the same values as :attr:`activation`."""
    projector_bias: bool

    @property
    def rows_per_tile(self) -> int:
        return self.side**2 + self.keeps_class


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PatchConfig:
    """Shape of an encoder for images of any size, with rotary embeddings for the row and column of a patch
    (Qwen-VL)."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    frames: int
    """Number of frames in a patch. A still image is repeated to fill them."""
    merge_size: int
    """Side, in patches, of the squares that are merged into one output row."""
    rope_theta: float
    text_width: int
    image_token_id: int
    gated: bool
    """Whether the encoder has RMSNorm and SwiGLU (Qwen2.5-VL). Otherwise it has LayerNorm and an MLP without a gate."""
    deep: bool
    """Whether the encoder has learned positions and the names of Qwen3-VL's tensors."""
    activation: str
    """``silu``, ``gelu``, ``gelu_tanh`` or ``quick_gelu``."""
    window: int = 0
    """Side of an attention window, in output rows; 0 if there are no windows."""
    full_layers: tuple[int, ...] = ()
    """Layers with full attention. All others have windows, if :attr:`window` is not 0."""
    levels: tuple[int, ...] = ()
    """Indices of encoder layers whose results are added to the hidden states of image tokens after the first layers of
    the text model."""
    side: int = 0
    """Number of learned positions along one side of the square table of positions."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LineConfig(PatchConfig):
    """Shape of Pixtral's encoder with the projector of Mistral 3."""

    longest: int
    """Maximum of an image's width and height, in pixels."""
    norm_eps: float
    """Epsilon of the projector's norm."""
    projector_activation: str
    """Activation between the projector's linear layers, with the same values as :attr:`activation`."""
    projector_bias: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PooledTowerConfig(SquareConfig):
    """Shape of SigLIP with a projector that averages squares of patches (Gemma 3)."""

    rows_per_side: int
    """Square root of the number of output rows."""
    begin_token_id: int
    """Token before the rows of an image, which is also the marker of an image in a prompt."""
    end_token_id: int

    @property
    def rows_per_tile(self) -> int:
        return self.rows_per_side**2


def read_vision(encoder: str, raw: Mapping[str, Any], where: str, text_width: int) -> SquareConfig | PatchConfig:
    """Read the image encoder's shape from a ``config.json``; ``encoder`` is
    :attr:`~chairlift.models.family.Family.encoder`.

    Raises :class:`~chairlift.errors.ModelLoadError`.
    """
    if encoder == "tiles":
        return _read_tiles(raw, where, text_width)
    if encoder == "clip":
        return _read_clip(raw, where, text_width)
    if encoder == "pooled":
        return _read_pooled(raw, where, text_width)
    if encoder == "aspect_tiles":
        return _read_intern(raw, where, text_width)
    if encoder == "lines":
        return _read_lines(raw, where, text_width)
    return _read_patches(raw, where, text_width, encoder)


def _read_intern(raw: Mapping[str, Any], where: str, text_width: int) -> InternConfig:
    usual = {"projector_hidden_act": "gelu", "vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    whole = Fields(raw, where, usual)
    inner = dict(raw.get("vision_config") or {})
    for key in ("image_size", "patch_size"):
        sides = inner.get(key)
        if isinstance(sides, list) and len(sides) == 2 and sides[0] == sides[1]:
            inner[key] = sides[0]
    fields = Fields(inner, f"{where}: vision_config", _INTERN)
    if fields.get("model_type") not in (None, "internvl_vision"):
        fields.fail(f"model_type {fields.get('model_type')!r:.80} is not 'internvl_vision'")
    for key in ("vision_feature_layer", "vision_feature_select_strategy"):
        if whole.get(key) != usual[key]:
            whole.fail(f"{key} {whole.get(key)!r:.80} is not {usual[key]!r}")
    if fields.get("norm_type") not in ("layer_norm", "rms_norm"):
        fields.fail(f"norm_type {fields.get('norm_type')!r:.80} is not 'layer_norm' or 'rms_norm'")
    if not fields.boolean("use_absolute_position_embeddings", True):
        fields.fail("use_absolute_position_embeddings is false")
    activation = whole.get("projector_hidden_act")
    if activation not in _ACTIVATIONS:
        whole.fail(f"projector_hidden_act {activation!r:.80} is not one of {', '.join(_ACTIVATIONS)}")
    ratio = whole.number("downsample_ratio", 0.0, 1.0, default=0.5)
    found = InternConfig(
        **_read_square(fields, _ACTIVATIONS),
        scale_factor=int(1 / ratio),
        text_width=text_width,
        image_token_id=whole.integer("image_token_id", 0, 2**22, default=151_667),
        rms=fields.get("norm_type") == "rms_norm",
        attention_bias=fields.boolean("attention_bias", False),
        qk_norm=fields.boolean("use_qk_norm", False),
        mean_pooling=fields.boolean("use_mean_pooling", True),
        projector_activation=_ACTIVATIONS[activation],
    )
    if not found.side or found.side % found.scale_factor:
        fields.fail(f"an image has {found.side} patches a side, no multiple of {found.scale_factor}")
    return found


def _read_lines(raw: Mapping[str, Any], where: str, text_width: int) -> LineConfig:
    whole = Fields(raw, where, {"projector_hidden_act": "gelu", "vision_feature_layer": -1})
    fields = _vision_part(raw, where, _PIXTRAL)
    if fields.get("model_type") not in (None, "pixtral"):
        fields.fail(f"model_type {fields.get('model_type')!r:.80} is not 'pixtral'")
    known = {**_ACTIVATIONS, "silu": "silu"}
    named = fields.get("hidden_act"), whole.get("projector_hidden_act")
    for activation in named:
        if activation not in known:
            fields.fail(f"the activation {activation!r:.80} is not one of {', '.join(known)}")
    if whole.get("vision_feature_layer") != -1:
        whole.fail(f"vision_feature_layer {whole.get('vision_feature_layer')!r:.80} is not -1")
    if fields.integer("num_channels", 1, 16) != 3:
        fields.fail(f"num_channels is {fields.get('num_channels')}, and images have 3")
    rope = fields.get("rope_parameters")
    rope = {"rope_theta": fields.get("rope_theta") or 10_000.0, **(rope if isinstance(rope, Mapping) else {})}
    text = Fields(raw.get("text_config") or {}, f"{where}: text_config")
    width = fields.integer("hidden_size", 1, 16_384)
    heads = fields.integer("num_attention_heads", 1, 256)
    if width % (4 * heads):
        fields.fail(f"hidden_size {width} is not a multiple of four times num_attention_heads {heads}")
    key = "image_token_id" if raw.get("image_token_id") is not None else "image_token_index"
    return LineConfig(
        hidden_size=width,
        intermediate_size=fields.integer("intermediate_size", 1, 2**17),
        num_hidden_layers=fields.integer("num_hidden_layers", 1, 256),
        num_attention_heads=heads,
        patch_size=fields.integer("patch_size", 1, 256),
        frames=1,
        merge_size=whole.integer("spatial_merge_size", 1, 16, default=2),
        rope_theta=Fields(rope, f"{where}: vision_config").number("rope_theta", 1.0, 1e15),
        text_width=text_width,
        image_token_id=whole.integer(key, 0, 2**22, default=10),
        gated=True,
        deep=False,
        activation=known[named[0]],
        longest=fields.integer("image_size", 1, 2**16),
        norm_eps=text.number("rms_norm_eps", 0.0, 1.0, default=1e-5),
        projector_activation=known[named[1]],
        projector_bias=whole.boolean("multimodal_projector_bias", False),
    )


def _read_patches(raw: Mapping[str, Any], where: str, text_width: int, encoder: str) -> PatchConfig:
    deep, gated, plain = (
        encoder in ("deep_patches", "learned_patches"),
        encoder == "patches",
        encoder == "plain_patches",
    )
    whole = Fields(raw, where, {"image_token_id": 151_655})
    fields = _vision_part(raw, where, _PLAIN if plain else _DEEP if deep else _PATCHES)
    activation = fields.get("hidden_act")
    known = {"silu": "silu"} if gated else {**_ACTIVATIONS, "quick_gelu": "quick_gelu"}
    if activation not in known:
        fields.fail(f"hidden_act {activation!r:.80} is not one of {', '.join(known)}")
    if fields.integer("in_channels", 1, 16) != 3:
        fields.fail(f"in_channels is {fields.get('in_channels')}, and images have 3")
    out = "hidden_size" if plain else "out_hidden_size"
    if fields.integer(out, 1, 65_536) != text_width:
        fields.fail(f"{out} is {fields.get(out)}, but the text model has {text_width}")
    rope = fields.get("rope_parameters") or {}
    ropes = Fields(rope if isinstance(rope, Mapping) else {}, f"{where}: rope_parameters of vision_config")
    if ropes.get("rope_type") not in (None, "axial"):
        ropes.fail(f"rope_type {ropes.get('rope_type')!r:.80} is not 'axial'")
    layers = fields.integer("depth", 1, 256)
    heads = fields.integer("num_heads", 1, 256)
    more: dict[str, Any] = {}
    patch = fields.integer("patch_size", 1, 256)
    merge = fields.integer("spatial_merge_size", 1, 16)
    if deep:
        positions = fields.integer("num_position_embeddings", 1, 2**22)
        more = {"side": math.isqrt(positions)}
        if encoder == "deep_patches":
            more["levels"] = _layers(fields, "deepstack_visual_indexes", layers)
        elif inner_levels := fields.raw.get("deepstack_visual_indexes"):
            fields.fail(
                f"deepstack_visual_indexes {inner_levels!r:.80} is not supported for this family; it must be []"
            )
        if more["side"] ** 2 != positions:
            fields.fail(f"num_position_embeddings {positions} is not a square")
        inner_layers = Fields(raw.get("text_config") or {}, where).integer("num_hidden_layers", 1, 1_024, default=32)
        if len(more.get("levels", ())) >= inner_layers:
            fields.fail(f"deepstack_visual_indexes must be fewer than the text model's {inner_layers} layers")
    elif gated:
        window = fields.integer("window_size", 1, 65_536) // merge // patch
        more = {"window": window, "full_layers": _layers(fields, "fullatt_block_indexes", layers)}
        if not window:
            fields.fail("window_size is smaller than a square of patches")
    width = fields.integer("embed_dim" if plain else "hidden_size", 1, 16_384)
    inner = width * fields.integer("mlp_ratio", 1, 64) if plain else fields.integer("intermediate_size", 1, 2**17)
    found = PatchConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        patch_size=patch,
        frames=fields.integer("temporal_patch_size", 1, 16),
        merge_size=merge,
        rope_theta=ropes.number("rope_theta", 1.0, 1e15, default=10_000.0),
        text_width=text_width,
        image_token_id=whole.integer("image_token_id", 0, 2**22),
        gated=gated,
        deep=deep,
        activation=known[activation],
        **more,
    )
    if found.hidden_size % (4 * heads):
        fields.fail(f"the width {found.hidden_size} is not a multiple of four times num_heads {heads}")
    return found


def _layers(fields: Fields, key: str, count: int) -> tuple[int, ...]:
    """Layer numbers under ``key``, checked to be distinct and ascending."""
    given = fields.get(key)
    good = isinstance(given, list) and all(type(each) is int and 0 <= each < count for each in given)
    if not good or sorted(set(given)) != given:
        fields.fail(f"{key} must be ascending numbers of layers below {count}, got {given!r:.80}")
    return tuple(given)


def _read_square(fields: Fields, activations: Mapping[str, str]) -> dict[str, Any]:
    """Fields of :class:`SquareConfig` whose values are in ``vision_config``."""
    activation = fields.get("hidden_act")
    if activation not in activations:
        fields.fail(f"hidden_act {activation!r:.80} is not one of {', '.join(activations)}")
    if fields.integer("num_channels", 1, 16) != 3:
        fields.fail(f"num_channels is {fields.get('num_channels')}, and images have 3")
    size = fields.integer("image_size", 1, 4_096)
    width = fields.integer("hidden_size", 1, 16_384)
    heads = fields.integer("num_attention_heads", 1, 256)
    if width % heads:
        fields.fail(f"hidden_size {width} is not a multiple of num_attention_heads")
    return {
        "hidden_size": width,
        "intermediate_size": fields.integer("intermediate_size", 1, 2**17),
        "num_hidden_layers": fields.integer("num_hidden_layers", 1, 256),
        "num_attention_heads": heads,
        "norm_eps": fields.number("layer_norm_eps", 0.0, 1.0),
        "activation": activations[activation],
        "image_size": size,
        "patch_size": fields.integer("patch_size", 1, size),
    }


def _vision_part(raw: Mapping[str, Any], where: str, defaults: Mapping[str, Any]) -> Fields:
    inner = raw.get("vision_config")
    return Fields(inner if isinstance(inner, Mapping) else {}, f"{where}: vision_config", defaults)


def _read_tiles(raw: Mapping[str, Any], where: str, text_width: int) -> VisionConfig:
    whole = Fields(raw, where, {"scale_factor": 2, "image_token_id": 128_257})
    fields = _vision_part(raw, where, _DEFAULTS)
    found = VisionConfig(
        **_read_square(fields, _ACTIVATIONS),
        scale_factor=whole.integer("scale_factor", 1, 64),
        text_width=text_width,
        image_token_id=whole.integer("image_token_id", 0, 2**22),
    )
    if not found.side or found.side % found.scale_factor:
        fields.fail(f"an image has {found.side} patches a side, no multiple of scale_factor {found.scale_factor}")
    return found


def _read_clip(raw: Mapping[str, Any], where: str, text_width: int) -> LlavaConfig:
    whole = Fields(raw, where, {"projector_hidden_act": "gelu", "vision_feature_select_strategy": "default"})
    fields = _vision_part(raw, where, _CLIP)
    activations = {**_ACTIVATIONS, "quick_gelu": "quick_gelu"}
    if fields.get("model_type") not in (None, "clip_vision_model"):
        fields.fail(f"model_type {fields.get('model_type')!r:.80} is not 'clip_vision_model'")
    square = _read_square(fields, activations)
    activation = whole.get("projector_hidden_act")
    strategy = whole.get("vision_feature_select_strategy")
    if activation not in activations:
        whole.fail(f"projector_hidden_act {activation!r:.80} is not one of {', '.join(activations)}")
    if strategy not in ("default", "full"):
        whole.fail(f"vision_feature_select_strategy {strategy!r:.80} is not 'default' or 'full'")
    key = "image_token_id" if raw.get("image_token_id") is not None else "image_token_index"
    count = square["num_hidden_layers"]
    given = raw.get("vision_feature_layer", -2)
    layers = given if isinstance(given, list) else [given]
    if not layers or not all(type(each) is int and -count - 1 <= each <= count for each in layers):
        whole.fail(f"vision_feature_layer must be numbers from {-count - 1} to {count}, got {given!r:.80}")
    return LlavaConfig(
        **square,
        text_width=text_width,
        image_token_id=whole.integer(key, 0, 2**22, default=32_000),
        feature_layers=tuple(each % (count + 1) for each in layers),
        keeps_class=strategy == "full",
        projector_activation=activations[activation],
        projector_bias=whole.boolean("multimodal_projector_bias", True),
    )


def _read_pooled(raw: Mapping[str, Any], where: str, text_width: int) -> PooledTowerConfig:
    whole = Fields(raw, where)
    fields = _vision_part(raw, where, _SIGLIP)
    if fields.get("model_type") not in (None, "siglip_vision_model"):
        fields.fail(f"model_type {fields.get('model_type')!r:.80} is not 'siglip_vision_model'")
    rows = whole.integer("mm_tokens_per_image", 1, 2**16, default=256)
    key = "image_token_id" if raw.get("image_token_id") is not None else "image_token_index"
    found = PooledTowerConfig(
        **_read_square(fields, _ACTIVATIONS),
        text_width=text_width,
        image_token_id=whole.integer(key, 0, 2**22, default=262_144),
        rows_per_side=math.isqrt(rows),
        begin_token_id=whole.integer("boi_token_index", 0, 2**22, default=255_999),
        end_token_id=whole.integer("eoi_token_index", 0, 2**22, default=256_000),
    )
    if found.rows_per_tile != rows or not found.side or found.side % found.rows_per_side:
        whole.fail(f"mm_tokens_per_image is {rows}, and {found.side} x {found.side} patches do not become so many rows")
    return found


def square_settings(vision: SquareConfig, preprocessor: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Fields of :class:`~chairlift.models.vision.squares.SquareSettings` from ``preprocessor_config.json``.

    Raises :class:`~chairlift.errors.ModelLoadError` for settings that the encoder's shape does not allow.
    """
    fields = Fields(preprocessor, str(where))
    for key in ("do_rescale", "do_normalize", "do_convert_rgb", "do_resize"):
        if not fields.boolean(key, True):
            fields.fail(f"{key} is false")
    for key in ("do_pad", "do_pan_and_scan"):
        if fields.boolean(key, False):
            fields.fail(f"{key} is true")
    is_clip = isinstance(vision, LlavaConfig)
    crops = fields.boolean("do_center_crop", is_clip)
    size = _sides(fields, "size")
    crop = _sides(fields, "crop_size") if crops else size
    if crop != (vision.image_size,) * 2 and crop != (vision.image_size,):
        fields.fail(f"images become {crop}, but the encoder takes {vision.image_size} pixels a side")
    if min(size) < vision.image_size or (len(size) == 1 and not crops):
        fields.fail(f"size is {fields.get('size')!r:.80}, but the encoder takes {vision.image_size} pixels a side")
    return {
        "size": vision.image_size,
        "resized": size,
        "resample": fields.integer("resample", 0, 5, default=3 if is_clip else 2),
        "rows": vision.rows_per_tile,
        "image_token_id": vision.image_token_id,
        **(
            {}
            if not isinstance(vision, PooledTowerConfig)
            else {"around": (vision.begin_token_id, vision.end_token_id)}
        ),
    }


def _sides(fields: Fields, key: str) -> tuple[int, ...]:
    """Value of a size in ``preprocessor_config.json``: (shortest edge,) or (height, width)."""
    given = fields.get(key)
    if isinstance(given, int):
        given = {"height": given, "width": given} if key == "crop_size" else {"shortest_edge": given}
    inner = Fields(given if isinstance(given, Mapping) else {"shortest_edge": 224}, f"{fields.where}: {key}")
    if inner.get("shortest_edge") is not None:
        return (inner.integer("shortest_edge", 1, 4_096),)
    return inner.integer("height", 1, 4_096), inner.integer("width", 1, 4_096)


def tile_settings(vision: VisionConfig, preprocessor: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Fields of :class:`~chairlift.models.vision.tiles.TileSettings` from ``preprocessor_config.json``.

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


def aspect_settings(vision: InternConfig, preprocessor: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Fields of :class:`~chairlift.models.vision.tiles.AspectSettings` from ``preprocessor_config.json``. transformers'
    processor cuts images even if ``crop_to_patches`` there is false.

    Raises :class:`~chairlift.errors.ModelLoadError` for settings that the encoder's shape does not allow.
    """
    fields = Fields(preprocessor, str(where))
    for key in ("do_rescale", "do_normalize", "do_convert_rgb", "do_resize"):
        if not fields.boolean(key, True):
            fields.fail(f"{key} is false")
    size = _sides(fields, "size")
    if size != (vision.image_size,) * 2:
        fields.fail(f"images become {size}, but the encoder takes {vision.image_size} pixels a side")
    most = fields.integer("max_patches", 1, 64, default=12)
    return {
        "tile_size": vision.image_size,
        "least": fields.integer("min_patches", 1, most, default=1),
        "most": most,
        "resample": fields.integer("resample", 0, 5, default=3),
        "rows_per_tile": vision.rows_per_tile,
        "image_token_id": vision.image_token_id,
    }


def line_settings(vision: LineConfig, preprocessor: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Fields of :class:`~chairlift.models.vision.patches.LineSettings` from ``preprocessor_config.json``.

    Raises :class:`~chairlift.errors.ModelLoadError` for settings that the encoder's shape does not allow.
    """
    fields = Fields(preprocessor, str(where))
    for key in ("do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.boolean(key, True):
            fields.fail(f"{key} is false")
    if fields.boolean("do_center_crop", False):
        fields.fail("do_center_crop is true")
    given = preprocessor.get("size") or {}
    size = Fields(given if isinstance(given, Mapping) else {}, f"{where}: size")
    return {
        "patch_size": vision.patch_size,
        "merge_size": vision.merge_size,
        "longest": size.integer("longest_edge", 1, 2**16, default=vision.longest),
        "resizes": fields.boolean("do_resize", True),
        "resample": fields.integer("resample", 0, 5, default=3),
        "image_token_id": vision.image_token_id,
    }


def patch_settings(vision: PatchConfig, preprocessor: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Fields of :class:`~chairlift.models.vision.patches.PatchSettings` from ``preprocessor_config.json``.

    Raises :class:`~chairlift.errors.ModelLoadError` for settings that the encoder's shape does not allow.
    """
    fields = Fields(preprocessor, str(where))
    given = preprocessor.get("size") or {}
    size = Fields(given if isinstance(given, Mapping) else {}, f"{where}: size")
    sizes = {"patch_size": vision.patch_size, "merge_size": vision.merge_size, "temporal_patch_size": vision.frames}
    for key, wanted in sizes.items():
        if fields.integer(key, 1, 4_096, default=wanted) != wanted:
            fields.fail(f"{key} is {fields.get(key)}, but the encoder takes {wanted}")
    for key in ("do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.boolean(key, True):
            fields.fail(f"{key} is false")
    limits = []
    for key, old, usual in (("shortest_edge", "min_pixels", 56 * 56), ("longest_edge", "max_pixels", 28 * 28 * 1280)):
        outer = fields.optional_integer(old, 1, 2**40)
        limits.append(outer or size.integer(key, 1, 2**40, default=usual))
    if limits[0] > limits[1]:
        fields.fail(f"the minimum number of pixels, {limits[0]}, is above the maximum, {limits[1]}")
    return {
        "patch_size": vision.patch_size,
        "merge_size": vision.merge_size,
        "least_pixels": limits[0],
        "most_pixels": limits[1],
        "resizes": fields.boolean("do_resize", True),
        "resample": fields.integer("resample", 0, 5, default=3),
        "image_token_id": vision.image_token_id,
    }


def normalisation(
    preprocessor: Mapping[str, Any], where: Path, vision: SquareConfig | PatchConfig
) -> tuple[float, list[float], list[float]]:
    """(factor, means, deviations), with one mean and one deviation for each of the three channels: a pixel p becomes
    (factor * p - mean) / deviation."""
    usual = _CLIP_CHANNELS if isinstance(vision, (InternConfig, LineConfig, LlavaConfig)) else {}
    factor = Fields(preprocessor, str(where)).number("rescale_factor", 0.0, 1.0, default=1 / 255)
    found = []
    for key in ("image_mean", "image_std"):
        values = preprocessor.get(key, usual.get(key, [0.5, 0.5, 0.5]))
        good = isinstance(values, list) and len(values) == 3 and all(isinstance(each, (int, float)) for each in values)
        if not good or (key == "image_std" and not all(each > 0 for each in values)):
            raise ModelLoadError(f"{where}: {key} must be three numbers, got {values!r:.80}; download the file again")
        found.append([float(each) for each in values])
    return factor, found[0], found[1]
