"""Prompt positions of encoded images, as plain data."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["ImageSpan", "ImageTile", "axes_of", "cut_by", "marks"]

_PLACE: Final = struct.Struct("=qqq")


@dataclasses.dataclass(frozen=True, slots=True)
class ImageTile:
    """A part of an image that is encoded separately, with the pixels that the model's encoder reads."""

    key: bytes
    """Hash of the pixels and their shape; in the engine also of the caller's salt (:mod:`chairlift.base.cache_key`).
    Tiles with equal keys have equal encoded rows."""
    pixels: bytes
    """The pixels as uint8 [3, height, width], before normalisation."""
    grid: tuple[int, int] = (0, 0)
    """(patches from top to bottom, patches from left to right) for models whose images differ in size; otherwise
    zeros."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSpan:
    """Prompt positions whose inputs are the encoded rows of a tile instead of token embeddings."""

    position: int
    """First prompt position of the span."""
    length: int
    """Number of positions, each with a row of the tile."""
    key: bytes
    """Key of the tile; see :class:`ImageTile`."""
    grid: tuple[int, int] = (0, 0)
    """(number of the tile's rows from top to bottom, number from left to right) for models whose positions have a
    height and a width (see :func:`axes_of`); otherwise zeros."""

    whole: bool = False
    """Whether the positions of the span attend to each other in both directions. They are then computed in the same
    step."""
    first: int = 0
    """Row of the tile at the first position, for models with other tokens between the rows of an image."""

    @property
    def end(self) -> int:
        return self.position + self.length


def cut_by(spans: Sequence[ImageSpan], index: int) -> ImageSpan | None:
    """The span that must be computed in one step but would be cut if a step ended before position ``index``; None if
    there is none."""
    return next((span for span in spans if span.whole and span.position < index < span.end), None)


def axes_of(spans: Sequence[ImageSpan]) -> tuple[npt.NDArray[np.int32], int]:
    """Positions in time, height and width, for multimodal RoPE (Wang et al., 2024). Returns (int32 [3, end] up to the
    end of the last span with a grid, number to add to the index of every later token).

    Text tokens have the same position on all three axes. An image begins at the position p that follows the text before
    it. All its rows have the time p; their height and width are p plus their row and column in the grid. The text after
    the image continues at p plus the longer side of the grid.
    """
    placed = [span for span in spans if span.grid != (0, 0)]
    found = np.empty((3, placed[-1].end if placed else 0), dtype=np.int32)
    index = shift = 0
    for span in placed:
        rows, columns = span.grid
        found[:, index : span.position] = np.arange(index, span.position) + shift
        begin = span.position + shift
        found[0, span.position : span.end] = begin
        found[1, span.position : span.end] = begin + np.repeat(np.arange(rows), columns)
        found[2, span.position : span.end] = begin + np.tile(np.arange(columns), rows)
        index = span.end
        shift = shift + max(rows, columns) - span.length
    return found, shift


def marks(spans: Sequence[ImageSpan], start: int, end: int) -> bytes:
    """Bytes that distinguish positions ``start`` to ``end`` (excluded) from positions with the same token ids but other
    images. They contain the key and the place of each span that overlaps this range."""
    covering = (span for span in spans if span.position < end and span.end > start)
    return b"".join(span.key + _PLACE.pack(span.position, span.length, span.first) for span in covering)
