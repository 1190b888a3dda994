"""KV of prompts with images outlives the process, and is found again with the same images only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from chairlift import LLM
from tests.engine.test_kv_blocks import GREEDY, opened
from tests.models.vision.test_equivalence import chat
from tests.models.vision.tiny import picture, tiny_vlm
from tests.native import needs_kernels

pytestmark = needs_kernels
_ASKED = "What is to be seen here, and why is it so?"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_vlm(tmp_path / "model", do_image_splitting=False)


def start(folder: Path, tmp_path: Path, **settings: Any) -> LLM:
    store = {"kv_store": str(tmp_path / "store"), "kv_store_bytes": "64MB"}
    return opened(LLM(str(folder), num_kv_blocks=80, dtype="float32", **store, **settings))


def ask(llm: LLM, *images: Image.Image) -> tuple[Any, Any, int]:
    (output,) = llm.chat([chat(*images, _ASKED)], GREEDY)
    (text,) = output.outputs
    return text.token_ids, text.logprobs, output.num_cached_tokens


def test_the_next_engine_finds_the_blocks_of_an_image(folder: Path, tmp_path: Path) -> None:
    first = start(folder, tmp_path)
    cold = ask(first, picture(1, 70, 50))
    warm = ask(first, picture(1, 70, 50))
    rejected = first.engine.core.preparers.kv_blocks.counts()["kv_blocks_rejected"]
    first.engine.shutdown()
    second = start(folder, tmp_path)
    other = ask(second, picture(2, 70, 50))
    loaded = ask(second, picture(1, 70, 50))
    second.engine.shutdown()
    assert not rejected
    assert cold[2] == 0 and loaded[2] == warm[2] >= 32
    assert loaded[:2] == warm[:2]
    assert other[2] < 16 * 3 and other[:2] != warm[:2], "only the text before the image is shared"


def test_a_block_with_too_many_tiles_is_not_stored_and_is_counted(folder: Path, tmp_path: Path) -> None:
    """A record has room for the tokens of its block and a few tiles. The blocks after it cannot be found without it."""
    pictures = [picture(number, 40, 40) for number in range(6)]
    first = start(folder, tmp_path, block_size=64)
    cold = ask(first, *pictures)
    warm = ask(first, *pictures)
    one = ask(first, pictures[0])
    rejected = first.engine.core.preparers.kv_blocks.counts()["kv_blocks_rejected"]
    first.engine.shutdown()
    assert rejected["marks"] >= 1
    second = start(folder, tmp_path, block_size=64)
    again = ask(second, *pictures)
    loaded = ask(second, pictures[0])
    second.engine.shutdown()
    assert warm[2] >= 64 and again[2] == 0 and again[:2] == cold[:2]
    assert loaded[2] == 64 and loaded[:2] == one[:2], "a block with one tile is stored"
