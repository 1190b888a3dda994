"""Files of every format, mode, kind of transparency and orientation give each family the pixels of its processor in
transformers. Transparent pixels show white."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from chairlift.errors import RequestError
from chairlift.models.vision.decode import decode_image, to_rgb
from tests.models.vision.tiny import picture

WIDTH, HEIGHT = 12, 9


def coloured() -> Image.Image:
    return picture(1, WIDTH, HEIGHT)


def alpha() -> Image.Image:
    """Transparent, opaque and many values between."""
    values = np.linspace(0, 255, WIDTH * HEIGHT).astype(np.uint8).reshape(HEIGHT, WIDTH)
    return Image.fromarray(values)


def with_alpha(mode: str = "RGBA") -> Image.Image:
    image = coloured().convert("RGB" if mode == "RGBA" else "L")
    image.putalpha(alpha())
    return image


def palette() -> Image.Image:
    return coloured().quantize(8)


def saved(image: Image.Image, kind: str, orientation: int = 0, **options: Any) -> bytes:
    if orientation:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(depth: int, colour: int, rows: np.ndarray[Any, Any], key: bytes = b"") -> bytes:
    """A PNG file with rows of packed bytes, and with the chunk tRNS if ``key`` is given."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    width = rows.shape[1] * 8 // depth // {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, len(rows), depth, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + head + (chunk(b"tRNS", key) if key else b"") + body + chunk(b"IEND", b"")


BYTES = np.random.default_rng(5).integers(0, 256, (HEIGHT, 8 * WIDTH), dtype=np.uint8)
DEEP = np.arange(HEIGHT * WIDTH, dtype=np.uint16).reshape(HEIGHT, WIDTH) * 601

