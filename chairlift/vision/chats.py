"""Takes images out of the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chairlift.errors import RequestError
from chairlift.vision.decode import from_data_url
from chairlift.vision.processor import ImageProcessor, PreparedImage

__all__ = ["GivenImage", "prepare_images", "take_images"]

GivenImage = tuple[str, Any]
"""(path of an image in the messages, its URL or image of Pillow)."""


def take_images(messages: Any) -> tuple[Any, list[GivenImage]]:
    """Messages whose images are bare parts ``{"type": "image"}``, and the images in their order.

    Images are ``{"type": "image_url", "image_url": {"url": ...}}`` as in OpenAI's API, and ``{"type": "image", "image":
    ...}`` as in transformers. Messages of another form are left to the validator of chats. Raises RequestError.
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


def prepare_images(processor: ImageProcessor, images: Sequence[GivenImage]) -> list[PreparedImage]:
    """Read and cut images. Any thread may call it. Raises RequestError with the path of a bad one."""
    return [
        processor.prepare(where, from_data_url(where, image) if isinstance(image, str) else image)
        for where, image in images
    ]


def _part(where: str, part: Any, images: list[GivenImage]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_url":
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        if not isinstance(url, str):
            raise RequestError(f"{where}.image_url.url must be a data URL (data:image/png;base64,...)")
        images.append((f"{where}.image_url.url", url))
    elif kind == "image":
        images.append((f"{where}.image", part.get("image")))
    else:
        return part
    return {"type": "image"}
