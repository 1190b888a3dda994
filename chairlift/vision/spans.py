"""Places of encoded images in a prompt, as plain data."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Final

__all__ = ["MARK_BYTES", "ImageSpan", "ImageTile", "marks"]

_PLACE: Final = struct.Struct("=qq")
_KEY_BYTES: Final = 32
MARK_BYTES: Final = _KEY_BYTES + _PLACE.size
"""Bytes of one mark in :func:`marks`."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageTile:
    """A part of an image that is encoded by itself, as the model's encoder sees it."""

    key: bytes
    """SHA-256 of the pixels. Tiles with equal keys have equal rows."""
    pixels: bytes
    """uint8 [3, size, size], before they are normalised."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSpan:
    """Prompt positions whose inputs are the rows of a tile, and not embeddings of their tokens."""

    position: int
    """First of these positions."""
    length: int
    """Number of rows of the tile."""
    key: bytes
    """Key of the tile."""

    @property
    def end(self) -> int:
        return self.position + self.length


def marks(spans: Sequence[ImageSpan], start: int, end: int) -> bytes:
    """What distinguishes positions ``start`` to ``end`` (excluded) from others with the same token ids: the key and the
    place of each span that covers some of them. Each takes :data:`MARK_BYTES`."""
    covering = (span for span in spans if span.position < end and span.end > start)
    return b"".join(span.key + _PLACE.pack(span.position, span.length) for span in covering)
