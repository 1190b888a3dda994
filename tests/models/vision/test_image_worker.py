"""Files of strangers are read in processes with limits: the same pixels as in this process, or a clear error."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import PromptTooLongError, QueueFullError, RequestError, WorkerLostError
from chairlift.models.vision.chats import ImageBudget
from chairlift.models.vision.decode import decode_image
from chairlift.models.vision.image_reader import ImageReader
from chairlift.models.vision.image_worker import ImageWorker
from chairlift.models.vision.patches import PatchProcessor, PatchSettings
from chairlift.models.vision.processor import ImageProcessor, PreparedImage
from chairlift.models.vision.squares import FramedProcessor, SquareProcessor, SquareSettings
from chairlift.models.vision.tiles import TileProcessor, TileSettings
from tests.models.vision.attacks import ATTACKS
from tests.models.vision.test_images import file_of
from tests.models.vision.tiny import gemma_tokenizer, llava_tokenizer, picture, qwen_tokenizer, tiny_tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the workers' limits need Linux")

WHERE = "messages[0].content[1].image_url.url"
FILE = file_of(picture(1, 90, 60))
MB = 1 << 20


def tiles() -> ImageProcessor:
    tokens = tiny_tokenizer()
    marker = tokens.encode("<image>", False)[0]
    settings = TileSettings(
        tile_size=32, longest_edge=64, resample=1, splits=True, rows_per_tile=4, image_token_id=marker
    )
    return TileProcessor(settings, tokens, Path("model"))


def patches(most_pixels: int = 4096, patch_size: int = 4) -> ImageProcessor:
    tokens = qwen_tokenizer()
    marker = tokens.encode("<|image_pad|>", False)[0]
    settings = PatchSettings(
        patch_size=patch_size,
        merge_size=2,
        least_pixels=256,
        most_pixels=most_pixels,
        resizes=True,
        resample=3,
        image_token_id=marker,
    )
    return PatchProcessor(settings, tokens, Path("model"))


def squares() -> ImageProcessor:
    tokens = llava_tokenizer()
    marker = tokens.encode("<image>", False)[0]
    return SquareProcessor(
        SquareSettings(size=24, resized=(24,), resample=3, rows=9, image_token_id=marker), tokens, Path("model")
    )


def framed() -> ImageProcessor:
    tokens = gemma_tokenizer()
    around = tokens.encode("<start_of_image>", False)[0], tokens.encode("<end_of_image>", False)[0]
    marker = tokens.encode("<image_soft_token>", False)[0]
    settings = SquareSettings(size=24, resized=(24, 24), resample=2, rows=9, image_token_id=marker, around=around)
    return FramedProcessor(settings, tokens, Path("model"))


def run(processor: ImageProcessor, work: Callable[[ImageWorker], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        worker = ImageWorker(processor, **settings)
        try:
            return await work(worker)
        finally:
            await worker.close()

    return asyncio.run(main())


@pytest.mark.parametrize("make", [tiles, patches, squares, framed])
def test_a_worker_gives_the_tiles_of_this_process(make: Callable[[], ImageProcessor]) -> None:
    processor = make()
    expected = processor.prepare("it", decode_image("it", FILE))
    url = "data:image/png;base64," + base64.b64encode(FILE).decode()

    async def work(worker: ImageWorker) -> list[PreparedImage]:
        return [await worker.prepare(WHERE, FILE), await worker.prepare(WHERE, url)]

    for found in run(processor, work):
        assert (found.rows, found.columns, found.tiles) == (expected.rows, expected.columns, expected.tiles)
        assert found.file_pixels == 90 * 60


def test_errors_name_the_image_and_the_next_image_is_read() -> None:
    async def work(worker: ImageWorker) -> None:
        for source, reason in (
            (b"<svg>", "is no image that can be read"),
            (FILE[:3000], "is damaged or incomplete"),
            (ATTACKS["line"](), "one side may be 200 times as long as the other"),
            ("data:image/png;base64,***", "is no valid base64"),
            ("data:image/png;base64,ä", "is no valid base64"),
            ("http://x", "must be a data URL"),
        ):
            with pytest.raises(RequestError) as error:
                await worker.prepare(WHERE, source)
            assert str(error.value).startswith(WHERE) and reason in str(error.value)
        assert (await worker.prepare(WHERE, FILE)).tiles

    run(tiles(), work, num_workers=1)


def test_an_image_that_takes_too_much_memory_is_refused_and_the_next_is_read() -> None:
    async def work(worker: ImageWorker) -> None:
        with pytest.raises(
            RequestError, match=r"takes more memory .*than an image of its size; save it again"
        ) as error:
            await worker.prepare(WHERE, ATTACKS["announced only, 5 MB"]())
        assert str(error.value).startswith(WHERE)
        assert (await worker.prepare(WHERE, FILE)).tiles

    run(tiles(), work, memory_bytes=4 * MB, num_workers=1)


def test_workers_that_are_killed_from_outside_lose_no_image() -> None:
    async def work(worker: ImageWorker) -> None:
        await worker.start()
        for pid in worker.pids:
            os.kill(pid, signal.SIGKILL)
        assert (await worker.prepare(WHERE, FILE)).tiles

    run(tiles(), work)


def test_a_worker_that_always_dies_ends_only_its_request() -> None:
    """For example because the machine has no memory. The client may send the request again (503)."""

    async def work(worker: ImageWorker) -> None:
        await worker.prepare(WHERE, FILE)
        large = asyncio.create_task(worker.prepare(WHERE, ATTACKS["large"]()))
        while not large.done():
            for pid in worker.busy_pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0)
        with pytest.raises(WorkerLostError):
            await large
        assert (await worker.prepare(WHERE, FILE)).tiles

    run(tiles(), work)


def test_the_files_that_wait_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.models.vision.image_worker._MOST_WAITING_BYTES", 2 * len(FILE))

    async def work(worker: ImageWorker) -> None:
        outcomes = await asyncio.gather(*(worker.prepare(WHERE, FILE) for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in outcomes] == [PreparedImage, PreparedImage, QueueFullError]
        assert (await worker.prepare(WHERE, FILE)).tiles

    run(tiles(), work)


@pytest.mark.parametrize(
    "reply",
    [
        {"rows": 1, "columns": 1, "file_pixels": 64, "seconds": 0, "data": b"x" * 3071},
        {"rows": -1, "columns": -1, "file_pixels": 64, "seconds": 0, "data": b"x" * 6144},
        {"rows": 10**9, "columns": 10**9, "file_pixels": 64, "seconds": 0, "data": b"x"},
        {"rows": 0, "columns": 0, "file_pixels": 0, "seconds": 0, "data": b"x" * 3072},
        {"rows": "many"},
        {},
    ],
)
def test_a_reply_that_no_worker_sends_is_refused(reply: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may have taken over the worker."""

    async def ask(self: ImageWorker, fields: Any, seconds: float) -> dict[str, Any]:
        return reply

    monkeypatch.setattr(ImageWorker, "ask", ask)
    with pytest.raises(RequestError, match=r"content\[1\]\.image_url\.url cannot be read"):
        run(tiles(), lambda worker: worker.prepare(WHERE, FILE))


