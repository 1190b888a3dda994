"""Reads the images of requests for a server: files in worker processes, images of Pillow on a thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from chairlift.models.vision.addresses import MediaSource
from chairlift.models.vision.chats import GivenImage, ImageBudget, check_number, fetch_images
from chairlift.models.vision.image_worker import ImageWorker
from chairlift.models.vision.processor import ImageProcessor, PlacedImages, PreparedImage, place_images

__all__ = ["Beside", "ImageReader"]

Beside = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Function that runs a function on a thread and returns its result."""


class ImageReader:
    """Reads the images of requests. All images of a prompt may take ``most_positions`` positions. Up to ``max_waiting``
    files wait in the queue. All methods run on one event loop."""

    def __init__(self, processor: ImageProcessor, most_positions: int, max_waiting: int) -> None:
        self.processor = processor
        self._most_positions = most_positions
        self._worker = ImageWorker(processor, max_waiting)

    async def start(self) -> None:
        """Start a worker before the first image. Raises OverloadedError if no worker can be started."""
        await self._worker.start()

    async def close(self) -> None:
        """End the workers. Calls in progress fail."""
        await self._worker.close()

    async def fetch(self, messages: Sequence[Any], source: MediaSource) -> list[Any]:
        """``messages`` with the images at addresses that ``source`` reads; see
        :func:`~chairlift.models.vision.chats.fetch_images`."""
        budget = ImageBudget(self.processor, self._most_positions)
        return await fetch_images(messages, source, self._worker.prepare, budget)

    async def place(
        self, token_ids: Sequence[int], images: Sequence[GivenImage], beside: Beside
    ) -> tuple[list[int], PlacedImages]:
        """Prepare images, one after another, and expand the placeholders of their prompt. ``beside`` runs what no
        worker does. Returns (token ids, placed images). Raises RequestError that names the path of a bad image, and the
        errors of :meth:`ImageWorker.prepare <chairlift.models.vision.image_worker.ImageWorker.prepare>`."""
        check_number(images)
        prepared = list[PreparedImage]()
        budget = ImageBudget(self.processor, self._most_positions)
        for where, given in images:
            prepared.append(await self._prepared(where, given, beside))
            budget.add(where, prepared[-1])
        placed: tuple[list[int], PlacedImages] = await beside(lambda: place_images(self.processor, token_ids, prepared))
        return placed

    async def _prepared(self, where: str, given: Any, beside: Beside) -> PreparedImage:
        if isinstance(given, PreparedImage):
            return given
        if isinstance(given, str):
            return await self._worker.prepare(where, given)
        image: PreparedImage = await beside(lambda: self.processor.prepare(where, given))
        return image
