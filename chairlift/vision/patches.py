"""Images of any size as grids of patches; the encoder turns each square of neighbouring patches into one row
(Qwen2.5-VL and Qwen3-VL).

The pixels equal those of transformers' image processor for Pillow, with which the tests compare. The module does not
import torch.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Final

from chairlift.errors import ModelLoadError, RequestError
from chairlift.vision.decode import to_rgb
from chairlift.vision.processor import ImageProcessor, PreparedImage, Tokens, tile_of
from chairlift.vision.spans import ImageSpan

__all__ = ["PatchProcessor", "PatchSettings"]

_MARKER: Final = "<|image_pad|>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PatchSettings:
    """Settings for resizing images, from ``preprocessor_config.json`` and ``config.json``."""

    patch_size: int
    """Side of a patch in pixels."""
    merge_size: int
    """Side, in patches, of the squares that the encoder turns into one row each."""
    least_pixels: int
    most_pixels: int
    """Maximum of width times height after resizing, in pixels. ``least_pixels`` is the minimum."""
    resizes: bool
    resample: int
    """Pillow's number of the filter that resizes images."""
    image_token_id: int


class PatchProcessor(ImageProcessor):
    """Resizes images so that they consist of whole squares of patches. Raises ModelLoadError if the text that marks an
    image is more than one token."""

    def __init__(self, settings: PatchSettings, tokens: Tokens, where: Path) -> None:
        super().__init__(_MARKER, settings.image_token_id)
        self.settings = settings
        if (found := tokens.encode(_MARKER, False)) != [settings.image_token_id]:
            raise ModelLoadError(
                f"{where}: config.json says that image_token_id is {settings.image_token_id}, but the tokenizer reads"
                f" {_MARKER!r} as {found}; download both files again"
            )

    def prepare(self, where: str, image: Any) -> PreparedImage:
        """Resize a Pillow image. ``where`` names the image in errors. Raises RequestError."""
        if isinstance(image, PreparedImage):
            return image
        settings, image = self.settings, to_rgb(where, image)
        square = settings.patch_size * settings.merge_size
        if settings.resizes:
            image = image.resize(self._size(image.size), resample=settings.resample)
        if image.size[0] % square or image.size[1] % square:
            raise RequestError(
                f"{where} has {image.size[0]} x {image.size[1]} pixels, but this model resizes no images and takes"
                f" multiples of {square}"
            )
        columns, rows = (side // square for side in image.size)
        grid = rows * settings.merge_size, columns * settings.merge_size
        return PreparedImage(rows, columns, (tile_of(image, grid),))

    def lay_out(self, image: PreparedImage, found: list[int], spans: list[ImageSpan]) -> None:
        count = image.rows * image.columns
        spans.append(ImageSpan(len(found), count, image.tiles[0].key, (image.rows, image.columns)))
        found.extend([self.image_token_id] * count)

    def _size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height after resizing: multiples of a square's side, with a number of pixels that the settings
        allow."""
        settings, (width, height) = self.settings, size
        square = settings.patch_size * settings.merge_size
        found = [round(side / square) * square for side in size]
        if found[0] * found[1] > settings.most_pixels:
            factor = math.sqrt(height * width / settings.most_pixels)
            found = [max(square, math.floor(side / factor / square) * square) for side in size]
        elif found[0] * found[1] < settings.least_pixels:
            factor = math.sqrt(settings.least_pixels / (height * width))
            found = [math.ceil(side * factor / square) * square for side in size]
        return found[0], found[1]
