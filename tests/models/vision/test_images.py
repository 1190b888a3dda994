"""Images of strangers give the right pixels or a clear error, and tiles are those of transformers."""

from __future__ import annotations

import base64
import io
import re
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from chairlift.base.image_spans import ImageSpan, marks
from chairlift.engine.input_processor import images_of
from chairlift.errors import ConfigError, ModelLoadError, RequestError
from chairlift.models.formats.quantize.run import quantize_model
from chairlift.models.vision.chats import prepare_images, take_images
from chairlift.models.vision.decode import MAX_PIXELS, decode_image, from_data_url, to_rgb
from chairlift.models.vision.processor import place_images
from chairlift.models.vision.tiles import TileProcessor, TileSettings
from chairlift.models.vision.vision_files import read_processor
from tests.models.vision.tiny import ROWS, SIZE, picture, tiny_tokenizer, tiny_vlm


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(image: Image.Image) -> list[Any]:
    return np.asarray(image).tolist()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "WEBP"])
def test_formats_without_loss_give_their_pixels(kind: str) -> None:
    image = picture(1, 7, 5).quantize(8).convert("RGB")
    options = {"lossless": True} if kind == "WEBP" else {}
    assert pixels(decode_image("it", file_of(image, kind, **options))) == pixels(image)


def test_jpeg_is_upright_as_its_exif_data_says() -> None:
    image = Image.new("RGB", (16, 8), "red")
    image.paste("blue", (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    found = decode_image("it", file_of(image, "JPEG", quality=95, subsampling=0, exif=exif))
    assert found.size == (8, 16)
    top, bottom = found.getpixel((4, 3)), found.getpixel((4, 12))
    assert top[2] > 200 > top[0] and bottom[0] > 200 > bottom[2]


def test_other_modes_become_rgb() -> None:
    cmyk = Image.new("CMYK", (4, 4), (0, 255, 255, 0))
    red = decode_image("it", file_of(cmyk, "JPEG", quality=100)).getpixel((1, 1))
    assert red[0] > 200 and max(red[1:]) < 60
    deep = Image.fromarray(np.array([[0, 256, 0x7FFF, 0xFFFF]], dtype=np.uint16))
    assert pixels(decode_image("it", file_of(deep))) == [[[0] * 3, [1] * 3, [127] * 3, [255] * 3]]
    palette = picture(2, 6, 6).quantize(4)
    assert pixels(to_rgb("it", palette)) == pixels(palette.convert("RGB"))
    for mode in ("L", "1", "LA", "RGBA"):
        assert to_rgb("it", Image.new(mode, (3, 2))).mode == "RGB"


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header announces more pixels than it has."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def many_pages() -> bytes:
    """A TIFF with 30,000 pages of one pixel, which take seconds to count."""
    tags = [(256, 1), (257, 1), (258, 8), (259, 1), (262, 1), (273, 0), (277, 1), (278, 1), (279, 1)]
    found, size, count = bytearray(b"II*\0" + struct.pack("<I", 8)), 2 + 12 * len(tags) + 4, 30_000
    for page in range(count):
        found += struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        found += struct.pack("<I", 8 + (page + 1) * size if page + 1 < count else 0)
    return bytes(found)


def many_scans() -> bytes:
    """A JPEG of 36 million pixels whose last scan is repeated 10,000 times; decoding it would take minutes."""
    data = file_of(Image.new("L", (6000, 6000)), "JPEG", progressive=True, quality=10)
    begin = data.rindex(b"\xff\xda")
    return data[:-2] + data[begin:-2] * 10_000 + b"\xff\xd9"


def tall_tile(side: int = 16_384) -> bytes:
    """A TIFF of 16 x 16 pixels whose only tile has ``side`` x ``side``."""
    tile = zlib.compress(bytes(1 << 20))
    tags = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side), (324, 0)]
    tags += [(325, len(tile))]
    head = b"II*\0" + struct.pack("<IH", 8, len(tags))
    at = len(head) + 12 * len(tags) + 4
    rows = (struct.pack("<HHII", tag, 4, 1, at if tag == 324 else value) for tag, value in tags)
    return head + b"".join(rows) + bytes(4) + tile


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "no image that can be read"),
    "text": (lambda: b"<svg onload=alert(1)>", "no image that can be read"),
    "truncated": (lambda: file_of(picture(1, 200, 200))[:4000], "damaged or incomplete"),
    "truncated jpeg": (lambda: file_of(picture(1, 200, 200), "JPEG")[:4000], "damaged or incomplete"),
    "broken": (lambda: bomb(8, 8), "damaged or incomplete"),
    "bomb": (lambda: bomb(8_000, 8_000), "has 8000 x 8000 = 64,000,000 pixels; an image may have"),
    "larger bomb": (lambda: bomb(10_000, 10_000), "pixels; an image may have"),
    "large bomb": (lambda: bomb(60_000, 60_000), "pixels; an image may have"),
    "line": (lambda: bomb(30_000_000, 1), "one side may be 200 times as long as the other"),
    "column": (lambda: bomb(1, 30_000_000), "one side may be 200 times as long as the other"),
    "large tile": (tall_tile, "has tiles of 16,384 x 16,384 pixels for an image of 16 x 16; save it without tiles"),
    "many scans": (many_scans, "scans; a JPEG file may have 50"),
    "no pixels": (lambda: bomb(0, 5), "no image that can be read"),
    "other format": (lambda: file_of(picture(1), "PPM"), "no image that can be read"),
    "float": (lambda: file_of(Image.new("F", (4, 4), 0.5), "TIFF"), "no agreed range"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_with_the_reason(case: str) -> None:
    make, reason = BAD[case]
    data, begin = make(), time.process_time()
    with pytest.raises(RequestError, match=re.escape(reason)) as error:
        decode_image("messages[0].content[1].image_url.url", data)
    assert time.process_time() - begin < 2, "a small file takes long to refuse"
    assert str(error.value).startswith("messages[0].content[1].image_url.url")


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animated_files_give_their_first_frame(kind: str) -> None:
    frames = [picture(seed, 12, 8) for seed in range(3)]
    lossless = {"lossless": True} if kind == "WEBP" else {}
    data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **lossless)
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
    found = pixels(decode_image("it", data))
    assert found == pixels(load_image(Image.open(io.BytesIO(data))))
    assert kind == "GIF" or found == pixels(frames[0])


