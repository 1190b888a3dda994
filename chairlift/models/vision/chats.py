"""Takes the images out of chat messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from chairlift.base.image_refusals import IMAGE_PART
from chairlift.errors import PromptTooLongError, RequestError
from chairlift.models.vision.addresses import MediaSource
from chairlift.models.vision.decode import from_data_url
from chairlift.models.vision.processor import MAX_IMAGES, ImageProcessor, PreparedImage

__all__ = ["GivenImage", "ImageBudget", "check_number", "fetch_images", "prepare_images", "take_images"]

MOST_ADDRESSES: Final = 16
"""Maximum number of images per request that are read from addresses. They are read one after another."""

MOST_PIXELS: Final = 200_000_000
"""Maximum number of pixels of all encoded image files of a request together. Decoding takes time for each pixel, and a
few kilobytes may unpack to millions of pixels."""

MOST_SECONDS: Final = 30.0
"""Maximum processor time in seconds for all images of a request together."""

GivenImage = tuple[str, Any]
"""(position of an image in the messages, such as ``messages[0].content[1]``; its URL, its Pillow image, or the prepared
image)."""


def take_images(messages: Any) -> tuple[Any, list[GivenImage]]:
    """Returns (messages in which each image is replaced by the bare part ``{"type": "image"}``, list of the images in
    order).

    Images are ``{"type": "image_url", "image_url": {"url": ...}}`` as in OpenAI's API, ``{"type": "image", "image":
    ...}`` as in transformers, and ``{"type": "image_pil", "image_pil": ...}`` as in vLLM. Malformed messages are
    returned unchanged; the chat validator reports them. Raises RequestError.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        return messages, []
    images: list[GivenImage] = []
    found = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (list, tuple)):
            parts = [_part(f"messages[{index}].content[{place}]", part, images) for place, part in enumerate(content)]
            message = {**message, "content": parts}
        found.append(message)
    return found, images


class ImageBudget:
    """Sums of what the images of a request take, with their limits.

    ``most_positions`` is the maximum number of prompt positions of all images. The bytes of a prepared image grow with
    its positions, so this also limits the memory of a request.
    """

    def __init__(self, processor: ImageProcessor, most_positions: int | None = None) -> None:
        self._processor = processor
        self._most_positions = most_positions
        self._positions = self._pixels = 0
        self._seconds = 0.0

    def add(self, where: str, image: PreparedImage) -> None:
        """Add an image. Raises RequestError that names it if a sum exceeds its limit."""
        self._pixels += image.file_pixels
        self._seconds += image.seconds
        if self._pixels > MOST_PIXELS:
            raise RequestError(
                f"{where} makes {self._pixels:,} pixels together with the images before it; all images of a request may"
                f" have {MOST_PIXELS:,}: make them smaller, or send several requests"
            )
        if self._seconds > MOST_SECONDS:
            raise RequestError(
                f"{where} and the images before it took {self._seconds:.1f} s of processor time; all images of a"
                f" request may take {MOST_SECONDS:g} s: send baseline JPEG or PNG, or several requests"
            )
        if self._most_positions is not None:
            self._positions += self._processor.num_positions(image)
            if self._positions > self._most_positions:
                raise PromptTooLongError(
                    f"{where} and the images before it take {self._positions:,} positions of the prompt, and the model"
                    f" has at most {self._most_positions:,}: send fewer or smaller images"
                )


PrepareFile = Callable[[str, "str | bytes"], Awaitable[PreparedImage]]
"""Function that prepares the image in a ``data:`` URL or in the bytes of a file. Its first argument names the image."""


async def fetch_images(
    messages: Sequence[Any], source: MediaSource, prepare: PrepareFile, budget: ImageBudget
) -> list[Any]:
    """Return ``messages`` in which every address that ``source`` reads is replaced by the prepared image at that
    address. All other parts are unchanged. Images are read one after another, in ``source.seconds`` together, and each
    is prepared before the next is read. Raises RequestError that names the path of an image that cannot be read."""
    found = list(messages)
    left = source.seconds
    for count, (index, place, url) in enumerate(_addresses_in(messages, source), 1):
        if count > MOST_ADDRESSES:
            raise RequestError(f"the messages name more than {MOST_ADDRESSES} images by address; send some as data")
        where = f"messages[{index}].content[{place}].image_url.url"
        data, seconds = await source.fetch(where, url, left)
        image = await prepare(where, data)
        left = left - seconds
        budget.add(where, image)
        parts = list(found[index]["content"])
        parts[place] = {"type": "image", "image": image}
        found[index] = {**found[index], "content": parts}
    return found


def _addresses_in(messages: Sequence[Any], source: MediaSource) -> Iterator[tuple[int, int, str]]:
    """(index of a message, index of a part, address) for each address that ``source`` reads."""
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            continue
        for place, part in enumerate(content):
            given = part.get("image_url") if isinstance(part, Mapping) and part.get("type") == "image_url" else None
            url = given.get("url") if isinstance(given, Mapping) else given
            if isinstance(url, str) and source.reads(url):
                yield index, place, url


def prepare_images(processor: ImageProcessor, images: Sequence[GivenImage]) -> list[PreparedImage]:
    """Decode and cut images in this process, at most :data:`MAX_IMAGES`. Raises RequestError that names the path of a
    bad image."""
    check_number(images)
    prepared = list[PreparedImage]()
    budget = ImageBudget(processor)
    for where, given in images:
        image = from_data_url(where, given) if isinstance(given, str) else given
        done = processor.prepare(where, image)
        if isinstance(given, str):
            done = dataclasses.replace(done, file_pixels=image.width * image.height)
        budget.add(where, done)
        prepared.append(done)
    return prepared


def check_number(images: Sequence[GivenImage]) -> None:
    """Raise RequestError if a prompt has too many images."""
    if len(images) > MAX_IMAGES:  # checked before the first image is decoded
        raise RequestError(f"the messages have {len(images):,} images; at most {MAX_IMAGES} are read")


def _part(where: str, part: Any, images: list[GivenImage]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_url":
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        if not isinstance(url, str):
            got = "nothing" if url is None else repr(url)[:60]
            raise RequestError(f"{where}.image_url.url must be a data URL (data:image/png;base64,...), got {got}")
        images.append((f"{where}.image_url.url", url))
    elif kind in ("image", "image_pil"):
        image = part.get(kind)
        if image is None or isinstance(image, Mapping):
            got = "nothing" if image is None else repr(image)[:60]
            raise RequestError(f"{where}.{kind} must be an image of Pillow, got {got}; over HTTP, send {IMAGE_PART}")
        images.append((f"{where}.{kind}", image))
    elif isinstance(kind, str) and "image" in kind.lower():
        raise RequestError(f"{where} has the type {kind[:60]!r}; send an image as {IMAGE_PART}")
    else:
        return part
    return {"type": "image"}
