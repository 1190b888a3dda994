"""Turns images, and a prompt with one marker per image, into tiles and expanded placeholders. The module does not
import torch."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, Final, Protocol

from chairlift.base.cache_key import cache_key
from chairlift.base.image_spans import ImageSpan, ImageTile
from chairlift.errors import RequestError
from chairlift.models.vision.decode import to_rgb

__all__ = [
    "MAX_IMAGES",
    "ImageProcessor",
    "ImageSettings",
    "PlacedImages",
    "PreparedImage",
    "Tokens",
    "pixels_of",
    "place_images",
    "tile_of",
]

MAX_IMAGES: Final = 64
"""Maximum number of images in a prompt."""
_FEW_PLACES: Final = (
    "it must have one for each image. Some chat templates write them only for images in messages of the user"
)


class Tokens(Protocol):
    """Interface with the methods of a tokenizer that :class:`ImageProcessor` uses."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image in the form that the encoder reads: either a grid of tiles followed by the whole image as one tile, or
    the whole image only."""

    rows: int
    """Number of rows in the grid of tiles; 0 if the image is not cut."""
    columns: int
    tiles: tuple[ImageTile, ...]
    file_pixels: int = 0
    """Number of pixels of the image's file; 0 for an image that was given decoded."""
    seconds: float = 0.0
    """Processor seconds that a worker process took to read the file."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedImages:
    """The images of a prompt whose markers have been expanded."""

    spans: tuple[ImageSpan, ...]
    tiles: tuple[ImageTile, ...]
    """Tiles to which the spans refer, each listed once."""

    def keyed(self, salt: str) -> PlacedImages:
        """The same images, with keys that only requests with the same ``salt`` share."""
        spans = [dataclasses.replace(span, key=cache_key("image", salt, span.key)) for span in self.spans]
        tiles = [dataclasses.replace(tile, key=cache_key("image", salt, tile.key)) for tile in self.tiles]
        return PlacedImages(tuple(spans), tuple(tiles))


class ImageSettings(abc.ABC):
    """Base class: settings of a family for resizing and cutting images, as plain data. A worker process applies them
    without the model's files."""

    __slots__ = ()

    @abc.abstractmethod
    def cut(self, where: str, image: Any) -> tuple[int, int, list[Any]]:
        """Resize and cut an RGB image of Pillow. Returns (rows, columns, tiles as RGB images of Pillow). Raises
        RequestError; ``where`` names the image in it."""

    @abc.abstractmethod
    def shapes(self, rows: int, columns: int) -> tuple[tuple[int, int], list[int]]:
        """(:attr:`ImageTile.grid` of the tiles, number of bytes of each tile) of an image with so many rows and columns
        of tiles."""


class ImageProcessor(abc.ABC):
    """Base class: creates :class:`PreparedImage` objects, and expands the markers in a prompt. Any thread may use it.

    ``marker`` is the text of the marker. ``image_token_id`` is the marker's token id, which the placeholders also have.
    """

    def __init__(self, marker: str, image_token_id: int, settings: ImageSettings) -> None:
        self.marker = marker
        self.image_token_id = image_token_id
        self.settings = settings

    def prepare(self, where: str, image: Any) -> PreparedImage:
        """Resize and cut a Pillow image; a prepared image is returned unchanged. ``where`` names the image in errors.
        Raises RequestError."""
        if isinstance(image, PreparedImage):
            return image
        rows, columns, tiles = self.settings.cut(where, to_rgb(where, image))
        return self.restore(rows, columns, b"".join(map(pixels_of, tiles)))

    def restore(
        self, rows: int, columns: int, pixels: bytes, file_pixels: int = 0, seconds: float = 0.0
    ) -> PreparedImage:
        """The image whose tiles have these ``pixels``, one after another. Raises ValueError if they do not fit."""
        grid, sizes = self.settings.shapes(rows, columns)
        if sum(sizes) != len(pixels):
            raise ValueError(f"tiles of {len(pixels):,} bytes instead of {sum(sizes):,}")
        ends = itertools.accumulate(sizes)
        tiles = (tile_of(pixels[end - size : end], grid) for size, end in zip(sizes, ends, strict=True))
        return PreparedImage(rows, columns, tuple(tiles), file_pixels, seconds)

    def num_positions(self, image: PreparedImage) -> int:
        """Number of prompt positions of an image."""
        found = list[int]()
        self.lay_out(image, found, [])
        return len(found)

    @abc.abstractmethod
    def lay_out(self, image: PreparedImage, found: list[int], spans: list[ImageSpan]) -> None:
        """Append the token ids of an image to ``found``, and the spans of its tiles to ``spans``."""

    def expand(self, token_ids: Sequence[int], images: Sequence[Any]) -> tuple[list[int], list[ImageSpan]]:
        """Replace each marker in a prompt by the placeholders of its image. Returns (token ids, spans of the tiles).

        ``images`` are :class:`PreparedImage` objects in the order of the markers. Raises RequestError if the numbers of
        images and markers differ.
        """
        marker = self.image_token_id
        marker_text = repr(self.marker)
        count = sum(token == marker for token in token_ids)
        if count != len(images):
            fix = _FEW_PLACES if count < len(images) else f"send one for each, and no {marker_text} in a text"
            raise RequestError(
                f"the prompt has {count} places for images ({marker_text}), and {len(images)} images were sent; {fix}"
            )
        found = list[int]()
        spans = list[ImageSpan]()
        left = iter(images)
        for token in token_ids:
            if token == marker:
                self.lay_out(next(left), found, spans)
            else:
                found.append(token)
        return found, spans


def place_images(
    processor: ImageProcessor | None, token_ids: Sequence[int], images: Sequence[Any]
) -> tuple[list[int], PlacedImages]:
    """Expand the placeholders of a prompt. Returns (token ids, placed images). ``images`` are Pillow images or prepared
    images. Raises RequestError, also if the model reads no images (``processor`` is None)."""
    if processor is None:
        raise RequestError("this model reads no images, or not with these kernels; send texts only")
    if len(images) > MAX_IMAGES:
        raise RequestError(f"the prompt has {len(images)} images; at most {MAX_IMAGES} are read")
    ready = [processor.prepare(f"image {index}", image) for index, image in enumerate(images)]
    found, spans = processor.expand(token_ids, ready)
    tiles = {tile.key: tile for image in ready for tile in image.tiles}
    return found, PlacedImages(tuple(spans), tuple(tiles.values()))


def tile_of(pixels: bytes, grid: tuple[int, int] = (0, 0)) -> ImageTile:
    """Tile with these pixels (uint8 [3, height, width])."""
    shape = b"" if grid == (0, 0) else repr(grid).encode()
    digest = hashlib.sha256(shape)
    digest.update(pixels)
    return ImageTile(digest.digest(), pixels, grid)


def pixels_of(image: Any) -> bytes:
    """The pixels of an RGB image of Pillow as uint8 [3, height, width]."""
    return b"".join(band.tobytes() for band in image.split())
