"""InternVL answers about images as transformers does, however the prompt is cut or computed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from chairlift import LLM, SamplingParams
from chairlift.errors import ModelLoadError
from chairlift.models.hf_config import parse_config
from chairlift.models.vision.intern_tower import InternTower
from chairlift.models.vision.vision_files import read_processor
from tests.models.vision.test_equivalence import chat, check
from tests.models.vision.tiny import InternReference, intern_tokenizer, picture, tiny_intern
from tests.native import needs_kernels

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_intern(tmp_path_factory.mktemp("intern") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> InternReference:
    return InternReference(folder)


def test_images_anywhere_in_a_chat_give_the_logits_of_transformers(
    reference: InternReference, llm: Callable[..., LLM]
) -> None:
    one, two, small = picture(1, 70, 50), picture(2, 30, 90), picture(3, 8, 8)
    conversations = [(one, "What?"), ("Before ", one, " and behind"), (two, two, small, " twice"), ("no image",)]
    check(reference, llm(max_num_seqs=4), *conversations)


@pytest.mark.nightly
@pytest.mark.parametrize("budget", range(17, 45, 3))
def test_a_chunk_may_end_at_each_position(budget: int, reference: InternReference, llm: Callable[..., LLM]) -> None:
    engine = llm(max_num_batched_tokens=budget, max_num_seqs=2, enable_prefix_caching=False)
    check(reference, engine, ("ab", picture(1, 40, 24), "?"), (picture(2, 24, 64), "c"))


@pytest.mark.nightly
def test_prefixes_end_inside_an_image(reference: InternReference, llm: Callable[..., LLM]) -> None:
    engine = llm()
    one, other = picture(1, 48, 40), picture(5, 48, 40)
    check(reference, engine, ("twenty letters before", one, "and a text behind it"))
    (behind,) = check(reference, engine, ("twenty letters before", one, "and a text behind IT"))
    (before,) = check(reference, engine, ("twenty letters before", other, "and a text behind it"))
    assert before.num_cached_tokens == 16 < 48 <= behind.num_cached_tokens


@pytest.mark.nightly
@pytest.mark.parametrize("swap", [0, 1 << 20])
@pytest.mark.usefixtures("still_clock")
def test_preempted_requests_answer_alike(swap: int, reference: InternReference, llm: Callable[..., LLM]) -> None:
    cramped = {"num_kv_blocks": 15, "max_num_seqs": 3, "admission_watermark": 0.0, "swap_space_bytes": swap}
    engine = llm(enable_prefix_caching=False, **cramped)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    images = [picture(seed, 40, 24 + 8 * seed) for seed in range(3)]
    outputs = engine.chat([chat(image, "What?") for image in images], params)
    assert engine.engine.scheduler.num_preemptions, "the cache was large enough for all"
    for image, output in zip(images, outputs, strict=True):
        text = reference.text_of(image, "What?")
        assert output.outputs[0].token_ids == reference.answer(text, [image], 40)[1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text_type", "vision"),
    [
        ("qwen3", {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}),
        ("qwen2", {"use_mean_pooling": False}),
    ],
)
def test_other_text_models_and_encoders(text_type: str, vision: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_intern(tmp_path / "model", text_type, vision)
    engine = LLM(folder, num_kv_blocks=80, dtype="float32")
    check(InternReference(folder), engine, (picture(1, 70, 50), "What?"), ("Which ", picture(2, 30, 90)))


@pytest.mark.parametrize(
    "size", [(1, 1), (24, 24), (48, 48), (25, 24), (50, 24), (100, 24), (20, 90), (70, 50)], ids=str
)
def test_grids_and_pixels_are_those_of_transformers(size: tuple[int, int], folder: Path) -> None:
    processor = read_processor(folder, intern_tokenizer())
    assert processor is not None
    theirs = GotOcr2ImageProcessorPil.from_pretrained(folder, crop_to_patches=True, do_normalize=False)
    pixels = theirs([picture(1, *size)], return_tensors="pt")["pixel_values"]
    tiles = processor.prepare("it", picture(1, *size)).tiles
    assert [tile.pixels for tile in tiles] == [(each * 255).round().byte().numpy().tobytes() for each in pixels]


def test_encoders_that_do_not_fit_are_refused(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    for change, words in (
        ({"vision_feature_layer": -2}, "vision_feature_layer -2 is not -1"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy 'full' is not 'default'"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act 'relu' is not one of"),
        ({"downsample_ratio": 0.25}, "has 6 patches a side, no multiple of 4"),
        ({"vision_config": {**raw["vision_config"], "norm_type": "none"}}, "norm_type 'none' is not"),
    ):
        with pytest.raises(ModelLoadError, match=words):
            parse_config({**raw, **change})


WRONG: dict[str, tuple[str, Any]] = {
    "squares in another order": ("_squares", lambda self, patches: _squares(self, patches).flip(0)),
    "the norm of the projector left out": (
        "_project",
        lambda self, rows: self._projector[1](self._projector[0](rows).relu()),
    ),
}
_squares = InternTower._squares


@pytest.mark.planted("test_images_anywhere_in_a_chat_give_the_logits_of_transformers")
@pytest.mark.nightly
@pytest.mark.parametrize("mutation", WRONG)
def test_the_comparison_notices_planted_bugs(
    mutation: str, reference: InternReference, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InternTower, *WRONG[mutation])
    engine = LLM(folder, num_kv_blocks=80, max_num_seqs=1, dtype="float32")
    with pytest.raises(AssertionError):
        check(reference, engine, *((text, picture(seed, 48, 40)) for text in ("ab", "abc") for seed in (1, 5)))
