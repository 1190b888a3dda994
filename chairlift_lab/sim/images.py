"""Scripted images without pixels: an image is a number, and its rows are words that a model mixes into its hashes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

from chairlift.base.image_spans import ImageSpan, ImageTile
from chairlift.engine.clock import VirtualClock
from chairlift.models.hashlm import image_word
from chairlift.models.vision.processor import ImageProcessor, ImageSettings, PreparedImage
from chairlift_lab.sim.world import BROKEN_IMAGE, IMAGE_TOKEN

__all__ = ["TILE_BYTES", "ScriptedEncoder", "ScriptedImages", "input_words", "markers_of"]

TILE_BYTES = 100
"""Size in bytes of the simulated memory for the rows of a tile."""


def _key_of(content: int, length: int) -> bytes:
    return hashlib.sha256(f"{content} {length}".encode()).digest()


def _tag_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


def input_words(args: dict[str, Any]) -> list[int]:
    """Prompt of an arrival as the model gets it: token ids, in which the words of image rows replace the
    placeholders."""
    words = list(args["prompt"])
    for position, length, content in args.get("images", ()):
        tag = _tag_of(_key_of(content, length))
        words[position : position + length] = [image_word(tag, row) for row in range(length)]
    return words


def markers_of(args: dict[str, Any]) -> dict[str, Any]:
    """Fields of a request as a client sends it: a prompt with one marker per image, and the images."""
    prompt = args["prompt"]
    found = list[int]()
    begin = 0
    for position, length, _ in args["images"]:
        found += [*prompt[begin:position], IMAGE_TOKEN]
        begin = position + length
    images = [(length, content) for _, length, content in args["images"]]
    return {"prompt_token_ids": found + prompt[begin:], "multi_modal_data": {"image": images}}


class _NoSettings(ImageSettings):
    """Settings of scripted images, which are neither resized nor cut."""

    def cut(self, where: str, image: Any) -> tuple[int, int, list[Any]]:
        raise NotImplementedError

    def shapes(self, rows: int, columns: int) -> tuple[tuple[int, int], list[int]]:
        raise NotImplementedError


class ScriptedImages(ImageProcessor):
    """Prepares scripted images, which are pairs (number of rows, content). Each image has one tile. With ``whole`` an
    image must be computed in one step."""

    def __init__(self, whole: bool) -> None:
        super().__init__("<image>", IMAGE_TOKEN, _NoSettings())
        self._whole = whole

    def prepare(self, where: str, image: Any) -> PreparedImage:
        """Convert ``image``, a pair (number of rows, content), to a prepared image with one tile."""
        length, content = image
        return PreparedImage(0, 0, (ImageTile(_key_of(content, length), bytes([content, length])),))

    def lay_out(self, image: PreparedImage, found: list[int], spans: list[ImageSpan]) -> None:
        """Append the placeholders of an image to ``found``, and the spans of its tiles to ``spans``."""
        for tile in image.tiles:
            length = tile.pixels[1]
            spans.append(ImageSpan(len(found), length, tile.key, whole=self._whole))
            found += [self.image_token_id] * length


@dataclasses.dataclass(slots=True)
class ScriptedEncoder:
    """Encodes a tile in ``pieces`` pieces of ``seconds`` each on a virtual clock."""

    clock: VirtualClock
    pieces: int
    seconds: float
    tags: dict[bytes, int] = dataclasses.field(default_factory=dict)
    """Key of an encoded tile -> number of 64 bits that determines the rows of the tile."""
    flaws: list[str] = dataclasses.field(default_factory=list)
    """Calls that break the protocol."""
    num_drops: int = 0
    """Number of tiles whose rows were dropped."""
    most: int = 0
    """Maximum number of tiles whose rows were stored at the same time."""

    def encode(self, tile: ImageTile) -> Iterator[None]:
        """Encode a tile, and yield after each piece. Raises ArithmeticError for an image whose content is
        ``BROKEN_IMAGE``."""
        self.flaws += [f"tile {tile.key.hex()[:8]} is encoded although its rows are in memory"] * self.holds(tile.key)
        for _ in range(self.pieces):
            self.clock.advance(self.seconds)
            yield
        if tile.pixels[0] == BROKEN_IMAGE:
            raise ArithmeticError("injected: the rows are not finite")
        self.tags[tile.key] = _tag_of(_key_of(*tile.pixels))  # the rows depend on the pixels alone
        self.most = max(self.most, len(self.tags))

    def rest(self) -> None:
        """Do nothing: this encoder has no threads."""

    def holds(self, key: bytes) -> bool:
        """Whether the encoded rows of the tile with this key are stored."""
        return key in self.tags

    def nbytes(self, num_rows: int) -> int:
        """Size in bytes of a tile's rows: the same for every tile."""
        return TILE_BYTES

    def drop(self, key: bytes) -> None:
        """Remove the stored rows of the tile with this key."""
        self.num_drops += 1
        del self.tags[key]
