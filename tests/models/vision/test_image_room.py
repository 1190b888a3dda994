"""Answers stay the same if encoded rows of images are given up for other requests, and encoded again after a
preemption."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift import LLM, SamplingParams
from chairlift.base.image_spans import ImageTile
from chairlift.core.rows.images import ImageRows
from chairlift.core.scheduler.batch import Batch
from chairlift.engine.images import Images
from chairlift.errors import RequestError
from chairlift.executor.image_bank import ImageBank
from tests.models.vision.test_equivalence import chat
from tests.models.vision.tiny import QwenReference, picture, tiny_qwen
from tests.native import needs_kernels

pytestmark = needs_kernels
_COUNT = 30
_GREEDY = SamplingParams(temperature=0, max_tokens=_COUNT, ignore_eos=True)
_IMAGES = [picture(seed, 40, 24) for seed in range(4)]
_IMAGE_BYTES = 15 * 3 * 64 * 4
"""Size of an encoded image: 15 rows, each with an embedding and two DeepStack vectors of 64 floats."""
SETTINGS: dict[str, Any] = {"num_kv_blocks": 11, "max_num_seqs": 4, "admission_watermark": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen(tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """transformers' answer about each image."""
    reference = QwenReference(folder)
    return [reference.answer(reference.text_of("What is it?", image), [image], _COUNT)[1] for image in _IMAGES]


def check(engine: LLM, expected: list[list[int]]) -> None:
    """Fail unless the answers about all images are the expected ones, and requests were preempted."""
    outputs = engine.chat([chat("What is it?", image) for image in _IMAGES], _GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert engine.engine.scheduler.num_preemptions, "the KV cache was large enough for all"


@pytest.mark.parametrize("room", [1, 2, 100])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("swap", [0, 1 << 20])
@pytest.mark.usefixtures("still_clock")
def test_rows_are_kept_or_encoded_again(
    swap: int, caching: bool, room: int, expected: list[list[int]], llm: Callable[..., LLM]
) -> None:
    how = {"swap_space_bytes": swap, "preemption_mode": "swap" if swap else "recompute"}
    engine = llm(enable_prefix_caching=caching, image_memory_bytes=room * _IMAGE_BYTES, **how)
    check(engine, expected)
    images, num_swaps = engine.engine.core.preparers.images, engine.engine.scheduler.preemptor.num_swaps
    assert bool(num_swaps) == bool(swap)
    stats = engine.engine.core.stats()
    assert stats.num_tiles_given_up == images.num_given_up and stats.num_tiles_reencoded == images.num_reencoded
    assert stats.image_bytes == images.num_bytes <= stats.max_image_bytes == room * _IMAGE_BYTES
    assert bool(images.num_given_up) == (room < len(_IMAGES)), "rows were given up without need, or never"
    if room == 1 and not swap and not caching:
        assert images.num_reencoded, "no request had to read rows that were given up"
    if room > len(_IMAGES) or swap:
        assert images.num_encoded == len(_IMAGES), "rows were encoded again without need"


def test_images_that_never_fit_are_refused(llm: Callable[..., LLM]) -> None:
    engine = llm(image_memory_bytes=2 * _IMAGE_BYTES - 1)
    engine.chat(chat(_IMAGES[0], _IMAGES[0], "twice the same"), _GREEDY)
    with pytest.raises(RequestError, match="image_memory_bytes"):
        engine.chat(chat(_IMAGES[0], _IMAGES[1], "two images"), _GREEDY)


_encode, _encode_again = ImageBank.encode, Images.encode_again
_num_known = Batch.num_known


def _shifted_the_second_time(self: ImageBank, tile: ImageTile) -> Iterator[None]:
    yield from _encode(self, tile)
    seen = self.__dict__.setdefault("seen", set())
    if tile.key in seen:
        self.rows[tile.key] = np.roll(self.rows[tile.key], 1, axis=0)
    seen.add(tile.key)


def _pixels_of_another(self: Images, request: Any) -> None:
    keys = list(self._tiles)
    other = {key: self._tiles[keys[index - 1]].pixels for index, key in enumerate(keys)}
    tiles = {key: dataclasses.replace(tile, pixels=other[key]) for key, tile in self._tiles.items()}
    self._tiles, before = tiles, self._tiles
    _encode_again(self, request)
    self._tiles = before


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "requests join without their rows": (ImageRows, "obstacle", lambda self, request: False),
    "KV counted that does not exist": (Batch, "num_known", lambda self, request: _num_known(self, request) + 64),
    "rows shifted the second time": (ImageBank, "encode", _shifted_the_second_time),
    "pixels of another image": (Images, "encode_again", _pixels_of_another),
}


@pytest.mark.planted("test_rows_are_kept_or_encoded_again")
@pytest.mark.nightly
@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.usefixtures("still_clock")
def test_the_comparison_notices_planted_bugs(
    mutation: str, expected: list[list[int]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, wrong = MUTATIONS[mutation]
    monkeypatch.setattr(where, name, wrong)
    how = {"preemption_mode": "recompute", "enable_prefix_caching": False, "image_memory_bytes": _IMAGE_BYTES}
    engine = LLM(folder, dtype="float32", max_num_batched_tokens=24, **SETTINGS, **how)
    with pytest.raises(AssertionError):
        check(engine, expected)
