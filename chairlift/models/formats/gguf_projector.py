"""Reads the image encoder that llama.cpp stores beside a GGUF model, in a file named ``mmproj``.

Both files together are described like the original model's ``config.json`` and ``preprocessor_config.json``. Values
that neither file has are those that llama.cpp keeps in its code (``tools/mtmd/clip.cpp``), or those of the published
models. The module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from chairlift.errors import ModelLoadError
from chairlift.models.formats.gguf.files import encoders_beside
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.registry import FAMILIES

__all__ = ["AUTO", "NONE", "PROJECTORS", "Projector", "open_projector", "preprocessor_of", "with_images"]

AUTO: Final = "auto"
NONE: Final = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """How files with one value of ``clip.projector_type`` are read."""

    models: Mapping[str, tuple[str, str]]
    """``general.architecture`` of the model's own file -> (family that reads the images, ``model_type`` of its text
    model)."""
    tokens: Mapping[str, tuple[str, int | None]]
    """Key of ``config.json`` -> (text of the token, its number if the vocabulary does not name it)."""
    vision: Callable[[Projector], dict[str, Any]]
    """Function that returns the keys of ``vision_config`` that only this kind has, and keys for the whole model, whose
    names begin with a dot."""
    preprocessor: Callable[[Projector], dict[str, Any]]
    """Function that returns keys of ``preprocessor_config.json``."""
    needs: tuple[str, ...] = ()
    """Tensors without which the file belongs to another family."""


class Projector:
    """An open file with an image encoder."""

    def __init__(self, path: Path) -> None:
        self.model = GGUFModel(path)
        self.path = path
        metadata = self.model.metadata
        if metadata.get("general.architecture") != "clip":
            self.fail(f"architecture {metadata.get('general.architecture')!r:.80} is no image encoder ('clip')")
        if metadata.get("clip.has_audio_encoder") is True and metadata.get("clip.has_vision_encoder") is not True:
            self.fail("the file has an encoder of sounds, which are not read; serve the model without it (mmproj none)")
        name = metadata.get("clip.vision.projector_type", metadata.get("clip.projector_type"))
        self.kind = str(name)
        if self.kind not in PROJECTORS:
            self.fail(
                f"projector type {name!r:.80} is not supported; supported: {', '.join(PROJECTORS)}; use the original"
                " model's safetensors for images, or mmproj none for texts"
            )

    def fail(self, problem: str) -> NoReturn:
        """Raise ModelLoadError that names this file and the problem."""
        raise ModelLoadError(f"{self.path}: {problem}")

    def number(self, name: str, default: int | None = None) -> Any:
        """Value of ``clip.vision.<name>``, which must be a number."""
        value = self.model.metadata.get(f"clip.vision.{name}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(f"clip.vision.{name} must be a number, got {value!r:.40}; convert the model again")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Value of ``clip.vision.<name>``, which must be a whole number above 0."""
        value = self.number(name, default)
        if not isinstance(value, int) or value < 1:
            self.fail(f"clip.vision.{name} must be a whole number above 0, got {value!r:.40}; convert the model again")
        return value

    def numbers(self, name: str) -> list[Any]:
        """Values of the array ``clip.vision.<name>``."""
        value = self.model.metadata.get(f"clip.vision.{name}")
        if not isinstance(value, np.ndarray) or len(value) > 4096:
            self.fail(f"clip.vision.{name} must be a list of numbers, got {value!r:.40}; convert the model again")
        return list(value.tolist())

    def activation(self) -> str:
        """Activation of the MLPs. Without a key it is llama.cpp's default."""
        named = [name for name in ("silu", "gelu") if self.model.metadata.get(f"clip.use_{name}") is True]
        return named[0] if named else "quick_gelu"

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of a tensor, which the file must have."""
        if tensor not in self.model:
            self.fail(f"tensor {tensor} is missing; download the file again")
        return self.model.info(tensor).shape

    def sides(self, tensor: str) -> tuple[int, int]:
        """Rows and columns of a matrix, which the file must have."""
        shape = self.shape(tensor)
        if len(shape) != 2:
            self.fail(f"tensor {tensor} has shape {list(shape)}, and must be a matrix; convert the model again")
        return shape[0], shape[1]


def _siglip(projector: Projector) -> dict[str, Any]:
    return {
        "num_hidden_layers": projector.number("block_count"),
        "num_attention_heads": projector.number("attention.head_count"),
        "image_size": projector.number("image_size"),
        "layer_norm_eps": projector.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _tiles(projector: Projector) -> dict[str, Any]:
    return _siglip(projector) | {".scale_factor": projector.number("projector.scale_factor", 2)}


def _tile_sizes(projector: Projector) -> dict[str, Any]:
    size = projector.number("image_size")
    longest = projector.number("preproc_image_size", 4 * size)
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": size}}


def _pooled(projector: Projector) -> dict[str, Any]:
    side = projector.number("image_size") // projector.number("patch_size")
    rows = side // projector.number("projector.scale_factor", 4)
    return _siglip(projector) | {"model_type": "siglip_vision_model", ".mm_tokens_per_image": rows * rows}


def _pooled_sizes(projector: Projector) -> dict[str, Any]:
    size = projector.number("image_size")
    return {"size": {"height": size, "width": size}}


def _patches(projector: Projector) -> dict[str, Any]:
    return {
        "depth": projector.number("block_count"),
        "num_heads": projector.number("attention.head_count"),
        "spatial_merge_size": projector.number("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "out_hidden_size": projector.number("projection_dim"),
    }


def _plain_patches(projector: Projector) -> dict[str, Any]:
    """Keys of Qwen2-VL. Converters write another number as the width of its MLPs, so the tensors decide: that width is
    the other side of a matrix, whose name old files exchange with that of the second layer."""
    width = projector.count("embedding_length")
    rows, columns = projector.sides("v.blk.0.ffn_up.weight")
    inner = columns if rows == width else rows
    found = _patches(projector)
    return found | {
        "embed_dim": width,
        "hidden_size": found["out_hidden_size"],
        "mlp_ratio": inner // width,
        "hidden_act": projector.activation(),
    }


def _window_patches(projector: Projector) -> dict[str, Any]:
    found = _patches(projector)
    every = projector.count("n_wa_pattern")
    full = list(range(every - 1, min(found["depth"], 256), every))
    return found | {"window_size": projector.number("window_size", 112), "fullatt_block_indexes": full}


def _deep_patches(projector: Projector) -> dict[str, Any]:
    deep = projector.numbers("is_deepstack_layers")
    return _patches(projector) | {
        "num_position_embeddings": projector.shape("v.position_embd.weight")[0],
        "deepstack_visual_indexes": [layer for layer, each in enumerate(deep) if each],
        "hidden_act": "gelu_pytorch_tanh",
    }


def _lines(projector: Projector) -> dict[str, Any]:
    return {
        "num_hidden_layers": projector.number("block_count"),
        "num_attention_heads": projector.number("attention.head_count"),
        "image_size": projector.number("image_size"),
        "hidden_act": projector.activation(),
        "rope_theta": projector.model.metadata.get("clip.rope.freq_base", 10_000.0),
        ".spatial_merge_size": projector.number("spatial_merge_size", 1),
        ".multimodal_projector_bias": "mm.1.bias" in projector.model,
    }


def _line_sizes(projector: Projector) -> dict[str, Any]:
    return {"size": {"longest_edge": projector.number("image_size")}}


def _aspect_tiles(projector: Projector) -> dict[str, Any]:
    tensors = projector.model
    return {
        "num_hidden_layers": projector.number("block_count"),
        "num_attention_heads": projector.number("attention.head_count"),
        "image_size": projector.number("image_size"),
        "layer_norm_eps": projector.number("attention.layer_norm_epsilon"),
        "hidden_act": projector.activation(),
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
        "attention_bias": "v.blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
        "use_mean_pooling": "v.post_ln.weight" not in tensors,
        ".downsample_ratio": 1 / projector.count("projector.scale_factor", 2),
    }


def _aspect_sizes(projector: Projector) -> dict[str, Any]:
    size = projector.number("image_size")
    return {
        "size": {"height": size, "width": size},
        "min_patches": projector.number("preproc_min_tiles", 1),
        "max_patches": projector.number("preproc_max_tiles", 12),
    }


def _pixels(least: int, most: int) -> Callable[[Projector], dict[str, Any]]:
    """Limits of the numbers of pixels: those of the published models, which llama.cpp's converter does not write."""

    def read(projector: Projector) -> dict[str, Any]:
        return {
            "min_pixels": projector.number("image_min_pixels", least),
            "max_pixels": projector.number("image_max_pixels", most),
        }

    return read


