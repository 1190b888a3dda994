"""Small image files that ask for much memory or time."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from PIL import Image

__all__ = ["ATTACKS", "png", "tiff"]


def png(width: int, height: int, rows: bytes, *chunks: tuple[bytes, bytes], colour: int = 2) -> bytes:
    """A PNG file of 8 bits per channel. ``rows`` are compressed rows, and ``chunks`` come before them."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
    more = b"".join(chunk(kind, body) for kind, body in chunks)
    return b"\x89PNG\r\n\x1a\n" + head + more + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def tiff(tags: Sequence[tuple[int, int, int, int]], data: bytes) -> bytes:
    """A TIFF file. Tags are (number, type, count, value); a negative value becomes the place of ``data``."""
    head = b"II*\0" + struct.pack("<IH", 8, len(tags))
    place = len(head) + 12 * len(tags) + 4
    rows = (struct.pack("<HHII", tag, kind, count, place if value < 0 else value) for tag, kind, count, value in tags)
    return head + b"".join(rows) + bytes(4) + data


def _page(width: int, height: int, compression: int = 1) -> list[tuple[int, int, int, int]]:
    return [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, compression), (262, 3, 1, 1)]


def _tiles(width: int, height: int, tile: int) -> bytes:
    """A TIFF of one tile, which is larger than the page."""
    body = zlib.compress(bytes(1 << 20))
    tags = [(277, 3, 1, 1), (322, 4, 1, tile), (323, 4, 1, tile), (324, 4, 1, -1), (325, 4, 1, len(body))]
    return tiff(_page(width, height, 8) + tags, body)


def _shared_tags(count: int, size: int) -> bytes:
    """A TIFF directory whose tags all name the same bytes. A reader copies them for each tag."""
    tags = [*_page(16, 16), (273, 4, 1, -1), (277, 3, 1, 1), (278, 4, 1, 16), (279, 4, 1, 256)]
    return tiff(tags + [(1000 + tag, 1, size, -1) for tag in range(count)], bytes(size))


def _many_strips(count: int) -> bytes:
    """A TIFF with a strip for each row, and with a million rows."""
    tags = [(273, 4, count, -1), (277, 3, 1, 1), (278, 4, 1, 1), (279, 4, count, -1)]
    return tiff(_page(5000, count) + tags, b"\x08\0\0\0" * count)


def _samples(count: int) -> bytes:
    tags = [(256, 4, 1, 64), (257, 4, 1, 64), (258, 3, count, -1), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, 8)]
    return tiff([*tags, (277, 3, 1, count), (279, 4, 1, 64)], b"\x10\0" * count)


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _many_scans(count: int) -> bytes:
    """A JPEG of 36 million pixels whose last scan is repeated."""
    data = _saved(Image.new("L", (6000, 6000)), "JPEG", progressive=True, quality=10)
    begin = data.rindex(b"\xff\xda")
    return data[:-2] + data[begin:-2] * count + b"\xff\xd9"


def _exif_in_jpeg() -> bytes:
    tags = [(1000 + tag, 1, 60_000, 8) for tag in range(4_000)]
    data = _saved(Image.new("RGB", (64, 64)), "JPEG")
    body = b"Exif\0\0" + tiff(tags, bytes(12_000))
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + data[2:]


def _rows(width: int, height: int, channels: int = 3) -> bytes:
    packer, row = zlib.compressobj(9), bytes(1 + channels * width)
    return b"".join(packer.compress(row) for _ in range(height)) + packer.flush()


@functools.cache
def _big() -> bytes:
    """500 MB of zeros, compressed."""
    packer, piece = zlib.compressobj(9), bytes(1 << 20)
    return b"".join(packer.compress(piece) for _ in range(500)) + packer.flush()


_HEAD: Final = struct.Struct("<2sIHHIIiiHHIIiiII")


def _bmp(width: int, height: int, compression: int, body: bytes) -> bytes:
    return _HEAD.pack(b"BM", 0, 0, 0, 54, 40, width, height, 1, 8, compression, 0, 0, 0, 256, 0) + body


def _webp_canvas(width: int, height: int) -> bytes:
    """A WebP file of 8 x 8 pixels whose header names a larger canvas."""
    inner = _saved(Image.new("RGB", (8, 8)), "WEBP", lossless=True)[12:]
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + sides + inner
    return b"RIFF" + struct.pack("<I", len(body)) + body


ATTACKS: dict[str, Callable[[], bytes]] = {
    "line": lambda: png(30_000_000, 1, zlib.compress(bytes(1 << 20))),
    "column": lambda: png(1, 30_000_000, zlib.compress(bytes(1 << 20))),
    "long": lambda: png(80_000, 400, _rows(80_000, 400)),
    "large": lambda: png(8000, 5000, _rows(8000, 5000)),
    "large with alpha, turned": lambda: png(
        8000, 5000, _rows(8000, 5000, 4), (b"eXIf", tiff([(0x0112, 3, 1, 6)], b"")), colour=6
    ),
    "announced only": lambda: png(8000, 5000, zlib.compress(b"")),
    "announced only, 5 MB": lambda: png(1500, 1000, zlib.compress(b"")),
    "more rows than announced": lambda: png(64, 64, _big()),
    "long text": lambda: png(64, 64, _rows(64, 64), *[(b"zTXt", b"a\0\0" + _big())] * 20),
    "texts": lambda: png(64, 64, _rows(64, 64), *[(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 20)))] * 90),
    "profile": lambda: png(64, 64, _rows(64, 64), (b"iCCP", b"a\0\0" + _big())),
    "many chunks": lambda: png(64, 64, _rows(64, 64), *[(b"teSt", b"")] * 2_600_000),
    "tags in exif": lambda: png(
        64,
        64,
        _rows(64, 64),
        (b"eXIf", _shared_tags(3000, 1 << 20)),
        (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + b"a" * 9),
    ),
    "exif in jpeg": _exif_in_jpeg,
    "scans": lambda: _many_scans(40),
    "tile": lambda: _tiles(16, 16, 16_384),
    "tile of a page": lambda: _tiles(2000, 2000, 2800),
    "shared tags": lambda: _shared_tags(3000, 3 << 19),
    "strips": lambda: _many_strips(8000),
    "samples": lambda: _samples(6),
    "too many samples": lambda: _samples(60_000),
    "bmp announced only": lambda: _bmp(8000, 5000, 0, b""),
    "bmp in runs": lambda: _bmp(8000, 5000, 1, b"\xff\x01" * 1000),
    "bmp palette": lambda: _HEAD.pack(b"BM", 0, 0, 0, 54, 40, 8, 8, 1, 8, 0, 0, 0, 0, 0xFFFFFFFF, 0) + bytes(2000),
    "gif with comments": lambda: _saved(Image.new("P", (64, 64)), "GIF")[:-1] + b"\x21\xfe\x01a\0" * 2_000_000 + b";",
    "gif frame outside": lambda: _saved(Image.new("P", (8, 8)), "GIF").replace(
        b",\0\0\0\0\x08\0\x08\0", b",\0\0\0\0\xff\xff\xff\xff"
    ),
    "webp": lambda: _saved(Image.new("RGBA", (16_000, 2500)), "WEBP", lossless=True, method=0),
    "webp, other canvas": lambda: _webp_canvas(8000, 5000),
    "webp, huge canvas": lambda: _webp_canvas(1 << 14, 1 << 14),
}
"""Name -> function that makes the file."""