def test_the_images_of_a_request_have_limits_together() -> None:
    processor = tiles()
    image = processor.prepare("it", picture(1, 90, 60))
    count = processor.num_positions(image)
    budget = ImageBudget(processor, 2 * count)
    budget.add("first", image)
    budget.add("second", image)
    with pytest.raises(PromptTooLongError, match=rf"^third and the images before it take {3 * count} positions"):
        budget.add("third", image)
    slow = PreparedImage(0, 0, (), 1, seconds=20.0)
    budget = ImageBudget(processor)
    budget.add("first", slow)
    with pytest.raises(RequestError, match=r"^second and the images before it took 40\.0 s of processor time"):
        budget.add("second", slow)


def test_a_reader_takes_files_and_images_of_pillow() -> None:
    processor = tiles()
    given = decode_image("it", FILE)
    url = "data:image/png;base64," + base64.b64encode(FILE).decode()
    marker = processor.image_token_id

    async def beside(work: Callable[[], Any]) -> Any:
        return work()

    async def main() -> None:
        reader = ImageReader(processor, 1000, 16)
        try:
            await reader.start()
            images = [("first", url), ("second", given), ("third", processor.prepare("it", given))]
            ids, placed = await reader.place([marker, 7, marker, marker], images, beside)
            count = processor.num_positions(processor.prepare("it", given))
            assert len(ids) == 3 * count + 1
            assert len({span.key for span in placed.spans}) == len(placed.tiles)
            small = ImageReader(processor, count, 16)
            with pytest.raises(PromptTooLongError, match=r"^third and the images"):
                await small.place([marker] * 2, [images[1], images[2]], beside)
        finally:
            await reader.close()

    asyncio.run(main())


def memory_of(pid: int | str, which: str = "VmHWM") -> int:
    """Largest resident size of a process so far (VmRSS: its size now), in bytes; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return int(lines.get(which, "0 kB").split()[0]) << 10


@pytest.mark.nightly
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_take_bounded_memory_and_time_and_hurt_no_neighbour(name: str) -> None:
    """The settings are those of Qwen2.5-VL. A neighbour's image is read while the attack runs, and one behind it."""
    data, most = ATTACKS[name](), 0
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident size begins again
    before = memory_of("self", "VmRSS")

    async def work(worker: ImageWorker) -> None:
        nonlocal most
        await worker.start()
        attack = asyncio.create_task(worker.prepare(WHERE, data))
        neighbour = asyncio.create_task(worker.prepare(WHERE, FILE))
        while not attack.done():
            most = max([most, *map(memory_of, worker.pids)])
            await asyncio.sleep(0.002)
        if (error := attack.exception()) is not None:
            assert isinstance(error, RequestError) and str(error).startswith(WHERE)
        else:
            assert attack.result().seconds < 12
        assert (await neighbour).tiles and (await worker.prepare(WHERE, FILE)).tiles

    run(patches(most_pixels=12_845_056, patch_size=14), work)
    assert most < 1000 * MB, "a worker took too much memory"
    assert memory_of("self") - before < 200 * MB, "this process took too much memory"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_files_with_wrong_bytes_end_in_tiles_or_an_error(kind: str) -> None:
    """Mostly in the header, where numbers are lengths."""
    whole, chance, most = file_of(picture(3, 40, 30), kind), random.Random(5), 0

    async def work(worker: ImageWorker) -> None:
        nonlocal most
        for _ in range(400):
            data = bytearray(whole)
            for _ in range(chance.randint(1, 6)):
                data[min(int(chance.expovariate(0.02)), len(data) - 1)] = chance.choice([0, 1, 127, 128, 255])
            with contextlib.suppress(RequestError):
                assert (await worker.prepare(WHERE, bytes(data))).tiles
            most = max([most, *map(memory_of, worker.pids)])

    run(tiles(), work, num_workers=1)
    assert most < 1000 * MB
