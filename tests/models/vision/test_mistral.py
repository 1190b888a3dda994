"""Mistral 3 answers about images as transformers does, however the prompt is cut, shared or computed again.

Tokens that are no rows of the encoder stand between the lines of an image.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from chairlift import LLM, SamplingParams
from chairlift.base.image_spans import ImageSpan, marks
from chairlift.errors import ModelLoadError, RequestError
from chairlift.executor.input_batch import InputBatch
from chairlift.models.hf_config import parse_config
from chairlift.models.vision import line_tower
from chairlift.models.vision.line_tower import LineTower
from chairlift.models.vision.vision_files import read_processor
from tests.models.vision.test_equivalence import chat, check
from tests.models.vision.tiny import MistralReference, mistral_tokenizer, picture, tiny_mistral
from tests.native import needs_kernels

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mistral(tmp_path_factory.mktemp("mistral") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> MistralReference:
    return MistralReference(folder)


def test_images_anywhere_in_a_chat_give_the_logits_of_transformers(
    reference: MistralReference, llm: Callable[..., LLM]
) -> None:
    one, two, wide = picture(1, 40, 24), picture(2, 24, 64), picture(3, 90, 9)
    conversations = [
        (one, "What?"),
        ("Before ", one, " and behind"),
        (one, " or ", two, wide),
        (two, two, " twice"),
        ("no image",),
    ]
    check(reference, llm(max_num_seqs=4), *conversations)


@pytest.mark.nightly
@pytest.mark.parametrize("budget", range(17, 45, 3))
def test_a_chunk_may_end_at_each_position(budget: int, reference: MistralReference, llm: Callable[..., LLM]) -> None:
    engine = llm(max_num_batched_tokens=budget, max_num_seqs=2, enable_prefix_caching=False)
    check(reference, engine, ("ab", picture(1, 40, 24), "?"), (picture(2, 24, 64), "c"))


def test_prefixes_end_inside_an_image(reference: MistralReference, llm: Callable[..., LLM]) -> None:
    engine = llm()
    one, other = picture(1, 48, 40), picture(5, 48, 40)
    check(reference, engine, ("twenty letters before", one, "and a text behind it"))
    encoded = engine.engine.core.preparers.images.num_encoded
    (behind,) = check(reference, engine, ("twenty letters before", one, "and a text behind IT"))
    (before,) = check(reference, engine, ("twenty letters before", other, "and a text behind it"))
    # the image has positions 23 to 57
    assert [each.num_cached_tokens for each in (before, behind)] == [16, 64]
    assert engine.engine.core.preparers.images.num_encoded == encoded + 1


@pytest.mark.nightly
@pytest.mark.parametrize("swap", [0, 1 << 20])
@pytest.mark.usefixtures("still_clock")
def test_preempted_requests_answer_alike(swap: int, reference: MistralReference, llm: Callable[..., LLM]) -> None:
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
    ("text_type", "more"),
    [
        ("ministral3", {}),
        ("mistral", {"multimodal_projector_bias": True, "projector_hidden_act": "silu", "spatial_merge_size": 1}),
    ],
)
def test_other_text_models_and_projectors(text_type: str, more: dict[str, Any], tmp_path: Path) -> None:
    size = {"patch_size": 4} if more else {}
    folder = tiny_mistral(tmp_path / "model", text_type, size, **more)
    reference = MistralReference(folder)
    if more:
        reference.inputs = _single(reference)  # type: ignore[method-assign]
    engine = LLM(folder, num_kv_blocks=80, dtype="float32")
    check(reference, engine, (picture(1, 24, 16), "What?"), ("Which ", picture(2, 16, 24)))


def _single(reference: MistralReference) -> Callable[..., dict[str, Any]]:
    """Inputs for a model that merges no patches: each is a row."""

    def inputs(text: str, images: list[Any]) -> dict[str, Any]:
        batch = reference.images(images, return_tensors="pt")
        head, *rest = text.split("[IMG]")
        for (height, width), part in zip(batch["image_sizes"].tolist(), rest, strict=True):
            head += "[IMG_BREAK]".join(["[IMG]" * (width // 4)] * (height // 4)) + "[IMG_END]" + part
        return {"input_ids": torch.tensor([reference.tokenizer.encode(head, False)]), **batch}

    return inputs


@pytest.mark.parametrize("size", [(1, 1), (8, 5), (17, 16), (56, 56), (57, 56), (500, 3), (1000, 700)], ids=str)
def test_sizes_are_those_of_transformers(size: tuple[int, int], folder: Path) -> None:
    processor = read_processor(folder, mistral_tokenizer())
    assert processor is not None
    theirs = PixtralImageProcessorPil.from_pretrained(folder)
    image = picture(1, *size)
    try:
        height, width = theirs([image], return_tensors="pt")["image_sizes"][0].tolist()
    except (ValueError, SystemError):  # a side without pixels
        return
    (tile,) = processor.prepare("it", image).tiles
    assert tile.grid == (height // 4, width // 4)


def test_files_without_a_preprocessor_have_its_defaults(folder: Path, tmp_path: Path) -> None:
    """transformers 5 may store the settings inside another file, and Mistral publishes models without any."""
    model = tiny_mistral(tmp_path / "model")
    settings = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").unlink()
    usual = read_processor(model, mistral_tokenizer())
    (model / "processor_config.json").write_text(json.dumps({"image_processor": {**settings, "resample": 2}}))
    nested = read_processor(model, mistral_tokenizer())
    assert usual is not None and nested is not None
    assert (usual.settings.resample, nested.settings.resample) == (3, 2)  # type: ignore[attr-defined]


def test_texts_alone_need_no_encoder(reference: MistralReference, folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    tensors = load_file(model / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if "vision_tower" not in name}
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="is missing; download the model again, or set mmproj to none"):
        LLM(model, num_kv_blocks=40, dtype="float32")
    engine = LLM(model, num_kv_blocks=40, dtype="float32", mmproj="none")
    check(reference, engine, ("no image",))
    with pytest.raises(RequestError, match="must be a text part"):
        engine.chat(chat(picture(1), "What?"))


def test_encoders_that_do_not_fit_are_refused(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    for change, words in (
        ({"vision_feature_layer": -2}, "vision_feature_layer -2 is not -1"),
        ({"projector_hidden_act": "relu"}, "the activation 'relu' is not one of"),
        ({"vision_config": {**raw["vision_config"], "model_type": "clip_vision_model"}}, "is not 'pixtral'"),
        ({"vision_config": {**raw["vision_config"], "hidden_size": 50}}, "is not a multiple of four times"),
    ):
        with pytest.raises(ModelLoadError, match=words):
            parse_config({**raw, **change})


def test_lines_of_an_image_are_told_apart_in_the_cache() -> None:
    keys = {marks([ImageSpan(5, 4, b"k", first=first)], 0, 16) for first in (0, 4)}
    assert len(keys) == 2


_rows, _merge = InputBatch._image_rows, LineTower._merge
WRONG: dict[str, tuple[Any, str, Any]] = {
    "each line has the first rows": (
        InputBatch,
        "_image_rows",
        lambda self, chunks, at: [(place, count, key, 0) for place, count, key, _ in _rows(self, chunks, at)],
    ),
    "lines in another order": (LineTower, "_merge", lambda self, state, *how: _merge(self, state, *how).flip(0)),
    "the norm of the projector left out": (line_tower, "rms_normed", lambda rows, weight, eps: rows),
}


@pytest.mark.planted("test_images_anywhere_in_a_chat_give_the_logits_of_transformers")
@pytest.mark.nightly
@pytest.mark.parametrize("mutation", WRONG)
def test_the_comparison_notices_planted_bugs(
    mutation: str, reference: MistralReference, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, wrong = WRONG[mutation]
    monkeypatch.setattr(where, name, wrong)
    engine = LLM(folder, num_kv_blocks=80, max_num_seqs=1, dtype="float32")
    with pytest.raises(AssertionError):
        check(reference, engine, *((text, picture(seed, 48, 40)) for text in ("ab", "abc") for seed in (1, 5)))
