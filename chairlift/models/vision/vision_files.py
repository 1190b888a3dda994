"""Reads two things from a model's directory: how images are cut into tiles, and the weights of the image encoder."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.errors import ModelLoadError
from chairlift.models.formats.gguf.files import is_gguf
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_config import gguf_config
from chairlift.models.formats.gguf_projector import NONE, open_projector, preprocessor_of
from chairlift.models.hf_config import NetworkConfig, read_hf_config, read_hf_files, read_json
from chairlift.models.registry import FAMILIES
from chairlift.models.vision.patches import LineProcessor, LineSettings, PatchProcessor, PatchSettings
from chairlift.models.vision.processor import ImageProcessor, Tokens
from chairlift.models.vision.squares import FramedProcessor, SquareProcessor, SquareSettings
from chairlift.models.vision.tiles import AspectProcessor, AspectSettings, TileProcessor, TileSettings
from chairlift.models.vision.vision_config import (
    InternConfig,
    LineConfig,
    LlavaConfig,
    PatchConfig,
    PooledTowerConfig,
    SquareConfig,
    VisionConfig,
    aspect_settings,
    line_settings,
    normalisation,
    patch_settings,
    square_settings,
    tile_settings,
)

if TYPE_CHECKING:
    import torch

    from chairlift.models.vision.vision_tower import Tower

__all__ = ["load_tower", "read_processor"]

_FILE = "preprocessor_config.json"


def read_processor(model_dir: Path, tokens: Tokens, mmproj: str = NONE) -> ImageProcessor | None:
    """Image processor of a model; None for a model that reads only text. ``mmproj`` says where the image encoder of a
    GGUF file is. Raises ModelLoadError."""
    if is_gguf(model_dir):
        model = GGUFModel(model_dir)
        projector = open_projector(model, mmproj)[0]
        vision = None if projector is None else gguf_config(model, projector).vision
        preprocessor, where = ({}, model_dir) if projector is None else (preprocessor_of(projector), projector.path)
    elif model_dir.is_dir():
        family = FAMILIES.get(str(read_hf_files(model_dir)[0].get("model_type")))
        vision = read_hf_config(model_dir).vision if family is not None and family.sees_images else None
        preprocessor, where = ({} if vision is None else _preprocessor(model_dir, vision)), model_dir / _FILE
    else:
        return None
    if vision is None:
        return None
    if isinstance(vision, LineConfig):
        return LineProcessor(LineSettings(**line_settings(vision, preprocessor, where)), tokens, model_dir)
    if isinstance(vision, PatchConfig):
        return PatchProcessor(PatchSettings(**patch_settings(vision, preprocessor, where)), tokens, model_dir)
    if isinstance(vision, InternConfig):
        return AspectProcessor(AspectSettings(**aspect_settings(vision, preprocessor, where)), tokens, model_dir)
    if isinstance(vision, VisionConfig):
        return TileProcessor(TileSettings(**tile_settings(vision, preprocessor, where)), tokens, model_dir)
    settings = SquareSettings(**square_settings(vision, preprocessor, where))
    if isinstance(vision, PooledTowerConfig):
        return FramedProcessor(settings, tokens, model_dir)
    return SquareProcessor(settings, tokens, model_dir)


def load_tower(model_dir: Path, config: NetworkConfig, dtype: torch.dtype, mmproj: str = NONE) -> Tower:
    """Load a model's image encoder into CPU memory. ``mmproj`` is as in :func:`read_processor`. Raises
    ModelLoadError."""
    from chairlift.models.approximations import holds_exactly  # these import torch
    from chairlift.models.formats.gguf_projector_tensors import projector_tensors
    from chairlift.models.loader import open_tensors
    from chairlift.models.vision.clip_tower import ClipTower
    from chairlift.models.vision.intern_tower import InternTower
    from chairlift.models.vision.line_tower import LineTower
    from chairlift.models.vision.patch_tower import PatchTower
    from chairlift.models.vision.pooled_tower import PooledTower
    from chairlift.models.vision.vision_tower import VisionTower, Weights

    vision = config.vision
    if vision is None:
        raise ModelLoadError(f"{model_dir}: model_type {config.model_type!r} has no image encoder")
    projector = open_projector(GGUFModel(model_dir), mmproj)[0] if is_gguf(model_dir) else None
    preprocessor = _preprocessor(model_dir, vision) if projector is None else preprocessor_of(projector)
    where = model_dir / _FILE if projector is None else projector.path
    normalise = normalisation(preprocessor, where, vision)
    with contextlib.ExitStack() as stack:
        stored = open_tensors(model_dir, config, stack) if projector is None else projector_tensors(projector)
        tensors = _Noted(stored)
        weights = Weights(tensors, model_dir if projector is None else projector.path, dtype, normalise)
        tower: Tower
        if isinstance(vision, LineConfig):
            tower = LineTower(vision, weights)
        elif isinstance(vision, PatchConfig):
            tower = PatchTower(vision, weights)
        elif isinstance(vision, InternConfig):
            tower = InternTower(vision, weights)
        elif isinstance(vision, VisionConfig):
            tower = VisionTower(vision, weights)
        elif isinstance(vision, LlavaConfig):
            tower = ClipTower(vision, weights)
        elif isinstance(vision, PooledTowerConfig):
            tower = PooledTower(vision, weights)
        else:
            raise TypeError(f"{type(vision).__name__} describes no known encoder")
        tower.rounds_floats = not all(holds_exactly(dtype, kind) for kind in tensors.dtypes())
    return tower


class _Noted(dict[str, Any]):
    """Tensors of a checkpoint, which note the names that are read."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self._names = set[str]()

    def __getitem__(self, name: str) -> Any:
        self._names.add(name)
        return super().__getitem__(name)

    def dtypes(self) -> set[str]:
        """Stored dtypes of the tensors that were read, as safetensors names them."""
        return {str(self[name].get_slice(name).get_dtype()) for name in tuple(self._names)}


def _preprocessor(model_dir: Path, vision: SquareConfig | PatchConfig) -> dict[str, Any]:
    """Settings of the image processor: in a file of their own, or as transformers 5 saves them. Files of Mistral may
    have neither, and mean the defaults."""
    path = model_dir / _FILE
    whole = model_dir / "processor_config.json"
    if not path.is_file():
        inner = read_json(whole).get("image_processor") if whole.is_file() else None
        if isinstance(inner, dict):
            return inner
        if isinstance(vision, LineConfig):
            return {}
        raise ModelLoadError(f"{model_dir} has no {_FILE}, which says how images are cut; download the model again")
    content: dict[str, Any] = read_json(path)
    return content
