"""Reads two things from a model's directory: how images are cut into tiles, and the weights of the image encoder."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.errors import ModelLoadError
from chairlift.models.hf_config import NetworkConfig, read_hf_config, read_hf_files, read_json
from chairlift.models.registry import FAMILIES
from chairlift.models.vision.patches import PatchProcessor, PatchSettings
from chairlift.models.vision.processor import ImageProcessor, Tokens
from chairlift.models.vision.squares import FramedProcessor, SquareProcessor, SquareSettings
from chairlift.models.vision.tiles import TileProcessor, TileSettings
from chairlift.models.vision.vision_config import (
    LlavaConfig,
    PatchConfig,
    PooledTowerConfig,
    VisionConfig,
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


def read_processor(model_dir: Path, tokens: Tokens) -> ImageProcessor | None:
    """Image processor of a model; None for a model that reads only text. Raises ModelLoadError."""
    if not model_dir.is_dir():
        return None
    family = FAMILIES.get(str(read_hf_files(model_dir)[0].get("model_type")))
    if family is None or not family.sees_images:
        return None
    vision = read_hf_config(model_dir).vision
    if vision is None:
        return None
    preprocessor = _preprocessor(model_dir)
    where = model_dir / _FILE
    if isinstance(vision, PatchConfig):
        return PatchProcessor(PatchSettings(**patch_settings(vision, preprocessor, where)), tokens, model_dir)
    if isinstance(vision, VisionConfig):
        return TileProcessor(TileSettings(**tile_settings(vision, preprocessor, where)), tokens, model_dir)
    settings = SquareSettings(**square_settings(vision, preprocessor, where))
    if isinstance(vision, PooledTowerConfig):
        return FramedProcessor(settings, tokens, model_dir)
    return SquareProcessor(settings, tokens, model_dir)


def load_tower(model_dir: Path, config: NetworkConfig, dtype: torch.dtype) -> Tower:
    """Load a model's image encoder into CPU memory. Raises ModelLoadError."""
    from chairlift.models.approximations import holds_exactly  # these import torch
    from chairlift.models.loader import open_tensors
    from chairlift.models.vision.clip_tower import ClipTower
    from chairlift.models.vision.patch_tower import PatchTower
    from chairlift.models.vision.pooled_tower import PooledTower
    from chairlift.models.vision.vision_tower import VisionTower, Weights

    vision = config.vision
    if vision is None:
        raise ModelLoadError(f"{model_dir}: model_type {config.model_type!r} has no image encoder")
    normalise = normalisation(_preprocessor(model_dir), model_dir / _FILE, vision)
    with contextlib.ExitStack() as stack:
        tensors = _Noted(open_tensors(model_dir, config, stack))
        weights = Weights(tensors, model_dir, dtype, normalise)
        tower: Tower
        if isinstance(vision, PatchConfig):
            tower = PatchTower(vision, weights)
        elif isinstance(vision, VisionConfig):
            tower = VisionTower(vision, weights)
        elif isinstance(vision, LlavaConfig):
            tower = ClipTower(vision, weights)
        elif isinstance(vision, PooledTowerConfig):
            tower = PooledTower(vision, weights)
        else:
            raise TypeError(f"{type(vision).__name__} describes no known encoder")
        tower.rounds_floats = not all(holds_exactly(dtype, stored) for stored in tensors.dtypes())
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


def _preprocessor(model_dir: Path) -> dict[str, Any]:
    path = model_dir / _FILE
    if not path.is_file():
        raise ModelLoadError(f"{model_dir} has no {_FILE}, which says how images are cut; download the model again")
    content: dict[str, Any] = read_json(path)
    return content
