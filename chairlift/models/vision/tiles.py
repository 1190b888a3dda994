"""Images as square tiles, each encoded as the same number of rows (Idefics 3, SmolVLM and InternVL).

The pixels equal those of transformers' image processors for Pillow, with which the tests compare. The module does not
import torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from chairlift.base.image_spans import ImageSpan
from chairlift.errors import ModelLoadError
from chairlift.models.vision.decode import resize
from chairlift.models.vision.processor import ImageProcessor, ImageSettings, PreparedImage, Tokens

__all__ = ["AspectProcessor", "AspectSettings", "TileProcessor", "TileSettings"]

_LARGEST_SIDE: Final = 4096
"""Maximum length in pixels of a side after the first resizing; transformers has the same limit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileSettings(ImageSettings):
    """Settings for cutting images, from ``preprocessor_config.json`` and ``config.json``."""

    tile_size: int
    """Side of a tile in pixels."""
    longest_edge: int | None
    """Length in pixels of an image's longer side before it is cut; None: images are not resized first."""
    resample: int
    """Pillow's number of the filter that resizes images."""
    splits: bool
    """Whether images are cut into tiles."""
    rows_per_tile: int
    """Number of rows that the encoder makes of a tile: one for each prompt position of the tile."""
    image_token_id: int

    def cut(self, where: str, image: Any) -> tuple[int, int, list[Any]]:
        size = self.tile_size
        if self.longest_edge is not None:
            image = self._resize(where, image, _first_size(image.size, self.longest_edge))
        if not self.splits:
            return 0, 0, [self._resize(where, image, (size, size))]
        image = self._resize(where, image, _whole_tiles(image.size, size))
        columns = image.size[0] // size
        rows = image.size[1] // size
        if rows * columns == 1:
            return 0, 0, [image]
        boxes = ((x * size, y * size, (x + 1) * size, (y + 1) * size) for y in range(rows) for x in range(columns))
        parts = [image.crop(box) for box in boxes]
        return rows, columns, [*parts, self._resize(where, image, (size, size))]

    def shapes(self, rows: int, columns: int) -> tuple[tuple[int, int], list[int]]:
        return (0, 0), [3 * self.tile_size**2] * (rows * columns + 1)

    def _resize(self, where: str, image: Any, size: tuple[int, int]) -> Any:
        return resize(where, image, size, self.resample)


