"""LLaVA answers like transformers, however the prompt is cut, shared or computed again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM, SamplingParams
from chairlift.core.rows.images import ImageRows
from chairlift.errors import ModelLoadError, RequestError
from chairlift.executor.input_batch import InputBatch
from chairlift.models.hf_config import parse_config
from chairlift.models.vision import clip_tower, vision_tower
from chairlift.models.vision.clip_tower import ClipTower
from chairlift.models.vision.vision_files import read_processor
from tests.models.vision.test_equivalence import chat, check
from tests.models.vision.tiny import LLAVA_SIZE, LlavaReference, llava_tokenizer, picture, tiny_llava
from tests.native import needs_kernels

pytestmark = needs_kernels
_GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava(tmp_path_factory.mktemp("llava") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> LlavaReference:
    return LlavaReference(folder)


def test_images_anywhere_in_a_chat_give_the_logits_of_transformers(
    reference: LlavaReference, llm: Callable[..., LLM]
) -> None:
    one, two, wide = picture(1, 40, 24), picture(2, 24, 64), picture(3, 90, 7)
    conversations = [
        (one, "What?"),
        ("Before ", one, " and behind"),
        ("Last ", two),
        (one, " or ", two, wide),
        (two, two, " twice"),
        ("no image",),
    ]
    check(reference, llm(max_num_seqs=4), *conversations)


@pytest.mark.nightly
@pytest.mark.parametrize("budget", range(17, 36))
def test_a_chunk_may_end_at_each_position(budget: int, reference: LlavaReference, llm: Callable[..., LLM]) -> None:
    engine = llm(max_num_batched_tokens=budget, max_num_seqs=2, enable_prefix_caching=False)
    check(reference, engine, ("ab", picture(1, 40, 24), "?"), (picture(2, 24, 64), "c"))


def test_a_chunk_ends_inside_an_image(reference: LlavaReference, llm: Callable[..., LLM]) -> None:
    """Each prompt shifts the border of the chunks by one position."""
    engine = llm(max_num_batched_tokens=8, max_num_seqs=1, enable_prefix_caching=False)
    check(reference, engine, *(("x" * count, picture(4)) for count in range(8)))


def test_prefixes_end_before_inside_and_behind_an_image(reference: LlavaReference, llm: Callable[..., LLM]) -> None:
    """Blocks have 16 positions: a shared text before an image, the same image with another text behind it, and another
    image with the same placeholders."""
    engine = llm()
    one, other = picture(1), picture(5)
    check(reference, engine, ("twenty letters before", one, one, one, "and a text behind it"))
    encoded = engine.engine.core.preparers.images.num_encoded
    (behind,) = check(reference, engine, ("twenty letters before", one, one, one, "and a text behind IT"))
    (before,) = check(reference, engine, ("twenty letters before", other, one, one, "and a text behind it"))
    (inside,) = check(reference, engine, ("twenty letters before", one, one, other, "and a text behind it"))
    # the images have positions 27 to 53
    assert [each.num_cached_tokens for each in (before, inside, behind)] == [16, 32, 64]
    assert engine.engine.core.preparers.images.num_encoded == encoded + 1, (
        "an image that was seen before was encoded again"
    )


def test_several_answers_share_an_image(reference: LlavaReference, llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, n=3)
    image = picture(6, 40, 24)
    (output,) = llm().chat(chat(image, "What?"), params)
    _, tokens, _ = reference.answer(reference.text_of(image, "What?"), [image], 6)
    assert [answer.token_ids for answer in output.outputs] == [tokens] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("swap", [0, 1 << 20])
@pytest.mark.usefixtures("still_clock")
def test_preempted_requests_keep_their_images(swap: int, reference: LlavaReference, llm: Callable[..., LLM]) -> None:
    cramped = {"num_kv_blocks": 9, "max_num_seqs": 3, "admission_watermark": 0.0, "swap_space_bytes": swap}
    engine = llm(enable_prefix_caching=False, **cramped)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    images = [picture(seed, 40, 24) for seed in range(3)]
    outputs = engine.chat([chat(image, "What?") for image in images], params)
    assert engine.engine.scheduler.num_preemptions, "the cache was large enough for all"
    for image, output in zip(images, outputs, strict=True):
        assert output.outputs[0].token_ids == reference.answer(reference.text_of(image, "What?"), [image], 40)[1]


@pytest.mark.nightly
def test_bits_do_not_depend_on_company(llm: Callable[..., LLM]) -> None:
    conversations = [chat(picture(seed), "?" * seed) for seed in range(1, 5)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    alone = [llm(enable_prefix_caching=False).chat(each, params)[0].outputs[0].logprobs for each in conversations]
    together = llm(enable_prefix_caching=False, max_num_seqs=4, max_num_batched_tokens=64).chat(conversations, params)
    assert [output.outputs[0].logprobs for output in together] == alone


FEATURES: dict[str, dict[str, Any]] = {
    "with the class": {"vision_feature_select_strategy": "full"},
    "last layer": {"vision_feature_layer": -1},
    "an early layer": {"vision_feature_layer": 1},
    "several layers": {"vision_feature_layer": [-2, 0, -1], "multimodal_projector_bias": False},
    "another activation": {"projector_hidden_act": "gelu_pytorch_tanh"},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FEATURES)
def test_features_of_other_layers_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    folder = tiny_llava(tmp_path / "model", **FEATURES[name])
    check(LlavaReference(folder), LLM(folder, num_kv_blocks=40, dtype="float32"), ("ab", picture(1), "What?"))


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["published", "nested"])
def test_files_with_other_names_of_tensors_load(form: str, tmp_path: Path) -> None:
    """Published files have one more level in the encoder; files of some versions nest all tensors under ``model``."""
    folder = tiny_llava(tmp_path / "model")
    reference = LlavaReference(folder)
    tower = "vision_tower.vision_model." if form == "published" else "model.vision_tower."
    renamed = {
        "vision_tower.": tower,
        "language_model.model.": "language_model.model." if form == "published" else "model.language_model.",
        "language_model.lm_head.": "language_model.lm_head." if form == "published" else "lm_head.",
        "multi_modal_projector.": "" if form == "published" else "model.multi_modal_projector.",
    }
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        old = next(each for each in renamed if name.startswith(each))
        tensors[(renamed[old] or old) + name.removeprefix(old)] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    check(reference, LLM(folder, num_kv_blocks=40, dtype="float32"), (picture(1), "What?"))


SIZES = [(1, 1), (24, 24), (25, 24), (24, 31), (64, 64), (70, 50), (300, 3), (3, 300), (1000, 700)]


@pytest.mark.parametrize(
    "resized", [{"shortest_edge": 24}, {"shortest_edge": 30}, {"height": 26, "width": 40}], ids=str
)
def test_pixels_are_those_of_transformers(resized: dict[str, int], tmp_path: Path) -> None:
    folder = tiny_llava(tmp_path / "model", {"size": resized})
    theirs, processor = LlavaReference(folder).images, read_processor(folder, llava_tokenizer())
    assert processor is not None
    for size in SIZES:
        wanted = theirs([picture(1, *size)], return_tensors="pt", do_rescale=False, do_normalize=False)["pixel_values"]
        (tile,) = processor.prepare("it", picture(1, *size)).tiles
        found = torch.frombuffer(bytearray(tile.pixels), dtype=torch.uint8).view(3, LLAVA_SIZE, LLAVA_SIZE)
        assert torch.equal(found.float(), wanted[0].float()), size


def test_images_that_are_too_long_are_refused(folder: Path) -> None:
    processor = read_processor(folder, llava_tokenizer())
    assert processor is not None
    with pytest.raises(RequestError, match="one side may be 200 times as long as the other: cut it"):
        processor.prepare("it", picture(1, 5000, 1))
    processor.settings = dataclasses.replace(processor.settings, resized=(2000,))
    with pytest.raises(RequestError, match=r"has 455 x 5 pixels, and would have 182,000 x 2,000 .* at most 80,000,000"):
        processor.prepare("it", picture(1, 455, 5))


def test_files_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    def read(part: str = "", **changes: Any) -> None:
        raw = json.loads((folder / "config.json").read_text())
        (raw[part] if part else raw).update(changes)
        parse_config(raw)

    with pytest.raises(ModelLoadError, match="text_config must describe a model of type 'llama'"):
        read("text_config", model_type="opt")
    with pytest.raises(ModelLoadError, match="model_type 'siglip_vision_model' is not 'clip_vision_model'"):
        read("vision_config", model_type="siglip_vision_model")
    with pytest.raises(ModelLoadError, match="hidden_act 'relu' is not one of gelu, gelu_pytorch_tanh, quick_gelu"):
        read("vision_config", hidden_act="relu")
    with pytest.raises(ModelLoadError, match="vision_feature_layer must be numbers from -4 to 3, got 4"):
        read(vision_feature_layer=4)
    with pytest.raises(ModelLoadError, match="vision_feature_select_strategy 'some' is not 'default' or 'full'"):
        read(vision_feature_select_strategy="some")
    with pytest.raises(ModelLoadError, match="projector_hidden_act 'relu' is not one of"):
        read(projector_hidden_act="relu")
    for number, (change, message) in enumerate(
        (
            ({"crop_size": {"height": 16, "width": 16}}, "the encoder takes 24 pixels a side"),
            ({"size": {"shortest_edge": 20}}, "the encoder takes 24 pixels a side"),
            ({"do_center_crop": False}, "the encoder takes 24 pixels a side"),
            ({"do_pad": True}, "do_pad is true"),
            ({"do_normalize": False}, "do_normalize is false"),
        )
    ):
        with pytest.raises(ModelLoadError, match=message):
            read_processor(tiny_llava(tmp_path / str(number), change), llava_tokenizer())


_image_rows, _embed = InputBatch._image_rows, ClipTower._embed


def _shifted(self: InputBatch, chunks: Any, at: int) -> Any:
    return [(place - 1, count, key, first) for place, count, key, first in _image_rows(self, chunks, at) if place]


def _same_rows(self: InputBatch, chunks: Any, at: int) -> Any:
    return [(place, count, key, 0) for place, count, key, _ in _image_rows(self, chunks, at)]


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "rows shifted by one": (InputBatch, "_image_rows", _shifted),
    "a cut span begins again": (InputBatch, "_image_rows", _same_rows),
    "hash left out of the key": (ImageRows, "marks", lambda self, request, start, end: b""),
    "order of patches": (ClipTower, "_embed", lambda self, tile: _embed(self, tile).flip(0)),
    "projector's activation left out": (clip_tower, "activated", lambda name, rows: rows),
    "encoder's activation is gelu": (vision_tower, "activated", lambda name, rows: torch.nn.functional.gelu(rows)),
}


@pytest.mark.planted("test_images_anywhere_in_a_chat_give_the_logits_of_transformers")
@pytest.mark.nightly
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_planted_bugs(
    mutation: str, reference: LlavaReference, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, wrong = MUTATIONS[mutation]
    monkeypatch.setattr(where, name, wrong)
    engine = LLM(folder, num_kv_blocks=80, max_num_batched_tokens=8, dtype="float32", max_num_seqs=1)
    conversations = [(text, picture(seed)) for text in ("ab", "abc", "abcd") for seed in (1, 5)]
    with pytest.raises(AssertionError):
        check(reference, engine, *conversations)


def test_callers_with_different_salts_share_no_encoded_image(llm: Callable[..., LLM]) -> None:
    """The time to the first token would show whether another caller had sent the image."""
    engine = llm().engine
    prompt = {"prompt": "<image> What?", "multi_modal_data": {"image": picture(6)}}
    answers = []
    for salt, encoded in (("one", 1), ("two", 2), ("one", 2), ("", 3), ("", 3)):
        engine.add_request(prompt, _GREEDY, cache_salt=salt, stream=False)
        while engine.has_unfinished:
            answers += [output.outputs[0].token_ids for output in engine.step()]
        assert engine.core.preparers.images.num_encoded == encoded
    assert len(answers) == 5 and all(answer == answers[0] for answer in answers)
