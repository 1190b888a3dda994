"""Reads image files in processes that can be killed, under the kernel's limits on memory and processor time.

Decoders are native code that works on data of strangers: a few kilobytes may unpack to gigabytes, and a damaged file
may end the process. A worker gets the bytes of a file and returns the pixels of its tiles. It may take as much memory
and processor time as the image's size in pixels explains, so a file cannot hide a large table behind a small image.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy, whose threads would take memory in each worker

from chairlift.base.workers import WorkerPool
from chairlift.base.workers.child import Answer, serve
from chairlift.errors import QueueFullError, RequestError
from chairlift.models.vision.decode import (
    MAX_BYTES,
    MAX_PIXELS,
    MAX_RESIZED,
    base64_of,
    from_base64,
    need_pillow,
    open_image,
    to_rgb,
    webp_size,
)
from chairlift.models.vision.patches import PatchSettings
from chairlift.models.vision.processor import ImageProcessor, ImageSettings, PreparedImage, pixels_of
from chairlift.models.vision.squares import SquareSettings
from chairlift.models.vision.tiles import TileSettings

__all__ = ["ImageWorker"]

_KINDS: Final[dict[str, type[Any]]] = {kind.__name__: kind for kind in (PatchSettings, SquareSettings, TileSettings)}
_LEAST_BYTES: Final = 96 << 20
"""Memory that a worker may take for any image."""
_BYTES_PER_PIXEL: Final = 16
"""Memory that a worker may take for each pixel while it decodes. Pillow's RGB has 4 bytes per pixel. A progressive JPEG
file in CMYK takes 12 bytes per pixel, and a PNG file with transparency that is turned 12."""
_BYTES_PER_WEBP_PIXEL: Final = 24
"""The same for WebP files, which take 21 with transparency."""
_BYTES_PER_RESIZED_PIXEL: Final = 16
_FILE_COPIES: Final = 4
"""Memory that a worker may take for each byte of a file."""
_SECONDS: Final = 2.0
_SECONDS_PER_PIXEL: Final = 0.25e-6
"""Limit of processor time for an image: seconds for any image, and for each pixel. Usual files take a tenth of it."""
_MOST_SECONDS: Final = _SECONDS + _SECONDS_PER_PIXEL * MAX_PIXELS
_MEMORY: Final = (
    _LEAST_BYTES
    + _FILE_COPIES * MAX_BYTES
    + _BYTES_PER_WEBP_PIXEL * MAX_PIXELS
    + _BYTES_PER_RESIZED_PIXEL * MAX_RESIZED
)
_RETIRE_BYTES: Final = 128 << 20
"""A worker is replaced when it keeps so much more memory than at its start."""
_MAX_REPLY: Final = 3 * MAX_RESIZED + (16 << 20)
_MOST_WAITING_BYTES: Final = 512 << 20
"""Maximum number of bytes of all files that wait for a worker."""
_MOST_TILES: Final = 1 << 16
_AGAIN: Final = "save it again as PNG or JPEG, or make it smaller"


class ImageWorker(WorkerPool):
    """Prepares image files for ``processor``, in worker processes. Up to ``max_waiting`` files wait in the queue.
    ``memory_bytes`` is the memory that a worker may take for an image after its start. All methods run on one event
    loop."""

    def __init__(
        self,
        processor: ImageProcessor,
        max_waiting: int = 256,
        *,
        num_workers: int = 2,
        memory_bytes: int = _MEMORY,
    ) -> None:
        settings = processor.settings
        setup = {
            "kind": type(settings).__name__,
            "settings": dataclasses.asdict(settings),  # type: ignore[call-overload]
            "memory_bytes": memory_bytes,
        }
        super().__init__(__name__, setup, "images", _MAX_REPLY, num_workers, max_waiting)
        self._processor = processor
        self._waiting_bytes = 0

    async def start(self) -> None:
        """Start a worker before the first image, if Pillow is installed. Raises OverloadedError if no worker can be
        started."""
        with contextlib.suppress(RequestError):  # without Pillow, each image gets this error
            need_pillow()
            await super().start()

    async def prepare(self, where: str, source: str | bytes) -> PreparedImage:
        """The image in a ``data:`` URL or in the bytes of a file. ``where`` names it in errors.

        Raises RequestError if it cannot be read, or takes more memory or time than its size explains. Other errors,
        those of :meth:`WorkerPool.ask`, do not mean that the image is at fault.
        """
        need_pillow()
        data = base64_of(where, source) if isinstance(source, str) else source
        if self._waiting_bytes + len(data) > _MOST_WAITING_BYTES:
            message = f"images of {self._waiting_bytes:,} bytes wait already, about as many as may; try again later"
            raise QueueFullError(message, 1.0)
        fields = {"where": where, "is_base64": isinstance(source, str), "data": data, "cpu_seconds": 3}
        self._waiting_bytes += len(data)
        try:
            reply = await self.ask(fields, _MOST_SECONDS)
        except (TimeoutError, EOFError):
            raise RequestError(
                f"{where} takes more memory or processor time than an image of its size; {_AGAIN}"
            ) from None
        except ValueError as error:
            raise RequestError(f"{where} cannot be read ({error!s:.200}); {_AGAIN}") from None
        finally:
            self._waiting_bytes -= len(data)
        if "error" in reply:
            raise RequestError(str(reply["error"])[:1000])
        try:
            return self._restored(reply)
        except (TypeError, ValueError, KeyError) as error:
            raise RequestError(f"{where} cannot be read (its process sent {error!s:.200}); {_AGAIN}") from None

    def _restored(self, reply: dict[str, Any]) -> PreparedImage:
        """The image in a worker's reply. Raises ValueError for a reply that no worker sends unless a file controls
        it."""
        rows, columns, pixels = (int(reply[name]) for name in ("rows", "columns", "file_pixels"))
        if not (rows >= 0 and columns >= 0 and rows * columns <= _MOST_TILES and 1 <= pixels <= MAX_PIXELS):
            raise ValueError(f"{rows} x {columns} tiles of {pixels} pixels")
        return self._processor.restore(rows, columns, reply["data"], pixels, max(0.0, float(reply["seconds"])))


def _prepare(setup: dict[str, Any]) -> tuple[Answer, Callable[[], object]]:
    # Pillow would load all its decoders when it meets a format that is not loaded.
    from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401

    Image.preinit()
    settings: ImageSettings = _KINDS[setup["kind"]](**setup["settings"])

    at_start = _address_space()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        where = str(request["where"])
        try:
            reply = _read(settings, where, request)
        except RequestError as error:
            reply = {"error": str(error)}
        except MemoryError:
            reply = {"error": f"{where} takes more memory than an image of its size; {_AGAIN}", "retire": True}
        if _address_space() - at_start > _RETIRE_BYTES + len(reply.get("data", b"")):
            reply["retire"] = True
        return reply

    return answer, lambda: None


def _read(settings: ImageSettings, where: str, request: dict[str, Any]) -> dict[str, Any]:
    """Reply to a request: the pixels of the tiles of a file. Raises RequestError and MemoryError."""
    begin = _seconds_used()
    data = request.pop("data", b"")
    base = _LEAST_BYTES + _FILE_COPIES * len(data)
    if request["is_base64"]:
        data = from_base64(where, data)
    webp_bytes = _BYTES_PER_WEBP_PIXEL * math.prod(webp_size(data))
    with _limited(base + webp_bytes, _SECONDS):
        image = open_image(where, data)
        pixels = image.width * image.height
    with _limited(base + (webp_bytes or _BYTES_PER_PIXEL * pixels), _SECONDS + _SECONDS_PER_PIXEL * pixels):
        image = to_rgb(where, image)
    del data
    rows, columns, tiles = settings.cut(where, image)
    found = b"".join(map(pixels_of, tiles))
    return {"rows": rows, "columns": columns, "file_pixels": pixels, "seconds": _seconds_used() - begin, "data": found}


@contextlib.contextmanager
def _limited(memory_bytes: int, seconds: float) -> Iterator[None]:
    """Context manager: this process may take ``memory_bytes`` more than it has, until the end of the block, and
    ``seconds`` of processor time more than it has used."""
    whole, hard = resource.getrlimit(resource.RLIMIT_AS)
    if (held := _address_space()) and whole != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (min(held + memory_bytes, whole), hard))
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(_seconds_used() + seconds) + 1, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (whole, hard))


def _seconds_used() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _address_space() -> int:
    """Size in bytes of this process's address space; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    serve(_prepare, f"the image takes more memory than it may; {_AGAIN}")