class TileProcessor(ImageProcessor):
    """Cuts images into tiles, and puts marker texts around each tile.

    ``tokens`` is the tokenizer; every placeholder text must be one token. Any thread may use the object. Raises
    ModelLoadError if a placeholder is more than one token.
    """

    settings: TileSettings

    def __init__(self, settings: TileSettings, tokens: Tokens, where: Path) -> None:
        super().__init__("<image>", settings.image_token_id, settings)
        self._encode: Callable[[str], list[int]] = lambda text: tokens.encode(text, False)
        self._where = where
        image = self._one("<image>")
        if image != settings.image_token_id:
            raise ModelLoadError(
                f"{where}: config.json says that image_token_id is {settings.image_token_id}, but the tokenizer reads"
                f" '<image>' as {image}; download both files again"
            )
        self._fake, self._whole = self._one("<fake_token_around_image>"), self._one("<global-img>")

    def lay_out(self, image: PreparedImage, found: list[int], spans: list[ImageSpan]) -> None:
        tiles = iter(image.tiles)

        def add(head: list[int], mark: int) -> None:
            found.extend([*head, self._fake, mark])
            spans.append(ImageSpan(len(found), self.settings.rows_per_tile, next(tiles).key))
            found.extend([self.image_token_id] * self.settings.rows_per_tile)

        for row in range(image.rows):
            for column in range(image.columns):
                newline = self._encode("\n") if row and not column else []
                add(newline, self._one(f"<row_{row + 1}_col_{column + 1}>"))
        add(self._encode("\n\n") if image.rows else [], self._whole)
        found.append(self._fake)

    def _one(self, text: str) -> int:
        ids = self._encode(text)
        if len(ids) != 1:
            raise ModelLoadError(f"{self._where}: the tokenizer has no token {text!r}; download its files again")
        return ids[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AspectSettings(ImageSettings):
    """Settings of InternVL, which cuts an image into the grid whose ratio of sides is nearest to the image's."""

    tile_size: int
    """Side of a tile in pixels."""
    least: int
    most: int
    """Maximum number of tiles in the grid. ``least`` is the minimum."""
    resample: int
    """Pillow's number of the filter that resizes images."""
    rows_per_tile: int
    """Number of rows that the encoder makes of a tile: one for each prompt position of the tile."""
    image_token_id: int

    def cut(self, where: str, image: Any) -> tuple[int, int, list[Any]]:
        size = self.tile_size
        columns, rows = self._grid(image.size)
        whole = resize(where, image, (columns * size, rows * size), self.resample)
        if rows * columns == 1:
            return 0, 0, [whole]
        boxes = ((x * size, y * size, (x + 1) * size, (y + 1) * size) for y in range(rows) for x in range(columns))
        return rows, columns, [*map(whole.crop, boxes), resize(where, image, (size, size), self.resample)]

    def shapes(self, rows: int, columns: int) -> tuple[tuple[int, int], list[int]]:
        return (0, 0), [3 * self.tile_size**2] * (rows * columns + 1)

    def _grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Number of columns and rows. Of grids with equal ratios, a larger one is taken if it has less than twice the
        image's pixels."""
        width, height = size
        sides = range(1, self.most + 1)
        grids = [(x, y) for x in sides for y in sides if self.least <= x * y <= self.most]
        best, nearest = (1, 1), math.inf
        for x, y in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            away = abs(width / height - x / y)
            if away < nearest or (away == nearest and width * height > 0.5 * self.tile_size**2 * x * y):
                best, nearest = (x, y), away
        return best


class AspectProcessor(ImageProcessor):
    """Cuts images into tiles, whose rows follow each other between two tokens. Raises ModelLoadError if one of these
    texts is more than one token."""

    settings: AspectSettings

    def __init__(self, settings: AspectSettings, tokens: Tokens, where: Path) -> None:
        super().__init__("<IMG_CONTEXT>", settings.image_token_id, settings)
        found = [tokens.encode(text, False) for text in (self.marker, "<img>", "</img>")]
        if any(len(ids) != 1 for ids in found) or found[0] != [settings.image_token_id]:
            raise ModelLoadError(
                f"{where}: config.json says that image_token_id is {settings.image_token_id}, but the tokenizer reads"
                f" '<IMG_CONTEXT>', '<img>' and '</img>' as {found}; download both files again"
            )
        (_,), (self._begin,), (self._end,) = found

    def lay_out(self, image: PreparedImage, found: list[int], spans: list[ImageSpan]) -> None:
        count = self.settings.rows_per_tile
        found.append(self._begin)
        for tile in image.tiles:
            spans.append(ImageSpan(len(found), count, tile.key))
            found.extend([self.image_token_id] * count)
        found.append(self._end)


def _first_size(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Width and height after the first resizing. The longer side has ``longest`` pixels; the shorter side is even, as
    in transformers."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _LARGEST_SIDE:
        width, height = _LARGEST_SIDE, int(_LARGEST_SIDE / ratio)
    elif height > width and height > _LARGEST_SIDE:
        height, width = _LARGEST_SIDE, int(_LARGEST_SIDE * ratio)
    return max(width, 1), max(height, 1)


def _whole_tiles(given: tuple[int, int], size: int) -> tuple[int, int]:
    """Width and height rounded to multiples of the tile size ``size``."""
    width, height = given
    ratio = width / height
    if width >= height:
        width = math.ceil(width / size) * size
        return width, math.ceil(int(width / ratio) / size) * size
    height = math.ceil(height / size) * size
    return math.ceil(int(height * ratio) / size) * size, height
