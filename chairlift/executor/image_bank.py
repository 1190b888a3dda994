"""Stores the embeddings of image tiles for the executor, and runs the encoder that computes them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.image_spans import ImageTile
from chairlift.kernels.openmp import end_threads
from chairlift.models.vision.vision_tower import Tower

__all__ = ["ImageBank"]


class ImageBank:
    """Stored embeddings of image tiles, as bytes in the model's dtype; see
    :class:`~chairlift.executor.executor.ImageMemory`. ``row_bytes`` is the number of bytes of a row."""

    @property
    def rounds_floats(self) -> bool:
        """Whether stored numbers of the encoder were rounded to the model's dtype."""
        return self._tower.rounds_floats

    def __init__(self, tower: Tower, row_bytes: int) -> None:
        self._tower = tower
        self._row_bytes = row_bytes
        self.rows: dict[bytes, npt.NDArray[np.uint8]] = {}
        """Key of a tile -> uint8 [rows, bytes of a row]. A row has the embedding of one image token. In some models it
        also has vectors that are added after the first layers."""

    def encode(self, tile: ImageTile) -> Iterator[None]:
        for found in self._tower.encode(tile):
            if isinstance(found, Tensor):
                if not found.isfinite().all():
                    raise ArithmeticError("the encoder's rows are not finite")
                self.rows[tile.key] = found.contiguous().view(torch.uint8).numpy()
            yield None

    def rest(self) -> None:
        end_threads()

    def holds(self, key: bytes) -> bool:
        return key in self.rows

    def nbytes(self, num_rows: int) -> int:
        return num_rows * self._row_bytes

    def drop(self, key: bytes) -> None:
        del self.rows[key]