_PAD: Final[Mapping[str, tuple[str, int | None]]] = {"image_token_id": ("<|image_pad|>", None)}
_SOFT: Final[Mapping[str, tuple[str, int | None]]] = {
    "image_token_index": ("<image_soft_token>", 262_144),
    "boi_token_index": ("<start_of_image>", None),
    "eoi_token_index": ("<end_of_image>", None),
}
_QWEN_PIXELS: Final = _pixels(56 * 56, 28 * 28 * 16_384)
PROJECTORS: Final[Mapping[str, _Kind]] = {
    "gemma3": _Kind({"gemma3": ("gemma3", "gemma3_text")}, _SOFT, _pooled, _pooled_sizes),
    "idefics3": _Kind({"llama": ("idefics3", "llama")}, {"image_token_id": ("<image>", None)}, _tiles, _tile_sizes),
    "internvl": _Kind(
        {"qwen2": ("internvl", "qwen2"), "qwen3": ("internvl", "qwen3")},
        {"image_token_id": ("<IMG_CONTEXT>", None)},
        _aspect_tiles,
        _aspect_sizes,
    ),
    "pixtral": _Kind(
        {"llama": ("mistral3", "mistral"), "mistral3": ("mistral3", "ministral3")},
        {"image_token_id": ("[IMG]", None)},
        _lines,
        _line_sizes,
        needs=("mm.input_norm.weight", "mm.patch_merger.weight"),  # Pixtral 12B has neither
    ),
    "qwen2vl_merger": _Kind({"qwen2vl": ("qwen2_vl", "qwen2_vl_text")}, _PAD, _plain_patches, _QWEN_PIXELS),
    "qwen2.5vl_merger": _Kind({"qwen2vl": ("qwen2_5_vl", "qwen2_5_vl_text")}, _PAD, _window_patches, _QWEN_PIXELS),
    "qwen3vl_merger": _Kind(
        {"qwen3vl": ("qwen3_vl", "qwen3_vl_text")}, _PAD, _deep_patches, _pixels(65_536, 16_777_216)
    ),
}
"""Value of ``clip.projector_type`` -> how such files are read."""


