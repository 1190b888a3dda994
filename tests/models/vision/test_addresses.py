"""Images at addresses: those of named hosts and folders are read, everything else is refused before it is reached."""

from __future__ import annotations

import asyncio
import dataclasses
import http.server
import io
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from chairlift.config import ServerConfig
from chairlift.errors import ConfigError, RequestError
from chairlift.models.vision.addresses import MediaSource, is_public
from chairlift.models.vision.chats import MOST_ADDRESSES, ImageBudget, fetch_images
from chairlift.models.vision.decode import MAX_BYTES, decode_image
from chairlift.models.vision.processor import PreparedImage
from chairlift.models.vision.tiles import TileProcessor
from tests.models.vision.test_images import settings
from tests.models.vision.tiny import picture, tiny_tokenizer

IMAGE = picture(1, 7, 5)


def file_of(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


class Site:
    """A web server on loopback. Tests give its port another host name, which resolves to loopback."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.left, self.asked = threading.Event(), list[str]()
        self.begun = False
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.paths.append(f"{self.headers['Host']}{self.path}")
                site.answer(self)

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]

    def answer(self, to: http.server.BaseHTTPRequestHandler) -> None:
        name = to.path.lstrip("/").partition("?")[0]
        if name.startswith("to="):
            to.send_response(302)
            to.send_header("Location", name.removeprefix("to=").replace("PORT", str(self.port)))
            to.end_headers()
        elif name == "slow.png":
            to.send_response(200)
            to.end_headers()
            to.wfile.write(file_of(IMAGE)[:20])
            to.wfile.flush()
            self.left.wait(60)  # until the test has ended
        elif name.startswith("drip"):
            self.drip(to, name)
        elif name == "headers.png":
            try:
                while not self.left.wait(0.01):
                    to.wfile.write(b"HTTP/1.1 200 OK\r\n" if not self.begun else b"X: y\r\n")
                    self.begun = True
            except OSError:
                self.left.set()
        elif name == "huge.png":
            to.send_response(200)
            to.end_headers()
            try:
                for _ in range(MAX_BYTES // (1 << 20) + 2):
                    to.wfile.write(b"x" * (1 << 20))
            except OSError:
                self.left.set()
        elif name == "short.png":
            to.send_response(200)
            to.send_header("Content-Length", "1000000")
            to.end_headers()
            to.wfile.write(file_of(IMAGE))
        elif name in ("cat.png", "page.html"):
            to.send_response(200)
            to.end_headers()
            to.wfile.write(file_of(IMAGE) if name == "cat.png" else b"<html>")
        else:
            to.send_error(404)

    def drip(self, to: http.server.BaseHTTPRequestHandler, name: str) -> None:
        """An image, a byte each 10 ms, for three seconds: a byte always comes before a time limit per read."""
        old, close, chunks = (each in name for each in ("old", "close", "chunks"))
        head = f"HTTP/1.{0 if old else 1} 200 OK\r\n" + "Connection: close\r\n" * close
        head += "Transfer-Encoding: chunked\r\n" if chunks else "Content-Length: 1000\r\n" * (not old)
        to.close_connection = True
        try:
            to.wfile.write(head.encode() + b"\r\n")
            for _ in range(300):
                to.wfile.write(b"1\r\nx\r\n" if chunks else b"x")
                if self.left.wait(0.01):
                    break
        except OSError:
            return

    def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return ["127.0.0.1"]


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    thread = threading.Thread(target=site.server.serve_forever, args=(0.01,))
    thread.start()
    yield site
    site.left.set()
    site.server.shutdown()
    thread.join()
    site.server.server_close()


def source(site: Site, *domains: str, seconds: float = 30.0) -> MediaSource:
    named = domains or ("images.example",)
    return MediaSource(named, None, seconds=seconds, resolve=site.resolve, public=lambda address: True)


PROCESSOR = TileProcessor(settings(), tiny_tokenizer(), Path("model"))


async def fetched(messages: Sequence[Any], reader: MediaSource) -> list[Any]:
    async def prepare(where: str, data: str | bytes) -> PreparedImage:
        assert isinstance(data, bytes)
        image = decode_image(where, data)
        return dataclasses.replace(PROCESSOR.prepare(where, image), file_pixels=image.width * image.height)

    return await fetch_images(messages, reader, prepare, ImageBudget(PROCESSOR))


def with_images(messages: Sequence[Any], reader: MediaSource) -> list[Any]:
    return asyncio.run(fetched(messages, reader))


def image_at(reader: MediaSource, url: str) -> Image.Image:
    image: Image.Image = decode_image("it", reader.read("it", url))
    return image


def test_an_image_of_a_named_host_is_read(site: Site) -> None:
    reader = source(site)
    assert reader.reads("http://x") and reader.reads("HTTPS://x")
    assert not reader.reads("file:///x") and not reader.reads("data:image/png;base64,") and not reader.reads("ftp://x")
    for host in ("images.example", "IMAGES.example", "images.example."):
        found = image_at(reader, f"http://{host}:{site.port}/cat.png?size=1#top")
        assert np.array_equal(np.asarray(found), np.asarray(IMAGE))
    assert {each.partition(":")[2] for each in site.paths} == {f"{site.port}/cat.png?size=1"}


def test_the_address_that_was_checked_is_the_one_that_is_reached(site: Site) -> None:
    """A name service that answers otherwise the second time (DNS rebinding) gains nothing: it is asked once."""
    source(site).read("it", f"http://images.example:{site.port}/cat.png")
    assert site.asked == ["images.example"]


def test_private_addresses_are_refused_before_a_connection(site: Site) -> None:
    for addresses in (["127.0.0.1"], ["93.184.215.14", "10.0.0.1"], ["::ffff:127.0.0.1"], []):
        reader = MediaSource(["images.example"], None, resolve=lambda host, port, found=addresses: found)  # type: ignore[misc]
        with pytest.raises(RequestError, match="has a private address, which is not read"):
            reader.read("it", f"http://images.example:{site.port}/cat.png")
    for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        name = f"[{host}]" if ":" in host else host
        with pytest.raises(RequestError, match="has a private address"):
            MediaSource([host], None).read("it", f"http://{name}:{site.port}/cat.png")
    assert site.paths == []


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        *((each, False) for each in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254")),
        *((each, False) for each in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1")),
        *((each, False) for each in ("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1")),
        *((each, False) for each in ("64:ff9b::a00:1", "2002:a00:1::", "2001:0:a00:1::", "::ffff:8.8.8.8")),
    ],
)
def test_only_public_addresses_count_as_public(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("to=/cat.png", ""),
        ("to=http://images.example:PORT/to=/cat.png", ""),
        ("to=http://internal:PORT/cat.png", "is on 'internal', but images are read from images.example only"),
        ("to=file:///etc/passwd", "leads to an address of 'file'"),
        ("to=http://user@images.example:PORT/cat.png", "names of users"),
        ("to=/to=/to=/to=/cat.png", "redirected more than 3 times"),
        ("to=http://[::1", "was redirected to what is no address"),
        ("to=http://images.example:x/", "is no address of an image"),
    ],
)
def test_redirects_are_checked_like_the_first_address(site: Site, path: str, reason: str) -> None:
    url = f"http://images.example:{site.port}/{path}"
    if not reason:
        assert image_at(source(site), url).size == IMAGE.size
        return
    with pytest.raises(RequestError, match=reason) as error:
        source(site).read("it", url)
    assert str(error.value).startswith("it")
    assert not any("internal" in each.partition("/")[0] for each in site.paths)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nothing.png", "answers 404"),
        ("huge.png", "is larger than"),
        ("short.png", r"cannot be read \(IncompleteRead\)"),
    ],
)
def test_answers_that_are_no_images_are_refused(site: Site, path: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        source(site).read("it", f"http://images.example:{site.port}/{path}")


SLOW = ["slow.png", "headers.png", "drip", "drip-close", "drip-old", "drip-old-close", "drip-chunks-close"]


@pytest.mark.parametrize("name", SLOW)
def test_an_answer_that_does_not_end_is_given_up(site: Site, name: str) -> None:
    with pytest.raises(RequestError, match=r"took longer than 0\.3 s"):
        source(site, seconds=0.3).read("it", f"http://images.example:{site.port}/{name}")


def test_a_name_service_that_does_not_answer_is_given_up(site: Site) -> None:
    """The thread that waits for it keeps its place."""

    def resolve(host: str, port: int) -> list[str]:
        site.left.wait(60)  # until the test has ended
        return ["127.0.0.1"]

    reader = MediaSource(["images.example"], None, seconds=0.1, resolve=resolve)

    async def run() -> None:
        with pytest.raises(RequestError, match=r"took longer than 0\.1 s"):
            await fetched(message(f"http://images.example:{site.port}/cat.png"), reader)
        assert reader._places["images.example"]._value == 3
        site.left.set()

    asyncio.run(run())


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/cat.png",
        "http://images.example.evil.example/cat.png",
        "http://images.example@other.example/cat.png",
        "http://other.example/images.example",
        "http://[::1]/cat.png",
        "http://0x7f000001/cat.png",
        "http://images.example:0/cat.png",
        "http://images.example:99999/cat.png",
        "http://images.example/\r\nHost: other",
        "http://images.example/ä.png",
        "http:///cat.png",
        "http://images.example/" + "x" * 3000,
    ],
)
def test_other_addresses_are_refused_before_a_name_is_looked_up(site: Site, url: str) -> None:
    with pytest.raises(RequestError, match=r"^it "):
        source(site).read("it", url)
    assert site.asked == []


def test_files_of_the_named_folder_are_read(tmp_path: Path) -> None:
    folder, outside = tmp_path / "images", tmp_path / "secret.png"
    (folder / "a b").mkdir(parents=True)
    for path in (folder / "cat.png", folder / "a b" / "cat.png", outside):
        path.write_bytes(file_of(IMAGE))
    (folder / "link.png").symlink_to(outside)
    os.mkfifo(folder / "pipe.png")
    reader = MediaSource([], str(folder))
    assert reader.reads("file:///x") and not reader.reads("http://x")
    for url in (f"file://{folder}/cat.png", f"file://localhost{folder}/cat.png", f"file://{folder}/a%20b/cat.png"):
        assert image_at(reader, url).size == IMAGE.size
    for path in (
        *("/../secret.png", "/%2e%2e/secret.png", "/link.png", "/pipe.png", "/gone.png", "", "/cat.png%00", "/a%20b"),
    ):
        with pytest.raises(RequestError, match="names no image file in the server's folder"):
            reader.read("it", f"file://{folder}{path}")
    with pytest.raises(RequestError, match="of another machine"):
        reader.read("it", f"file://other{folder}/cat.png")
    with pytest.raises(RequestError, match="of another machine"):
        MediaSource(["images.example"], None).read("it", f"file://{folder}/cat.png")


def test_addresses_in_messages_become_images(site: Site) -> None:
    url = f"http://images.example:{site.port}/cat.png"
    part = {"type": "image_url", "image_url": {"url": url}}
    data = {"type": "image_url", "image_url": {"url": "data:x"}}
    given = [
        {"role": "user", "content": "text"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, part, data]},
    ]
    first, second = with_images(given, source(site))
    assert first is given[0] and given[1]["content"][1] is part  # type: ignore[index]
    text, image, kept = second["content"]
    assert (text, kept, image["type"]) == ({"type": "text", "text": "a"}, data, "image")
    assert image["image"].file_pixels == IMAGE.width * IMAGE.height
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content\[1\]\.image_url\.url answers 404"):
        with_images([{"role": "user", "content": [part, {"type": "image_url", "image_url": url + "x"}]}], source(site))
    with pytest.raises(RequestError, match=f"more than {MOST_ADDRESSES} images by address"):
        with_images([{"role": "user", "content": [part] * (MOST_ADDRESSES + 1)}], source(site))


def test_the_pixels_of_all_images_at_addresses_have_a_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"type": "image_url", "image_url": f"http://images.example:{site.port}/cat.png"}
    monkeypatch.setattr("chairlift.models.vision.chats.MOST_PIXELS", 2 * IMAGE.width * IMAGE.height)
    assert len(with_images([{"role": "user", "content": [part] * 2}], source(site))[0]["content"]) == 2
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content\[2\]\.image_url\.url makes .* pixels"):
        with_images([{"role": "user", "content": [part] * 3}], source(site))


def message(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def test_messages_without_addresses_do_not_wait_for_slow_hosts(site: Site) -> None:
    reader, url = source(site), f"http://images.example:{site.port}"
    text = [{"role": "user", "content": "text"}, {"role": "user", "content": [{"type": "text", "text": "part"}]}]

    async def run() -> None:
        busy = [asyncio.create_task(fetched(message(f"{url}/slow.png"), reader)) for _ in range(16)]
        while len(site.paths) < 4:  # all places of the host
            await asyncio.sleep(0)
        assert await fetched(text, reader) == text
        assert not any(task.done() for task in busy), "the messages waited for the slow host"
        site.left.set()
        await asyncio.gather(*busy, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("num_slow", [1, 3])
def test_a_fast_host_does_not_wait_for_slow_hosts(site: Site, num_slow: int) -> None:
    """Neither while requests wait for slow hosts, nor after they were cancelled: their threads still read."""
    names = [f"slow-{index}.example" for index in range(num_slow)]
    reader = source(site, *names, "fast.example")

    async def run() -> None:
        slow = [message(f"http://{name}:{site.port}/slow.png") for name in names]
        fast = message(f"http://FAST.example.:{site.port}/cat.png")
        for _ in range(2):
            busy = [asyncio.create_task(fetched(each, reader)) for each in slow for _ in range(12)]
            while len(site.paths) < 4 * num_slow:
                await asyncio.sleep(0.001)
            found = await asyncio.wait_for(fetched(fast, reader), 20)
            assert found[0]["content"][0]["image"].file_pixels == IMAGE.width * IMAGE.height
            assert not any(task.done() for task in busy)
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)
        assert sum("slow" in path for path in site.paths) == 4 * num_slow, (
            "a cancelled request left its place too early"
        )
        site.left.set()  # the answers end, and the places are free again
        for each in slow:
            with pytest.raises(RequestError):
                await fetched(each, reader)

    asyncio.run(run())


def test_a_host_that_is_not_in_the_list_has_no_place_of_its_own(site: Site) -> None:
    reader = source(site)

    async def run() -> None:
        for index in range(12):
            with pytest.raises(RequestError, match="is on 'other"):
                await fetched(message(f"http://other-{index}.example/cat.png"), reader)
        assert len(reader._places) == 2

    asyncio.run(run())


def test_waiting_for_a_place_does_not_count_as_reading(site: Site) -> None:
    """The time limit is for reading. With 12 slow images in 4 places, the last ones begin after the limit."""
    reader, path = source(site, seconds=0.3), f"http://images.example:{site.port}/slow.png"

    async def run() -> list[Any]:
        slow = [fetched(message(path), reader) for _ in range(12)]
        return await asyncio.gather(*slow, return_exceptions=True)

    assert all("took longer than 0.3 s" in str(each) for each in asyncio.run(run()))
    assert len(site.paths) == 12, "requests that waited for a place were not read"


def test_the_images_of_a_request_share_its_time(site: Site) -> None:
    reader, url = source(site, seconds=0.5), f"http://images.example:{site.port}"
    limits = list[float]()
    read = reader.read

    def noted(where: str, url: str, end: float) -> Any:
        limits.append(end - time.monotonic())
        time.sleep(0.02)
        return read(where, url, end)

    reader.read = noted  # type: ignore[method-assign, assignment]
    with_images(message(f"{url}/cat.png") * 3, reader)
    first, second, third = limits
    assert 0.5 >= first > second + 0.015 > third + 0.03


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed_media_domains must be names of hosts"):
        ServerConfig(allowed_media_domains=("https://images.example/",))
    with pytest.raises(ConfigError, match="is no directory"):
        ServerConfig(allowed_local_media_path=str(tmp_path / "gone"))