FILES: dict[str, Callable[[], bytes]] = {
    **{f"png {mode}": lambda mode=mode: saved(coloured().convert(mode), "PNG") for mode in ("1", "L", "P", "RGB")},
    "png 1 key": lambda: saved(coloured().convert("1"), "PNG", transparency=0),
    "png L key": lambda: saved(coloured().convert("L"), "PNG", transparency=coloured().convert("L").getpixel((3, 3))),
    "png RGB key": lambda: saved(coloured(), "PNG", transparency=coloured().getpixel((3, 3))),
    "png P index": lambda: saved(palette(), "PNG", transparency=palette().getpixel((3, 3))),
    "png P bytes": lambda: saved(palette(), "PNG", transparency=bytes(range(0, 240, 30))),
    "png P bytes, turned": lambda: saved(palette(), "PNG", 6, transparency=bytes(range(0, 240, 30))),
    "png P, two colours": lambda: saved(coloured().quantize(2), "PNG", transparency=b"\x40\xc0"),
    "png LA": lambda: saved(with_alpha("LA"), "PNG"),
    "png RGBA": lambda: saved(with_alpha(), "PNG"),
    "png RGBA, turned": lambda: saved(with_alpha(), "PNG", 7),
    "png RGBA, transparent": lambda: saved(Image.new("RGBA", (WIDTH, HEIGHT), (10, 20, 30, 0)), "PNG"),
    "png RGBA of 16 bits": lambda: png(16, 6, BYTES),
    "png LA of 16 bits": lambda: png(16, 4, BYTES),
    "png RGB of 16 bits": lambda: png(16, 2, BYTES[:, : 6 * WIDTH]),
    "png L of 4 bits": lambda: png(4, 0, BYTES[:, : WIDTH // 2]),
    **{f"jpeg {mode}": lambda mode=mode: saved(coloured().convert(mode), "JPEG") for mode in ("L", "RGB", "CMYK")},
    **{f"jpeg RGB, turned {turn}": lambda turn=turn: saved(coloured(), "JPEG", turn) for turn in range(1, 9)},
    "webp RGB": lambda: saved(coloured(), "WEBP", lossless=True),
    "webp RGBA": lambda: saved(with_alpha(), "WEBP", lossless=True, exact=True),
    "webp RGBA, lossy": lambda: saved(with_alpha(), "WEBP", quality=40),
    "webp RGBA, turned": lambda: saved(with_alpha(), "WEBP", 8, lossless=True),
    "gif P": lambda: saved(palette(), "GIF"),
    "gif L": lambda: saved(coloured().convert("L"), "GIF"),
    "gif P index": lambda: saved(palette(), "GIF", transparency=palette().getpixel((3, 3))),
    "gif P index, in rows": lambda: saved(palette(), "GIF", transparency=2, interlace=0),
    **{f"bmp {mode}": lambda mode=mode: saved(coloured().convert(mode), "BMP") for mode in ("1", "L", "P", "RGB")},
    "bmp RGBA": lambda: saved(with_alpha(), "BMP"),
    **{f"tiff {mode}": lambda mode=mode: saved(coloured().convert(mode), "TIFF") for mode in ("1", "L", "P", "CMYK")},
    "tiff LA": lambda: saved(with_alpha("LA"), "TIFF"),
    "tiff RGBA": lambda: saved(with_alpha(), "TIFF"),
    "tiff RGBA, packed": lambda: saved(with_alpha(), "TIFF", compression="tiff_lzw"),
    "tiff RGBA, turned": lambda: saved(with_alpha(), "TIFF", 5),
}


def _theirs(kind: type[Any], image: Image.Image, **settings: Any) -> np.ndarray[Any, Any]:
    return np.asarray(kind(do_rescale=False, do_normalize=False, **settings)([image], return_tensors="np").pixel_values)


FAMILIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llava": (CLIPImageProcessorPil, {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}),
    "gemma3": (Gemma3ImageProcessorPil, {"size": {"height": 16, "width": 16}}),
    "idefics3": (Idefics3ImageProcessorPil, {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}),
    "qwen": (Qwen2VLImageProcessorPil, {"size": {"shortest_edge": 64, "longest_edge": 4096}, "patch_size": 4}),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_each_family_the_pixels_of_transformers(name: str) -> None:
    """Their processors get the image turned upright, as from their ``load_image``."""
    data = FILES[name]()
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    ours = decode_image("it", data)
    assert ours.mode == "RGB"
    for family, (kind, settings) in FAMILIES.items():
        assert np.array_equal(_theirs(kind, ours, **settings), _theirs(kind, upright, **settings)), family


def white_where(mask: np.ndarray[Any, Any], grey: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.repeat(np.where(mask, 255, grey)[..., None], 3, axis=2)


@pytest.mark.parametrize("depth", [2, 4])
def test_a_transparent_grey_of_few_bits_is_white(depth: int) -> None:
    """Transformers shows it as it is, because Pillow compares the number in the file with pixels of 8 bits."""
    packed = BYTES[:, : WIDTH * depth // 8]
    shifts = range(8 - depth, -1, -depth)
    values = np.stack([packed >> shift & (1 << depth) - 1 for shift in shifts], axis=2).reshape(HEIGHT, WIDTH)
    found = decode_image("it", png(depth, 0, packed, struct.pack(">H", 2)))
    assert np.array_equal(np.asarray(found), white_where(values == 2, values * (255 // ((1 << depth) - 1))))


def test_a_transparent_grey_of_16_bits_is_white() -> None:
    """Transformers shows every value above 255 as white, with or without transparency."""
    data = png(16, 0, DEEP.astype(">u2").view(np.uint8), struct.pack(">H", DEEP[4, 4]))
    assert np.array_equal(np.asarray(decode_image("it", data)), white_where(DEEP[4, 4] == DEEP, DEEP >> 8))


def test_a_transparent_colour_of_16_bits_is_refused() -> None:
    """Pillow drops the low bits, so other colours would become transparent, too."""
    data = png(16, 2, BYTES[:, : 6 * WIDTH], BYTES[0, :6].tobytes())
    with pytest.raises(RequestError, match=r"16 bits per channel and one transparent colour.*save it with an alpha"):
        decode_image("it", data)


def test_images_of_pillow_are_white_where_they_are_transparent() -> None:
    """Modes that no file has. Transformers shows them as they are, or refuses them."""
    expected = np.asarray(to_rgb("it", with_alpha()))
    premultiplied = np.asarray(to_rgb("it", with_alpha().convert("RGBa")))
    solid = np.asarray(alpha()) > 64  # fewer bits of colour remain below
    assert np.abs(premultiplied.astype(int) - expected)[solid].max() <= 3
    grey = np.asarray(to_rgb("it", with_alpha("LA").convert("La")))
    assert np.abs(grey.astype(int) - np.asarray(to_rgb("it", with_alpha("LA"))))[solid].max() <= 3
    indexed = palette().convert("PA")
    indexed.putalpha(alpha())
    assert np.array_equal(np.asarray(to_rgb("it", indexed)), np.asarray(to_rgb("it", indexed.convert("RGBA"))))
    colours = Image.new("P", (2, 1))
    colours.putpalette([10, 20, 30, 0, 40, 50, 60, 255], "RGBA")
    colours.putpixel((1, 0), 1)
    assert np.asarray(to_rgb("it", colours)).tolist() == [[[255] * 3, [40, 50, 60]]]


def test_a_transparent_colour_that_is_left_over_has_no_meaning() -> None:
    for mode, key in (("RGB", 3), ("RGB", b"\0\1"), ("L", (1, 2, 3)), ("CMYK", 0), ("YCbCr", (1, 2, 3))):
        image = coloured().convert(mode)
        image.info["transparency"] = key
        assert np.array_equal(np.asarray(to_rgb("it", image)), np.asarray(coloured().convert(mode).convert("RGB")))
        assert image.info["transparency"] == key


def test_large_images_are_the_same_in_every_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.asarray(to_rgb("it", with_alpha()))
    monkeypatch.setattr("chairlift.models.vision.decode._STRIP_PIXELS", 2 * WIDTH + 1)
    assert np.array_equal(np.asarray(to_rgb("it", with_alpha())), whole)
