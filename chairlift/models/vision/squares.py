"""Images as squares of one size, each encoded as the same number of rows (LLaVA and Gemma 3).

The pixels equal those of transformers' image processors for Pillow, with which the tests compare. The module does not
import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chairlift.base.image_spans import ImageSpan
from chairlift.errors import ModelLoadError
from chairlift.models.vision.decode import resize
from chairlift.models.vision.processor import ImageProcessor, ImageSettings, PreparedImage, Tokens

__all__ = ["FramedProcessor", "SquareProcessor", "SquareSettings"]

_MOST_LINES = 64
"""Maximum number of line breaks in a token for which :class:`FramedProcessor` searches."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SquareSettings(ImageSettings):
    """Settings for resizing and cropping images, from ``preprocessor_config.json`` and ``config.json``."""

    size: int
    """Side of the square in pixels."""
    resized: tuple[int, ...]
    """Size before the square is cut out of the middle: (shortest edge,) or (height, width)."""
    resample: int
    """Pillow's number of the filter that resizes images."""
    rows: int
    """Number of rows that the encoder makes of an image: one for each prompt position of the image."""
    image_token_id: int
    around: tuple[int, int] = (-1, -1)
    """Ids of the tokens before and after an image's rows, in models that have these tokens (Gemma 3); otherwise
    negative."""

    def cut(self, where: str, image: Any) -> tuple[int, int, list[Any]]:
        width, height = self._resized(image.size)
        image = resize(where, image, (width, height), self.resample)
        left = (width - self.size) // 2
        top = (height - self.size) // 2
        return 0, 0, [image.crop((left, top, left + self.size, top + self.size))]

    def shapes(self, rows: int, columns: int) -> tuple[tuple[int, int], list[int]]:
        return (0, 0), [3 * self.size**2]

    def _resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height after resizing."""
        if len(self.resized) == 2:
            return self.resized[1], self.resized[0]
        (shortest,), (width, height) = self.resized, size
        longest = int(shortest * max(size) / min(size))
        return (shortest, longest) if width <= height else (longest, shortest)


class SquareProcessor(ImageProcessor):
    """Resizes images, and cuts a square out of the middle. Raises ModelLoadError if the text that marks an image is
    more than one token."""

    settings: SquareSettings

    def __init__(self, settings: SquareSettings, tokens: Tokens, where: Path) -> None:
        framed = settings.around[0] >= 0
        super().__init__(
            "<start_of_image>" if framed else "<image>",
            settings.around[0] if framed else settings.image_token_id,
            settings,
        )
        if (found := tokens.encode(self.marker, False)) != [self.image_token_id]:
            raise ModelLoadError(
                f"{where}: config.json says that the token of an image is {self.image_token_id}, but the tokenizer"
                f" reads {self.marker!r} as {found}; download both files again"
            )

    def lay_out(self, image: PreparedImage, found: list[int], spans: list[ImageSpan]) -> None:
        spans.append(ImageSpan(len(found), self.settings.rows, image.tiles[0].key))
        found.extend([self.image_token_id] * self.settings.rows)


class FramedProcessor(SquareProcessor):
    """Images of Gemma 3: blank lines and two tokens frame the rows, which attend to each other in both directions.

    The blank lines are joined with the lines of the text before and after an image, as if the whole text had been
    tokenized at once.
    """

    def __init__(self, settings: SquareSettings, tokens: Tokens, where: Path) -> None:
        super().__init__(settings, tokens, where)
        self._lines: Callable[[int], list[int]] = lambda count: tokens.encode("\n" * count, False) if count else []
        runs = {count: self._lines(count) for count in range(1, _MOST_LINES + 1)}
        self._counts = {ids[0]: count for count, ids in runs.items() if len(ids) == 1}
        """Token id of a run of line breaks -> number of line breaks."""

    def expand(self, token_ids: Sequence[int], images: Sequence[Any]) -> tuple[list[int], list[ImageSpan]]:
        """Put two line breaks before and after each marker, join them with the line breaks around it, and expand the
        markers."""
        found = list[int]()
        lines = 0
        for token in token_ids:
            if token == self.image_token_id:
                while found and found[-1] in self._counts:
                    lines += self._counts[found.pop()]
                found += [*self._lines(lines + 2), token]
                lines = 2
            elif lines and token in self._counts:
                lines += self._counts[token]
            else:
                found += [*self._lines(lines), token]
                lines = 0
        return super().expand([*found, *self._lines(lines)], images)

    def lay_out(self, image: PreparedImage, found: list[int], spans: list[ImageSpan]) -> None:
        settings = self.settings
        found.append(settings.around[0])
        spans.append(ImageSpan(len(found), settings.rows, image.tiles[0].key, whole=True))
        found.extend([settings.image_token_id] * settings.rows)
        found.append(settings.around[1])
