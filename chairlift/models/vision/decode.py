"""Decodes an image that a caller sends to RGB, within limits. Images are untrusted data."""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
from typing import Any, Final

from chairlift.errors import RequestError

__all__ = [
    "FORMATS",
    "MAX_BYTES",
    "MAX_PIXELS",
    "MAX_RATIO",
    "MAX_RESIZED",
    "base64_of",
    "decode_image",
    "from_base64",
    "from_data_url",
    "need_pillow",
    "open_image",
    "resize",
    "to_rgb",
    "webp_size",
]

MAX_BYTES: Final = 32 << 20
"""Maximum number of bytes of an image file."""
MAX_PIXELS: Final = 40_000_000
"""Maximum number of pixels of an image. A small file may unpack to any number of pixels."""
MAX_RESIZED: Final = 2 * MAX_PIXELS
"""Maximum number of pixels of an image after a resizing."""
MAX_RATIO: Final = 200
"""Maximum ratio of an image's longer side to its shorter side. Qwen's models have the same limit in transformers."""
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Image formats that are read. Other formats are refused, because their decoders are less well tested against
attacks."""
_MOST_SCANS: Final = 50
"""Maximum number of scans of a JPEG file. A decoder passes over all pixels once for each scan. Usual files have at most
20, and previews inside the file have some more."""
_MOST_TILE_PIXELS: Final = 1 << 22
"""Maximum number of pixels of a TIFF tile that is larger than twice the image."""
_TILE_SIDES: Final = (322, 323)
"""TIFF's tags for the width and the length of a tile."""
_STRIP_PIXELS: Final = 1 << 20
_FACTORS: Final = {"L;2": 85, "L;4": 17}
"""Pillow's name of a PNG file's pixels with fewer than 8 bits -> factor by which it multiplies them."""
_ORIENTATION: Final = 0x0112
_TURNS: Final = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Orientation in EXIF data -> Pillow's number of the operation (``PIL.Image.Transpose``) that turns the image
upright."""
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
    return decode_image(where, from_base64(where, base64_of(where, url)))


def base64_of(where: str, url: str) -> bytes:
    """The Base64 text of a ``data:`` URL. Raises RequestError for another URL, and for a file that is too large."""
    head = _DATA_URL.match(url)
    if head is None:
        raise RequestError(
            f"{where} must be a data URL (data:image/png;base64,...), got {url[:60]!r}; send the image itself"
            + _FLAGS.get(url[:8].lower().partition(":")[0], "")
        )
    if len(url) - head.end() > MAX_BYTES * 4 // 3 + 4:
        raise RequestError(f"{where} has {len(url):,} characters; an image file may have {MAX_BYTES:,} bytes")
    try:
        return url[head.end() :].encode("ascii")
    except UnicodeEncodeError:
        raise RequestError(f"{where} is no valid base64 (it has other characters than ASCII); {_BASE64}") from None


def from_base64(where: str, text: bytes) -> bytes:
    """The bytes of a Base64 text. Raises RequestError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{where} is no valid base64 ({error}); {_BASE64}") from None


def decode_image(where: str, data: bytes) -> Any:
    """RGB image (``PIL.Image``) in the bytes of a file. ``where`` names the image in errors.

    Raises RequestError for a file that is damaged, too large, or of another format.
    """
    return to_rgb(where, open_image(where, data))


def open_image(where: str, data: bytes) -> Any:
    """Image of Pillow in the bytes of a file. Only the file's header is read. Raises RequestError for a file of another
    format, and for a header that asks for more memory or time than an image may take."""
    pillow = need_pillow()
    if len(data) > MAX_BYTES:
        raise RequestError(f"{where} has {len(data):,} bytes; an image file may have {MAX_BYTES:,}")
    if 0 not in (size := webp_size(data)):  # the decoder allocates the whole image when it opens a file
        _check_size(where, size)
    try:
        image = pillow.open(io.BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):  # the warning where it is made an error
        raise RequestError(_too_large(where, f"more than {pillow.MAX_IMAGE_PIXELS:,}")) from None
    except Exception:  # each decoder raises errors of its own
        raise RequestError(f"{where} is no image that can be read; {_HINT}") from None
    if image.format in ("JPEG", "MPO") and (scans := data.count(b"\xff\xda")) > _MOST_SCANS:
        raise RequestError(f"{where} has {scans:,} scans; a JPEG file may have {_MOST_SCANS}: save it as baseline JPEG")
    if image.format == "TIFF":
        _check_tiles(where, image)
    if image.format == "PNG":
        _scale_key(where, image)
    _check_size(where, image.size)
    return image


