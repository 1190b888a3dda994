"""Answers about images equal transformers', however the prompt is cut, shared or computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from chairlift import LLM, SamplingParams
from chairlift.core.rows.images import ImageRows
from chairlift.executor.input_batch import InputBatch
from chairlift.models.vision.vision_tower import VisionTower
from tests.models.vision.tiny import Reference, picture, tiny_vlm
from tests.native import needs_kernels

pytestmark = needs_kernels
_COUNT = 6
_GREEDY = SamplingParams(temperature=0, max_tokens=_COUNT, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm(tmp_path_factory.mktemp("vlm") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def chat(*parts: str | Image.Image) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": each} for each in parts
    ]
    return [{"role": "user", "content": content}]


def check(reference: Reference, engine: LLM, *conversations: tuple[str | Image.Image, ...]) -> list[Any]:
    """Fail unless all answers are transformers'. Returns the outputs."""
    outputs = engine.chat([chat(*each) for each in conversations], _GREEDY)
    for parts, output in zip(conversations, outputs, strict=True):
        images = [each for each in parts if not isinstance(each, str)]
        prompt, tokens, logprobs = reference.answer(reference.text_of(*parts), images, _COUNT)
        assert output.prompt_token_ids == prompt
        for answer in output.outputs:
            assert answer.token_ids == tokens
            found = [next(iter(entry.values())).logprob for entry in answer.logprobs or ()]
            assert np.allclose(found, logprobs, atol=1e-4)
    return outputs


def test_images_anywhere_in_a_chat_give_the_logits_of_transformers(
    reference: Reference, llm: Callable[..., LLM]
) -> None:
    one, two, small = picture(1, 70, 50), picture(2, 30, 90), picture(3, 8, 5)
    conversations = [
        (one, "What?"),
        ("Before ", one, " and behind"),
        ("Last ", two),
        (one, " or ", two, "?"),
        (two, two, " twice"),
        (small, one, small, " again"),
        ("no image",),
    ]
    check(reference, llm(max_num_seqs=4), *conversations)


@pytest.mark.nightly
@pytest.mark.parametrize("budget", range(17, 45))
def test_a_chunk_may_end_at_each_position(budget: int, reference: Reference, llm: Callable[..., LLM]) -> None:
    engine = llm(max_num_batched_tokens=budget, max_num_seqs=2, enable_prefix_caching=False)
    check(reference, engine, ("ab", picture(1, 70, 50), "?"), (picture(2), "c"))


def test_a_chunk_ends_inside_an_image(reference: Reference, llm: Callable[..., LLM]) -> None:
    """Each prompt shifts the border of the chunks by one position."""
    engine = llm(max_num_batched_tokens=17, max_num_seqs=1, enable_prefix_caching=False)
    check(reference, engine, *(("x" * count, picture(4)) for count in range(6)))


def test_prefixes_end_before_inside_and_behind_an_image(reference: Reference, llm: Callable[..., LLM]) -> None:
    """Blocks have 16 positions: a shared text before an image, the same image with another text behind it, and another
    image with the same placeholders."""
    engine = llm()
    one, other = picture(1, 70, 50), picture(5, 70, 50)
    check(reference, engine, ("twenty letters before", one, "and a text behind it"))
    encoded = engine.engine.core.preparers.images.num_encoded
    (behind,) = check(reference, engine, ("twenty letters before", one, "and a text behind IT"))
    (before,) = check(reference, engine, ("twenty letters before", other, "and a text behind it"))
    (cut,) = check(reference, engine, ("twenty letters before", one, one, "and a text behind it"))
    # the image has positions 28 to 61
    assert [each.num_cached_tokens for each in (before, cut, behind)] == [16, 48, 80]
    assert engine.engine.core.preparers.images.num_encoded == encoded + 5, (
        "an image that was seen before was encoded again"
    )