def test_the_first_of_many_pages_is_read_at_once() -> None:
    data, begin = many_pages(), time.process_time()
    assert decode_image("it", data).size == (1, 1)
    assert time.process_time() - begin < 2


@pytest.mark.filterwarnings("ignore:::PIL")
def test_every_truncated_file_is_refused_or_read() -> None:
    """Nothing but a RequestError comes out of the decoders."""
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        data = file_of(picture(3, 20, 20), kind)
        for end in range(0, len(data), 7):
            try:
                assert decode_image("it", data[:end]).mode == "RGB"
            except RequestError:
                continue


def test_large_files_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.models.vision.decode.MAX_BYTES", 100)
    with pytest.raises(RequestError, match="an image file may have 100"):
        decode_image("it", b"x" * 101)
    with pytest.raises(RequestError, match="an image file may have 100"):
        from_data_url("it", "data:image/png;base64," + "x" * 200)
    assert MAX_PIXELS < 100_000_000


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/cat.png",
        "https://example.com/cat.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "data:text/html;base64,PGI+",
        "data:image/svg+xml;base64,PHN2Zy8+",
        "data:image/png;base64," + " " * 100_000,
        "data:image/png;base64," + "A\n" * 50_000,
        "data:image/" + "a" * 100_000,
        "http://2130706433/cat.png",
        "http://[::ffff:127.0.0.1]/cat.png",
        "data:image/png,abc",
        "data:image/png;base64,***",
        "DATA:image/png;base64,AAA\n",
        "",
    ],
)
def test_only_data_urls_of_images_are_read(url: str) -> None:
    with pytest.raises(RequestError, match=r"^it (must be a data URL|is no valid base64|is no image)"):
        from_data_url("it", url)


def test_a_data_url_gives_its_image() -> None:
    image = picture(4, 5, 6)
    url = "data:image/png;base64," + base64.b64encode(file_of(image)).decode()
    assert pixels(from_data_url("it", url)) == pixels(image)


