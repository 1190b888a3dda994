"""Places of encoded images in a prompt, as plain data."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["MARK_BYTES", "ImageSpan", "ImageTile", "axes_of", "marks"]

_PLACE: Final = struct.Struct("=qq")
_KEY_BYTES: Final = 32
MARK_BYTES: Final = _KEY_BYTES + _PLACE.size
"""Bytes of one mark in :func:`marks`."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageTile:
    """A part of an image that is encoded by itself, as the model's encoder sees it."""

    key: bytes
    """SHA-256 of the pixels and their shape. Tiles with equal keys have equal rows."""
    pixels: bytes
    """uint8 [3, height, width], before they are normalised."""
    grid: tuple[int, int] = (0, 0)
    """Patches from top to bottom and from left to right, where images differ in it; otherwise zeros."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSpan:
    """Prompt positions whose inputs are the rows of a tile, and not embeddings of their tokens."""

    position: int
    """First of these positions."""
    length: int
    """Number of rows of the tile."""
    key: bytes
    """Key of the tile."""
    grid: tuple[int, int] = (0, 0)
    """Rows from top to bottom and from left to right, where they have such positions (see :func:`axes_of`)."""

    @property
    def end(self) -> int:
        return self.position + self.length


def axes_of(spans: Sequence[ImageSpan]) -> tuple[npt.NDArray[np.int32], int]:
    """Positions in time, height and width up to the end of the last span with a grid, int32 [3, end], and the number
    that is added to the index of every later token (multimodal RoPE; Wang et al., 2024).

    Texts have the same position on all three axes. An image begins at the position p behind the text before it: all its
    rows have p in time, and p plus their row and column in the grid. The text behind it goes on at p plus the longer
    side of the grid.
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
        index, shift = span.end, shift + max(rows, columns) - span.length
    return found, shift


def marks(spans: Sequence[ImageSpan], start: int, end: int) -> bytes:
    """What distinguishes positions ``start`` to ``end`` (excluded) from others with the same token ids: the key and the
    place of each span that covers some of them. Each takes :data:`MARK_BYTES`."""
    covering = (span for span in spans if span.position < end and span.end > start)
    return b"".join(span.key + _PLACE.pack(span.position, span.length) for span in covering)