def test_several_answers_share_an_image(reference: Reference, llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=_COUNT, ignore_eos=True, n=3)
    image = picture(6, 70, 50)
    (output,) = llm().chat(chat(image, "What?"), params)
    _, tokens, _ = reference.answer(reference.text_of(image, "What?"), [image], _COUNT)
    assert [answer.token_ids for answer in output.outputs] == [tokens] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("swap", [0, 1 << 20])
@pytest.mark.usefixtures("still_clock")
def test_preempted_requests_keep_their_images(swap: int, reference: Reference, llm: Callable[..., LLM]) -> None:
    cramped = {"num_kv_blocks": 15, "max_num_seqs": 3, "admission_watermark": 0.0, "swap_space_bytes": swap}
    engine = llm(enable_prefix_caching=False, **cramped)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    images = [picture(seed, 40, 40) for seed in range(3)]
    outputs = engine.chat([chat(image, "What?") for image in images], params)
    assert engine.engine.scheduler.num_preemptions, "the cache was large enough for all"
    for image, output in zip(images, outputs, strict=True):
        assert output.outputs[0].token_ids == reference.answer(reference.text_of(image, "What?"), [image], 40)[1]


@pytest.mark.nightly
def test_bits_do_not_depend_on_company(folder: Path, llm: Callable[..., LLM]) -> None:
    conversations = [chat(picture(seed, 70, 50), "?" * seed) for seed in range(1, 5)]
    params = SamplingParams(temperature=0, max_tokens=_COUNT, ignore_eos=True, logprobs=3)
    alone = [llm(enable_prefix_caching=False).chat(each, params)[0].outputs[0].logprobs for each in conversations]
    together = llm(enable_prefix_caching=False, max_num_seqs=4, max_num_batched_tokens=64).chat(conversations, params)
    assert [output.outputs[0].logprobs for output in together] == alone


@pytest.mark.nightly
def test_idefics3_is_the_same_network(tmp_path: Path) -> None:
    folder = tiny_vlm(tmp_path / "idefics3", "idefics3")
    engine = LLM(folder, num_kv_blocks=40, dtype="float32")
    check(Reference(folder), engine, (picture(1, 70, 50), "What?"))


@pytest.mark.nightly
def test_images_that_are_not_cut_give_the_logits_of_transformers(tmp_path: Path) -> None:
    folder = tiny_vlm(tmp_path / "whole", do_image_splitting=False)
    engine = LLM(folder, num_kv_blocks=40, dtype="float32")
    (output,) = check(Reference(folder), engine, (picture(1, 70, 50), "What?"))
    assert len(output.prompt_token_ids) < 45


_image_rows = InputBatch._image_rows
_encode = VisionTower.encode


def _shifted(self: InputBatch, chunks: Any, at: int) -> Any:
    return [(place - 1, count, key, first) for place, count, key, first in _image_rows(self, chunks, at) if place]


def _same_rows(self: InputBatch, chunks: Any, at: int) -> Any:
    return [(place, count, key, 0) for place, count, key, _ in _image_rows(self, chunks, at)]


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "rows shifted by one": (InputBatch, "_image_rows", _shifted),
    "a cut span begins again": (InputBatch, "_image_rows", _same_rows),
    "no rows": (InputBatch, "_image_rows", lambda self, chunks, at: []),
    "hash left out of the key": (ImageRows, "marks", lambda self, request, start, end: b""),
    "positions of patches": (VisionTower, "_connect", lambda self, state: _connect(self, state.flip(0))),
}
_connect = VisionTower._connect


@pytest.mark.planted("test_images_anywhere_in_a_chat_give_the_logits_of_transformers")
@pytest.mark.nightly
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_planted_bugs(
    mutation: str, reference: Reference, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, wrong = MUTATIONS[mutation]
    monkeypatch.setattr(where, name, wrong)
    engine = LLM(folder, num_kv_blocks=80, max_num_batched_tokens=17, dtype="float32", max_num_seqs=1)
    conversations = [(text, picture(seed, 70, 50)) for text in ("ab", "abc", "abcd") for seed in (1, 5)]
    with pytest.raises(AssertionError):
        check(reference, engine, *conversations)
