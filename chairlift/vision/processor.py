"""From images and a prompt with one marker per image to tiles and expanded placeholders (Idefics 3 and SmolVLM).

The pixels are those of transformers' image processors for Pillow, which the tests compare with. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from chairlift.errors import ModelLoadError, RequestError
from chairlift.vision.decode import to_rgb
from chairlift.vision.spans import ImageSpan, ImageTile

__all__ = ["ImageProcessor", "ImageSettings", "PlacedImages", "PreparedImage", "Tokens", "place_images"]

MAX_IMAGES: Final = 64
"""Most images of a prompt."""
_LARGEST_SIDE: Final = 4096
"""Most pixels of a side after the first resizing; transformers has the same limit."""


class Tokens(Protocol):
    """Interface of the tokenizer that the processor uses."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as the encoder takes it: a grid of tiles and then the whole image as one, or the whole alone."""

    rows: int
    """Rows of the grid; 0 if the image is not cut."""
    columns: int
    tiles: tuple[ImageTile, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedImages:
    """The images of a prompt whose markers were expanded."""

    spans: tuple[ImageSpan, ...]
    tiles: tuple[ImageTile, ...]
    """The tiles that the spans name, each once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """How a model's images are cut, from ``preprocessor_config.json`` and ``config.json``."""

    tile_size: int
    """Pixels of a side of a tile."""
    longest_edge: int | None
    """Pixels of an image's longer side before it is cut; None: images are not resized first."""
    resample: int
    """Pillow's number of the filter."""
    splits: bool
    """Whether images are cut into tiles."""
    rows_per_tile: int
    """Prompt positions of a tile."""
    image_token_id: int


class ImageProcessor:
    """Makes :class:`PreparedImage` objects, and expands the markers of a prompt.

    ``tokens`` gives the ids of the placeholders' texts. Any thread may use the object. Raises ModelLoadError where a
    placeholder is not one token.
    """

    def __init__(self, settings: ImageSettings, tokens: Tokens, where: Path) -> None:
        self.settings = settings
        self._encode: Callable[[str], list[int]] = lambda text: tokens.encode(text, False)
        self._where = where
        image = self._one("<image>")
        if image != settings.image_token_id:
            raise ModelLoadError(
                f"{where}: config.json says that image_token_id is {settings.image_token_id}, but the tokenizer reads"
                f" '<image>' as {image}; download both files again"
            )
        self._fake, self._whole = self._one("<fake_token_around_image>"), self._one("<global-img>")

    def prepare(self, where: str, image: Any) -> PreparedImage:
        """Resize and cut an image of Pillow; ``where`` names it in errors. Raises RequestError."""
        if isinstance(image, PreparedImage):
            return image
        settings, image = self.settings, to_rgb(where, image)
        size = settings.tile_size
        if settings.longest_edge is not None:
            image = self._resize(image, _first_size(image.size, settings.longest_edge))
        if not settings.splits:
            return PreparedImage(0, 0, (_tile(self._resize(image, (size, size))),))
        image = self._resize(image, _whole_tiles(image.size, size))
        columns, rows = image.size[0] // size, image.size[1] // size
        if rows * columns == 1:
            return PreparedImage(0, 0, (_tile(image),))
        boxes = ((x * size, y * size, (x + 1) * size, (y + 1) * size) for y in range(rows) for x in range(columns))
        parts = [image.crop(box) for box in boxes]
        parts.append(self._resize(image, (size, size)))
        return PreparedImage(rows, columns, tuple(map(_tile, parts)))

    def expand(self, token_ids: Sequence[int], images: Sequence[Any]) -> tuple[list[int], list[ImageSpan]]:
        """The prompt with the placeholders of each image in place of its marker, and the spans of the tiles.

        ``images`` are :class:`PreparedImage`, in the order of the markers. Raises RequestError where their numbers
        differ.
        """
        marker = self.settings.image_token_id
        count = sum(token == marker for token in token_ids)
        if count != len(images):
            raise RequestError(
                f"the prompt has {count} places for images ('<image>'), and {len(images)} images were sent;"
                " send one for each, and no '<image>' in a text"
            )
        found, spans, left = list[int](), list[ImageSpan](), iter(images)
        for token in token_ids:
            if token == marker:
                self._lay_out(next(left), found, spans)
            else:
                found.append(token)
        return found, spans

    def _lay_out(self, image: PreparedImage, found: list[int], spans: list[ImageSpan]) -> None:
        tiles = iter(image.tiles)

        def add(head: list[int], mark: int) -> None:
            found.extend([*head, self._fake, mark])
            spans.append(ImageSpan(len(found), self.settings.rows_per_tile, next(tiles).key))
            found.extend([self.settings.image_token_id] * self.settings.rows_per_tile)

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

    def _resize(self, image: Any, size: tuple[int, int]) -> Any:
        return image.resize(size, resample=self.settings.resample)


def place_images(
    processor: ImageProcessor | None, token_ids: Sequence[int], images: Sequence[Any]
) -> tuple[list[int], PlacedImages]:
    """A prompt with expanded placeholders, and its images, which are of Pillow or prepared. Raises RequestError, also
    for a model that reads no images (``processor`` is None)."""
    if processor is None:
        raise RequestError("this model reads no images, or not with these kernels; send texts only")
    if len(images) > MAX_IMAGES:
        raise RequestError(f"the prompt has {len(images)} images; at most {MAX_IMAGES} are read")
    ready = [processor.prepare(f"image {index}", image) for index, image in enumerate(images)]
    found, spans = processor.expand(token_ids, ready)
    tiles = {tile.key: tile for image in ready for tile in image.tiles}
    return found, PlacedImages(tuple(spans), tuple(tiles.values()))


def _tile(image: Any) -> ImageTile:
    import numpy as np

    pixels = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)).tobytes()
    return ImageTile(hashlib.sha256(pixels).digest(), pixels)


def _first_size(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Width and height with the longer side of ``longest`` pixels; the other is even, as in transformers."""
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
    """Width and height as multiples of ``size``."""
    width, height = given
    ratio = width / height
    if width >= height:
        width = math.ceil(width / size) * size
        return width, math.ceil(int(width / ratio) / size) * size
    height = math.ceil(height / size) * size
    return math.ceil(int(height * ratio) / size) * size, height