def open_projector(model: GGUFModel, given: str) -> tuple[Projector | None, list[str]]:
    """(image encoder of a model, notes about files that are not used).

    ``given`` is the setting ``mmproj``: ``none``, ``auto`` for a file beside the model, or the path of a file. A file
    that is given must fit to the model. Raises ModelLoadError.
    """
    if given == NONE or model.path.name in (path.name for path in encoders_beside(model.path)):
        return None, []
    if given != AUTO:
        path = Path(given).expanduser()
        if not path.is_file():
            raise ModelLoadError(f"mmproj is {given!r:.300}, which is not a file; give a GGUF file, auto or none")
        projector = Projector(path)
        if problem := _unfit(model, projector):
            projector.fail(f"{problem}; give the encoder of this model, or mmproj none for texts")
        return projector, []
    notes = []
    for path in encoders_beside(model.path):
        try:
            projector = Projector(path)
            problem = _unfit(model, projector)
        except ModelLoadError as error:
            problem = str(error).removeprefix(f"{path}: ")
        if not problem:
            return projector, []
        notes.append(f"images are not read: {path.name} beside the model is not used, because {problem}")
    return None, notes


def _unfit(model: GGUFModel, projector: Projector) -> str:
    """Reason why an encoder does not belong to a model; empty if it may."""
    kind = PROJECTORS[projector.kind]
    architecture = model.metadata.get("general.architecture")
    if architecture not in kind.models:
        known = " or ".join(map(repr, kind.models))
        return f"its projector {projector.kind!r} is for architecture {known}, not {architecture!r:.80}"
    if lacking := [name for name in kind.needs if name not in projector.model]:
        return f"its projector {projector.kind!r} has no {lacking[0]}, and encoders without it are not supported"
    # Rows for the first layers of the text model are appended to an embedding in some of llama.cpp's versions.
    width, found = model.metadata.get(f"{architecture}.embedding_length"), projector.number("projection_dim")
    return "" if found == width else f"its rows have {found} numbers, and the model's embeddings {width}"


def with_images(raw: Mapping[str, Any], model: GGUFModel, projector: Projector) -> dict[str, Any]:
    """``config.json`` of a model with its image encoder. ``raw`` is that of the model for texts."""
    kind = PROJECTORS[projector.kind]
    architecture = model.metadata["general.architecture"]
    model_type, text_type = kind.models[architecture]
    family = FAMILIES[model_type]
    # Without the key, the default of some families is a window.
    text = {"sliding_window": None, **raw, "model_type": text_type}
    sections = model.metadata.get(f"{architecture}.rope.dimension_sections")
    if family.rope_sections and isinstance(sections, np.ndarray):
        scaling = text.get("rope_scaling") or {"rope_type": "default"}
        text["rope_scaling"] = {**scaling, "mrope_section": [int(each) for each in sections[:3]]}
    own = kind.vision(projector)
    vision = {
        "hidden_size": projector.number("embedding_length"),
        "intermediate_size": projector.number("feed_forward_length"),
        "patch_size": projector.number("patch_size"),
        **{key: value for key, value in own.items() if not key.startswith(".")},
    }
    return {
        "model_type": model_type,
        "torch_dtype": raw["torch_dtype"],
        "tie_word_embeddings": raw["tie_word_embeddings"],
        "text_config": text,
        "vision_config": vision,
        **{key.removeprefix("."): value for key, value in own.items() if key.startswith(".")},
        **_token_ids(kind, model, raw["vocab_size"]),
    }


def _token_ids(kind: _Kind, model: GGUFModel, vocab_size: int) -> dict[str, int]:
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    numbers = {token: number for number, token in enumerate(tokens)} if isinstance(tokens, list) else {}
    found = {}
    for key, (text, usual) in kind.tokens.items():
        number = numbers.get(text, usual)
        if number is None or number >= vocab_size:
            raise ModelLoadError(
                f"{model.path}: the vocabulary has no token {text!r}, which marks images; use the file that belongs to"
                " the image encoder, or mmproj none for texts"
            )
        found[key] = number
    return found


def preprocessor_of(projector: Projector) -> dict[str, Any]:
    """``preprocessor_config.json`` of the model."""
    means = {f"image_{name}": projector.numbers(f"image_{name}") for name in ("mean", "std")}
    return means | PROJECTORS[projector.kind].preprocessor(projector)
