"""Decodes an image that a caller sends to RGB, within limits. Images are untrusted data."""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import Any, Final

from chairlift.errors import RequestError

__all__ = ["FORMATS", "MAX_BYTES", "MAX_PIXELS", "decode_image", "from_data_url", "to_rgb"]

MAX_BYTES: Final = 32 << 20
"""Maximum number of bytes of an image file."""
MAX_PIXELS: Final = 40_000_000
"""Maximum number of pixels of an image. A small file may unpack to any number of pixels."""
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Image formats that are read. Other formats are refused, because their decoders are less well tested against
attacks."""
_MOST_SCANS: Final = 50
"""Maximum number of scans of a JPEG file. A decoder passes over all pixels once for each scan. Usual files have at most
20, and previews inside the file have some more."""
_DATA_URL: Final = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.IGNORECASE)
_FLAGS: Final = {
    **dict.fromkeys(("http", "https"), ", or have the server started with --allowed-media-domains HOST"),
    "file": ", or have the server started with --allowed-local-media-path DIRECTORY",
}
"""Scheme of an address -> what else helps."""
_HINT: Final = "send a PNG, JPEG, WebP, GIF, BMP or TIFF file"
_BASE64: Final = "encode the whole file with the standard alphabet and padding, without line breaks"
_MAKE: Final = "make one with PIL.Image.open or PIL.Image.fromarray"
_DEEP: Final = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes that have more than 8 bits per channel."""


def from_data_url(where: str, url: str) -> Any:
    """RGB image in a ``data:`` URL; see :func:`decode_image`."""
    head = _DATA_URL.match(url)
    if head is None:
        raise RequestError(
            f"{where} must be a data URL (data:image/png;base64,...), got {url[:60]!r}; send the image itself"
            + _FLAGS.get(url[:8].lower().partition(":")[0], "")
        )
    if len(url) - head.end() > MAX_BYTES * 4 // 3 + 4:
        raise RequestError(f"{where} has {len(url):,} characters; an image file may have {MAX_BYTES:,} bytes")
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{where} is no valid base64 ({error}); {_BASE64}") from None
    return decode_image(where, data)


def decode_image(where: str, data: bytes) -> Any:
    """RGB image (``PIL.Image``) in the bytes of a file. ``where`` names the image in errors.

    Raises RequestError for a file that is damaged, too large, animated, or of another format.
    """
    pillow = _pillow()
    if len(data) > MAX_BYTES:
        raise RequestError(f"{where} has {len(data):,} bytes; an image file may have {MAX_BYTES:,}")
    try:
        image = pillow.open(io.BytesIO(data), formats=FORMATS)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):  # the warning where it is made an error
        raise RequestError(_too_large(where, f"more than {pillow.MAX_IMAGE_PIXELS:,}")) from None
    except Exception:  # each decoder raises errors of its own
        raise RequestError(f"{where} is no image that can be read; {_HINT}") from None
    if image.format in ("JPEG", "MPO") and (scans := data.count(b"\xff\xda")) > _MOST_SCANS:
        raise RequestError(f"{where} has {scans:,} scans; a JPEG file may have {_MOST_SCANS}: save it as baseline JPEG")
    return to_rgb(where, image)


def to_rgb(where: str, image: Any) -> Any:
    """An image of Pillow as 8-bit RGB, turned upright as its EXIF data says. Transparency is dropped, so transparent
    pixels show their stored colour.

    Raises RequestError for images that are damaged, too large or animated, and for objects that are not images.
    """
    pillow = _pillow()
    from PIL import ImageOps

    if not isinstance(image, pillow.Image):
        raise RequestError(f"{where} must be an image of Pillow (PIL.Image.Image), got {type(image).__name__}; {_MAKE}")
    width, height = image.size
    if not 1 <= width * height <= MAX_PIXELS:
        raise RequestError(_too_large(where, f"{width} x {height} = {width * height:,}"))
    try:
        if getattr(image, "is_animated", False):  # n_frames would read all pages, of which a file may have thousands
            raise RequestError(f"{where} is animated or has several pages; send one of them")
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode in _DEEP:  # Pillow would cut values off at 255
            return _scaled(image).convert("RGB")
        return image.convert("RGB")
    except RequestError:
        raise
    except Exception as error:  # each decoder raises errors of its own
        raise RequestError(
            f"{where} is damaged or incomplete ({type(error).__name__}: {str(error)[:80]}); {_HINT}"
        ) from None


def _scaled(image: Any) -> Any:
    """An image with 16 bits per pixel, reduced to 8 bits: the high byte of each value."""
    import numpy as np

    values = np.asarray(image)
    if values.dtype.kind == "f" or int(values.max()) > 0xFFFF or int(values.min()) < 0:
        raise ValueError("32-bit pixels have no agreed range")
    return _pillow().fromarray((values >> 8).astype(np.uint8))


def _too_large(where: str, what: str) -> str:
    return f"{where} has {what} pixels; an image may have 1 to {MAX_PIXELS:,}: make it smaller"


def _pillow() -> Any:
    """The module ``PIL.Image``. Raises RequestError if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise RequestError("images need Pillow, which is not installed: pip install 'chairlift[vision]'") from None
    return Image
