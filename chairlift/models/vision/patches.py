"""Images of any size as grids of patches; the encoder turns each square of neighbouring patches into one row
(Qwen-VL and Mistral 3).

The pixels equal those of transformers' image processor for Pillow, with which the tests compare. The module does not
import torch.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from pathlib import Path
from typing import Any, Final

from chairlift.base.image_spans import ImageSpan
from chairlift.errors import ModelLoadError, RequestError
from chairlift.models.vision.decode import resize
from chairlift.models.vision.processor import ImageProcessor, ImageSettings, PreparedImage, Tokens

__all__ = ["GridSettings", "LineProcessor", "LineSettings", "PatchProcessor", "PatchSettings"]

_MARKER: Final = "<|image_pad|>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GridSettings(ImageSettings, abc.ABC):
    """Base class: settings for resizing images to whole squares, from ``preprocessor_config.json`` and
    ``config.json``."""

    patch_size: int
    """Side of a patch in pixels."""
    merge_size: int
    """Side, in patches, of the squares that the encoder turns into one row each."""
    resizes: bool
    resample: int
    """Pillow's number of the filter that resizes images."""
    image_token_id: int

    def cut(self, where: str, image: Any) -> tuple[int, int, list[Any]]:
        square = self.patch_size * self.merge_size
        if self.resizes:
            image = resize(where, image, self._size(image.size), self.resample)
        if image.size[0] % square or image.size[1] % square:
            raise RequestError(
                f"{where} has {image.size[0]} x {image.size[1]} pixels, but this model resizes no images and takes"
                f" multiples of {square}"
            )
        columns, rows = (side // square for side in image.size)
        return rows, columns, [image]

    def shapes(self, rows: int, columns: int) -> tuple[tuple[int, int], list[int]]:
        square = self.patch_size * self.merge_size
        return (rows * self.merge_size, columns * self.merge_size), [3 * rows * columns * square**2]

    @abc.abstractmethod
    def _size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height after resizing an image of ``size``: multiples of a square's side, in pixels."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PatchSettings(GridSettings):
    """Settings of Qwen-VL, which limits the number of pixels."""

    least_pixels: int
    most_pixels: int
    """Maximum of width times height after resizing, in pixels. ``least_pixels`` is the minimum."""

    def _size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height after resizing: multiples of a square's side, with a number of pixels that the settings
        allow."""
        width, height = size
        square = self.patch_size * self.merge_size
        found = [round(side / square) * square for side in size]
        if found[0] * found[1] > self.most_pixels:
            factor = math.sqrt(height * width / self.most_pixels)
            found = [max(square, math.floor(side / factor / square) * square) for side in size]
        elif found[0] * found[1] < self.least_pixels:
            factor = math.sqrt(self.least_pixels / (height * width))
            found = [math.ceil(side * factor / square) * square for side in size]
        return found[0], found[1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LineSettings(GridSettings):
    """Settings of Mistral 3, which limits the sides of an image."""

    longest: int
    """Maximum of width and height, in pixels. A longer side becomes so long before both are rounded up."""

    def _size(self, size: tuple[int, int]) -> tuple[int, int]:
        square = self.patch_size * self.merge_size
        ratio = max(side / self.longest for side in size)
        shrunk = [max(1, math.floor(side / ratio)) if ratio > 1 else side for side in size]
        width, height = (-(-side // square) * square for side in shrunk)
        return width, height


class PatchProcessor(ImageProcessor):
    """Resizes images so that they consist of whole squares of patches. Raises ModelLoadError if the text that marks an
    image is more than one token."""

    settings: PatchSettings

    def __init__(self, settings: PatchSettings, tokens: Tokens, where: Path) -> None:
        super().__init__(_MARKER, settings.image_token_id, settings)
        if (found := tokens.encode(_MARKER, False)) != [settings.image_token_id]:
            raise ModelLoadError(
                f"{where}: config.json says that image_token_id is {settings.image_token_id}, but the tokenizer reads"
                f" {_MARKER!r} as {found}; download both files again"
            )

    def lay_out(self, image: PreparedImage, found: list[int], spans: list[ImageSpan]) -> None:
        count = image.rows * image.columns
        spans.append(ImageSpan(len(found), count, image.tiles[0].key, (image.rows, image.columns)))
        found.extend([self.image_token_id] * count)


class LineProcessor(ImageProcessor):
    """Images of Mistral 3: a token follows each line of squares, and another one the last line. Raises ModelLoadError
    if one of these texts is more than one token."""

    settings: LineSettings

    def __init__(self, settings: LineSettings, tokens: Tokens, where: Path) -> None:
        super().__init__("[IMG]", settings.image_token_id, settings)
        found = [tokens.encode(text, False) for text in (self.marker, "[IMG_BREAK]", "[IMG_END]")]
        if any(len(ids) != 1 for ids in found) or found[0] != [settings.image_token_id]:
            raise ModelLoadError(
                f"{where}: config.json says that the token of an image is {settings.image_token_id}, but the tokenizer"
                f" reads '[IMG]', '[IMG_BREAK]' and '[IMG_END]' as {found}; download both files again"
            )
        (_,), (self._break,), (self._end,) = found

    def lay_out(self, image: PreparedImage, found: list[int], spans: list[ImageSpan]) -> None:
        count = image.columns
        for row in range(image.rows):
            spans.append(ImageSpan(len(found), count, image.tiles[0].key, first=row * count))
            found.extend([self.image_token_id] * count)
            found.append(self._end if row == image.rows - 1 else self._break)