def webp_size(data: bytes) -> tuple[int, int]:
    """(width, height) in the header of a WebP file; (0, 0) for other files."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return 0, 0
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        sides = int.from_bytes(data[21:25], "little")
        return 1 + (sides & 0x3FFF), 1 + (sides >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return 0, 0


def to_rgb(where: str, image: Any) -> Any:
    """An image of Pillow as 8-bit RGB, turned upright as its EXIF data says. Transparent pixels show white, in every
    mode that has transparency, as in the image processors of transformers. An animated file gives its first frame, and
    a file of several pages its first page, as in transformers.

    Raises RequestError for images that are damaged or too large, and for objects that are not images.
    """
    pillow = need_pillow()
    if not isinstance(image, pillow.Image):
        raise RequestError(f"{where} must be an image of Pillow (PIL.Image.Image), got {type(image).__name__}; {_MAKE}")
    _check_size(where, image.size)
    try:
        image.load()  # the first frame or page only: a file may have thousands
        turn = _TURNS.get(image.getexif().get(_ORIENTATION))
        image = _on_white(image)
        return image if turn is None else image.transpose(turn)
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # each decoder raises errors of its own
        raise RequestError(
            f"{where} is damaged or incomplete ({type(error).__name__}: {str(error)[:80]}); {_HINT}"
        ) from None


def resize(where: str, image: Any, size: tuple[int, int], resample: int) -> Any:
    """An image of Pillow in another ``size`` (width, height). Raises RequestError if the new image has too many
    pixels."""
    if size[0] * size[1] > MAX_RESIZED:
        raise RequestError(
            f"{where} has {image.width} x {image.height} pixels, and would have {size[0]:,} x {size[1]:,} after this"
            f" model's resizing; at most {MAX_RESIZED:,} pixels are made: cut the image"
        )
    return image.resize(size, resample=resample)


def _check_size(where: str, size: tuple[int, int]) -> None:
    """Raise RequestError for a size that takes too much memory. Tables of a resize grow with the longer side."""
    width, height = size
    if not 1 <= width * height <= MAX_PIXELS:
        raise RequestError(_too_large(where, f"{width} x {height} = {width * height:,}"))
    if max(size) > MAX_RATIO * min(size):
        raise RequestError(
            f"{where} has {width} x {height} pixels; one side may be {MAX_RATIO} times as long as the other: cut it"
        )


def _check_tiles(where: str, image: Any) -> None:
    """Raise RequestError if a tile of a TIFF file is much larger than the image, because a tile is decoded as a
    whole."""
    sides = [image.tag_v2.get(tag, 1) for tag in _TILE_SIDES]
    if not all(isinstance(side, int) and side >= 0 for side in sides):
        raise RequestError(f"{where} has tiles without a size; {_HINT}")
    if math.prod(sides) > max(_MOST_TILE_PIXELS, 2 * math.prod(image.size)):
        raise RequestError(
            f"{where} has tiles of {sides[0]:,} x {sides[1]:,} pixels for an image of {image.size[0]:,} x"
            f" {image.size[1]:,}; save it without tiles"
        )


def _scale_key(where: str, image: Any) -> None:
    """Convert the colour that a PNG file declares as transparent to the range of Pillow's pixels: a file with 2 or 4
    bits per pixel declares a number of 2 or 4 bits.

    Raises RequestError for a colour of 16 bits per channel. Pillow reads 8 of these bits, so other colours than the
    declared one would become transparent, too.
    """
    depth = image.tile[0][3] if image.tile else ""
    key = image.info.get("transparency")
    if depth in _FACTORS and isinstance(key, int):
        factor = _FACTORS[depth]
        image.info["transparency"] = key % (255 // factor + 1) * factor
    elif depth == "RGB;16B" and key is not None:
        raise RequestError(
            f"{where} has 16 bits per channel and one transparent colour, which is not read; save it with an alpha"
            " channel (RGBA)"
        )


def _on_white(image: Any) -> Any:
    """A loaded image as RGB of 8 bits, in front of a white background."""
    key = image.info.get("transparency")
    if image.mode in _DEEP:
        found = _scaled(image)
        if isinstance(key, int) and image.mode != "F":
            found.paste(255, mask=_equal(image, key))
        return found.convert("RGB")
    if not _is_transparent(image, key):
        if key is not None:  # it belongs to another mode, and Pillow cannot convert it
            image = image.copy()
            del image.info["transparency"]
        return image.convert("RGB")
    pillow, (width, height) = need_pillow(), image.size
    found = pillow.new("RGB", image.size)
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):  # in strips, because whole images in RGBA would take three times the memory
        strip = image.crop((0, top, width, min(top + rows, height)))
        if strip.mode == "La":
            strip = strip.convert("LA")
        strip = strip.convert("RGBA")
        white = pillow.new("RGBA", strip.size, "white")
        found.paste(pillow.alpha_composite(white, strip).convert("RGB"), (0, top))
    return found


def _is_transparent(image: Any, key: Any) -> bool:
    """Whether an image has an alpha channel, a palette with one, or the transparent colour ``key``. A key whose type
    does not belong to the mode is left over from a conversion, and has no meaning."""
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA"):
        return True
    if image.mode == "P":
        return isinstance(key, (int, bytes)) or image.palette.mode.endswith("A")
    if image.mode == "RGB":
        return isinstance(key, tuple) and len(key) == 3
    return image.mode in ("1", "L") and isinstance(key, int)


def _equal(image: Any, key: int) -> Any:
    """Mask of the pixels of an image with 16 bits per pixel that have the value ``key``."""
    import numpy as np

    return need_pillow().fromarray((np.asarray(image) == key).astype(np.uint8) * 255)


def _scaled(image: Any) -> Any:
    """An image with 16 bits per pixel, reduced to 8 bits: the high byte of each value."""
    import numpy as np

    values = np.asarray(image)
    if values.dtype.kind == "f" or int(values.max()) > 0xFFFF or int(values.min()) < 0:
        raise ValueError("32-bit pixels have no agreed range")
    return need_pillow().fromarray((values >> 8).astype(np.uint8))


def _too_large(where: str, what: str) -> str:
    return f"{where} has {what} pixels; an image may have 1 to {MAX_PIXELS:,}: make it smaller"


def need_pillow() -> Any:
    """The module ``PIL.Image``. Raises RequestError if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise RequestError("images need Pillow, which is not installed: pip install 'chairlift[vision]'") from None
    return Image
