"""Images as squares of one size, each encoded as the same number of rows (LLaVA).

The pixels equal those of transformers' image processors for Pillow, with which the tests compare. The module does not
import torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from chairlift.errors import ModelLoadError, RequestError
from chairlift.vision.decode import to_rgb
from chairlift.vision.processor import ImageProcessor, PreparedImage, Tokens, tile_of
from chairlift.vision.spans import ImageSpan

__all__ = ["SquareProcessor", "SquareSettings"]

_LARGEST_SIDE = 2**16
"""Maximum length in pixels of a side after resizing; a narrow image whose shorter side grows would exceed memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SquareSettings:
    """Settings for resizing and cropping images, from ``preprocessor_config.json`` and ``config.json``."""

    size: int
    """Side of the square in pixels."""
    resized: tuple[int, ...]
    """Size before the square is cut out of the middle: (shortest edge,) or (height, width)."""
    resample: int
    """Pillow's number of the filter that resizes images."""
    rows: int
    """Number of prompt positions of an image."""
    image_token_id: int


class SquareProcessor(ImageProcessor):
    """Resizes images, and cuts a square out of the middle. Raises ModelLoadError if the text that marks an image is
    more than one token."""

    def __init__(self, settings: SquareSettings, tokens: Tokens, where: Path) -> None:
        super().__init__("<image>", settings.image_token_id)
        self.settings = settings
        if (found := tokens.encode(self.marker, False)) != [settings.image_token_id]:
            raise ModelLoadError(
                f"{where}: config.json says that the token of an image is {settings.image_token_id}, but the tokenizer"
                f" reads {self.marker!r} as {found}; download both files again"
            )

    def prepare(self, where: str, image: Any) -> PreparedImage:
        """Resize and crop a Pillow image. ``where`` names the image in errors. Raises RequestError."""
        if isinstance(image, PreparedImage):
            return image
        image = to_rgb(where, image)
        width, height = self._resized(where, image.size)
        image = image.resize((width, height), resample=self.settings.resample)
        size = self.settings.size
        left, top = (width - size) // 2, (height - size) // 2
        return PreparedImage(0, 0, (tile_of(image.crop((left, top, left + size, top + size))),))

    def lay_out(self, image: PreparedImage, found: list[int], spans: list[ImageSpan]) -> None:
        spans.append(ImageSpan(len(found), self.settings.rows, image.tiles[0].key))
        found.extend([self.image_token_id] * self.settings.rows)

    def _resized(self, where: str, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height after resizing."""
        if len(self.settings.resized) == 2:
            return self.settings.resized[1], self.settings.resized[0]
        (shortest,), (width, height) = self.settings.resized, size
        longest = int(shortest * max(size) / min(size))
        if longest > _LARGEST_SIDE:
            raise RequestError(
                f"{where} has {width} x {height} pixels; one side may be {_LARGEST_SIDE // shortest} times as long as"
                " the other: cut it"
            )
        return (shortest, longest) if width <= height else (longest, shortest)