def test_images_are_taken_out_of_messages() -> None:
    image = picture(1)
    given: list[Any] = [
        {"role": "system", "content": "be kind"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
                {"type": "image", "image": image},
            ],
        },
    ]
    messages, images = take_images(given)
    assert messages[1]["content"] == [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}]
    where = "messages[1].content"
    assert images == [(f"{where}[1].image_url.url", "data:x"), (f"{where}[2].image", image)]
    assert given[1]["content"][2]["image"] is image, "the caller's messages were changed"
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]\.image_url\.url must be a data URL"):
        take_images([{"role": "user", "content": [{"type": "image_url", "image_url": {"file_id": 1}}]}])
    assert take_images("no list") == ("no list", [])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"type": "image_url"}, r"\.image_url\.url must be a data URL .*, got nothing$"),
        ({"type": "image_url", "image_url": {"url": 7}}, r"\.image_url\.url must be a data URL .*, got 7$"),
        (
            {"type": "image", "source": {}},
            r"\.image must be an image of Pillow, got nothing; over HTTP, send ",
        ),
        (
            {"type": "image", "image": {"url": "x"}},
            r"\.image must be .*, got \{'url': 'x'\}; over HTTP, send ",
        ),
        ({"type": "input_image", "image_url": "data:x"}, " has the type 'input_image'; send an image as .*'image_url'"),
        ({"type": "image_embeds"}, " has the type 'image_embeds'; send an image as .*'image_url'"),
    ],
)
def test_parts_of_other_forms_are_refused_with_the_form_to_send(given: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content\[0\]" + reason):
        take_images([{"role": "user", "content": [given]}])


def test_parts_of_vllm_are_images() -> None:
    image = picture(1)
    messages, images = take_images([{"role": "user", "content": [{"type": "image_pil", "image_pil": image}]}])
    assert messages[0]["content"] == [{"type": "image"}]
    assert images == [("messages[0].content[0].image_pil", image)]


def test_addresses_and_base64_are_refused_with_what_helps() -> None:
    with pytest.raises(RequestError, match=r"send the image itself, or have the server started with --allowed-media-"):
        from_data_url("it", "HTTPS://example.com/cat.png")
    with pytest.raises(RequestError, match=r"or have the server started with --allowed-local-media-path DIRECTORY$"):
        from_data_url("it", "file:///cat.png")
    with pytest.raises(RequestError, match=r"send the image itself$"):
        from_data_url("it", "/cat.png")
    lines = base64.encodebytes(file_of(picture(1, 30, 30))).decode()
    with pytest.raises(RequestError, match=r"encode the whole file with the standard alphabet .*without line breaks"):
        from_data_url("it", "data:image/png;base64," + lines)


@pytest.mark.parametrize("empty", [None, {}, {"image": []}])
def test_a_prompt_without_images_may_have_the_key_for_them(empty: Any) -> None:
    assert images_of({"prompt": "Hi", "multi_modal_data": empty}) == ([], {"prompt": "Hi"})


def test_other_data_than_images_are_named() -> None:
    with pytest.raises(RequestError, match=r"must be \{'image': .*\}, got 'image', 'audio'"):
        images_of({"prompt": "Hi", "multi_modal_data": {"image": picture(1), "audio": 1}})
    with pytest.raises(RequestError, match=r"must be \{'image': .*\}, got list"):
        images_of({"prompt": "Hi", "multi_modal_data": [picture(1)]})


def test_images_are_counted_before_the_first_is_decoded() -> None:
    processor = TileProcessor(settings(), tiny_tokenizer(), Path("model"))
    with pytest.raises(RequestError, match="the messages have 65 images; at most 64 are read"):
        prepare_images(processor, [("it", "data:image/png;base64,broken")] * 65)


def test_the_pixels_of_all_files_of_a_request_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes unpack to 40 million pixels. Images that a local caller has decoded do not count."""
    processor = TileProcessor(settings(), tiny_tokenizer(), Path("model"))
    url = "data:image/png;base64," + base64.b64encode(file_of(picture(1, 20, 5))).decode()
    images = [(f"messages[0].content[{place}]", url) for place in range(5)]
    monkeypatch.setattr("chairlift.models.vision.chats.MOST_PIXELS", 400)
    assert len(prepare_images(processor, images[:4])) == 4
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content\[4\] makes 500 pixels.* may have 400"):
        prepare_images(processor, [*images, ("not reached", "data:image/png;base64,broken")])
    assert len(prepare_images(processor, [("it", picture(1, 20, 20))] * 2)) == 2


def settings(**given: Any) -> TileSettings:
    marker = tiny_tokenizer().encode("<image>", False)[0]
    usual = {"longest_edge": 2 * SIZE, "resample": 1, "splits": True, "rows_per_tile": ROWS, "image_token_id": marker}
    return TileSettings(tile_size=SIZE, **{**usual, **given})


SIZES = [(1, 1), (8, 5), (32, 32), (33, 32), (64, 64), (70, 50), (50, 70), (500, 3), (3, 500), (97, 96), (1000, 700)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
def test_tiles_are_those_of_transformers(size: tuple[int, int], kind: Any) -> None:
    for longest, resample, splits in ((2 * SIZE, 1, True), (3 * SIZE, 3, True), (2 * SIZE, 1, False)):
        image = picture(1, *size)
        theirs = kind(
            size={"longest_edge": longest},
            max_image_size={"longest_edge": SIZE},
            resample=resample,
            do_image_splitting=splits,
            do_rescale=False,
            do_normalize=False,
        )([[image]], return_row_col_info=True, return_tensors="np")
        asked = settings(longest_edge=longest, resample=resample, splits=splits)
        ours = TileProcessor(asked, tiny_tokenizer(), Path("model")).prepare("it", image)
        tiles = np.stack([np.frombuffer(tile.pixels, np.uint8).reshape(3, SIZE, SIZE) for tile in ours.tiles])
        assert (ours.rows, ours.columns) == (theirs["rows"][0][0], theirs["cols"][0][0])
        assert np.array_equal(tiles, theirs["pixel_values"][0])


def test_markers_and_images_must_be_as_many() -> None:
    processor = TileProcessor(settings(), tiny_tokenizer(), Path("model"))
    marker = processor.settings.image_token_id
    with pytest.raises(RequestError, match=r"has 2 places for images .* and 1 images were sent"):
        place_images(processor, [marker, 5, marker], [picture(1)])
    with pytest.raises(RequestError, match=r"has 1 places .* 2 images were sent; it must have one .* chat templates"):
        place_images(processor, [marker, 5], [picture(1), picture(2)])
    with pytest.raises(RequestError, match="reads no images"):
        place_images(None, [marker], [picture(1)])
    with pytest.raises(RequestError, match="at most 64"):
        place_images(processor, [marker] * 65, [picture(1)] * 65)
    with pytest.raises(RequestError, match=r"image 0 must be an image of Pillow .* got str; make one with"):
        place_images(processor, [marker], ["/etc/passwd"])


def test_spans_name_exactly_the_placeholders() -> None:
    processor = TileProcessor(settings(), tiny_tokenizer(), Path("model"))
    marker = processor.settings.image_token_id
    prompt, placed = place_images(processor, [7, marker, 8, marker], [picture(1, 70, 50), picture(2, 8, 8)])
    places = [place for span in placed.spans for place in range(span.position, span.end)]
    assert places == [place for place, token in enumerate(prompt) if token == marker]
    assert {span.key for span in placed.spans} == {tile.key for tile in placed.tiles}


def test_marks_tell_images_and_places_apart() -> None:
    key, other = b"a" * 32, b"b" * 32
    spans = [ImageSpan(4, 4, key), ImageSpan(10, 4, key)]
    assert marks(spans, 0, 4) == b""
    assert marks(spans, 0, 5) == marks(spans, 7, 10) != marks(spans, 10, 14)
    assert marks(spans, 7, 11) == marks(spans, 0, 5) + marks(spans, 10, 14)
    variants = [spans, [ImageSpan(4, 4, other), spans[1]], [ImageSpan(5, 4, key), spans[1]], [ImageSpan(4, 3, key)]]
    assert len({marks(each, 6, 12) for each in variants}) == 4


def test_files_that_do_not_fit_the_encoder_are_refused(tmp_path: Path) -> None:
    wrong = tiny_vlm(tmp_path / "size", max_image_size={"longest_edge": 2 * SIZE})
    with pytest.raises(ModelLoadError, match="max_image_size is 64, but the encoder takes 32"):
        read_processor(wrong, tiny_tokenizer())
    (wrong / "preprocessor_config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no preprocessor_config\.json"):
        read_processor(wrong, tiny_tokenizer())


def test_writing_the_model_without_its_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reads images, and its encoder cannot be written"):
        quantize_model(tiny_vlm(tmp_path / "model"), tmp_path / "out", "int8")
