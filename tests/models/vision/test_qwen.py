"""Qwen's families that read images answer like transformers, however the prompt is cut, shared or computed again.

Their tokens have positions on three axes, which are not the numbers of tokens, and Qwen3-VL adds rows of images behind
its first layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from chairlift import LLM, SamplingParams
from chairlift.base.image_spans import ImageSpan, axes_of
from chairlift.core.rows.images import ImageRows
from chairlift.errors import ModelLoadError, RequestError
from chairlift.executor import input_batch
from chairlift.executor.input_batch import InputBatch
from chairlift.kernels.cpu import program
from chairlift.kernels.cpu.program import StepProgram
from chairlift.models.hf_config import NetworkConfig, parse_config, read_hf_config
from chairlift.models.vision.patch_tower import PatchTower
from chairlift.models.vision.vision_files import read_processor
from tests.models.vision.test_equivalence import chat, check
from tests.models.vision.tiny import SQUARE, QwenReference, picture, qwen_tokenizer, tiny_qwen
from tests.native import needs_kernels

pytestmark = needs_kernels
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=[*FAMILIES[:2], *(pytest.param(family, marks=pytest.mark.nightly) for family in FAMILIES[2:])],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> QwenReference:
    return QwenReference(folder)


def test_images_anywhere_in_a_chat_give_the_logits_of_transformers(
    reference: QwenReference, llm: Callable[..., LLM]
) -> None:
    one, two, wide = picture(1, 40, 24), picture(2, 24, 64), picture(3, 80, 8)
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
@pytest.mark.parametrize("budget", range(17, 45))
def test_a_chunk_may_end_at_each_position(budget: int, reference: QwenReference, llm: Callable[..., LLM]) -> None:
    engine = llm(max_num_batched_tokens=budget, max_num_seqs=2, enable_prefix_caching=False)
    check(reference, engine, ("ab", picture(1, 40, 24), "?"), (picture(2, 24, 64), "c"))


def test_a_chunk_ends_inside_an_image(reference: QwenReference, llm: Callable[..., LLM]) -> None:
    """Each prompt shifts the border of the chunks by one position."""
    engine = llm(max_num_batched_tokens=17, max_num_seqs=1, enable_prefix_caching=False)
    check(reference, engine, *(("x" * count, picture(4, 40, 24)) for count in range(5)))


def test_a_prompt_may_end_inside_an_image(reference: QwenReference, llm: Callable[..., LLM]) -> None:
    """Its last token is a row of the image, computed in a chunk of one token."""
    image = picture(4, 32, 24)
    engine = llm(max_num_batched_tokens=12, enable_prefix_caching=False)
    (output,) = engine.generate([{"prompt": "a<|image_pad|>", "multi_modal_data": {"image": image}}], _GREEDY)
    prompt, tokens, _ = reference.answer("a<|image_pad|>", [image], 6)
    assert len(prompt) == 13
    assert (output.prompt_token_ids, output.outputs[0].token_ids) == (prompt, tokens)


def test_prefixes_end_before_inside_and_behind_an_image(reference: QwenReference, llm: Callable[..., LLM]) -> None:
    """Blocks have 16 positions: a shared text before an image, the same image with another text behind it, and another
    image with the same placeholders."""
    engine = llm()
    one, other = picture(1, 48, 40), picture(5, 48, 40)
    check(reference, engine, ("twenty letters before", one, "and a text behind it"))
    encoded = engine.engine.core.preparers.images.num_encoded
    (behind,) = check(reference, engine, ("twenty letters before", one, "and a text behind IT"))
    (before,) = check(reference, engine, ("twenty letters before", other, "and a text behind it"))
    (cut,) = check(reference, engine, ("twenty letters before", one, one, "and a text behind it"))
    if reference.model.config.model_type.startswith("qwen3_5"):
        return  # a hit ends where a state is stored
    # the image has positions 28 to 57
    assert [each.num_cached_tokens for each in (before, cut, behind)] == [16, 48, 64]
    assert engine.engine.core.preparers.images.num_encoded == encoded + 1, (
        "an image that was seen before was encoded again"
    )


def test_several_answers_share_an_image(reference: QwenReference, llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, n=3)
    image = picture(6, 40, 24)
    (output,) = llm().chat(chat(image, "What?"), params)
    _, tokens, _ = reference.answer(reference.text_of(image, "What?"), [image], 6)
    assert [answer.token_ids for answer in output.outputs] == [tokens] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("swap", [0, 1 << 20])
@pytest.mark.usefixtures("still_clock")
def test_preempted_requests_keep_their_positions(swap: int, reference: QwenReference, llm: Callable[..., LLM]) -> None:
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
def test_bits_do_not_depend_on_company(folder: Path, llm: Callable[..., LLM]) -> None:
    conversations = [chat(picture(seed, 40, 16 + 8 * seed), "?" * seed) for seed in range(1, 5)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    alone = [llm(enable_prefix_caching=False).chat(each, params)[0].outputs[0].logprobs for each in conversations]
    together = llm(enable_prefix_caching=False, max_num_seqs=4, max_num_batched_tokens=64).chat(conversations, params)
    assert [output.outputs[0].logprobs for output in together] == alone


@pytest.mark.nightly
def test_half_precision_stays_near(reference: QwenReference, llm: Callable[..., LLM]) -> None:
    """Rows are added in bfloat16 as well."""
    image = picture(1, 40, 24)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm(dtype="bfloat16").chat(chat("ab", image, "cd"), params)
    given = reference.inputs(reference.text_of("ab", image, "cd"), [image])
    with torch.no_grad():
        logits = reference.model(**reference.known(given), use_cache=False).logits[0].log_softmax(-1)
    prompt = output.prompt_token_ids
    wanted = [float(logits[at - 1, token]) for at, token in enumerate(prompt) if at]
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    nets = reference.model.config.model_type.startswith("qwen3_5")  # whose states add up what was rounded
    assert np.abs(np.array(found) - wanted).mean() < (0.5 if nets else 0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_added_as_torch_adds_them(dtype: torch.dtype) -> None:
    into, rows = torch.randn(2, 40, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted, found = into + rows, into.clone()
    program._add_rows(found.view(torch.uint8).numpy(), rows.view(torch.uint8).numpy(), dtype)
    assert torch.equal(found, wanted)


SIZES = [(1, 1), (8, 5), (16, 16), (17, 16), (64, 64), (70, 50), (500, 3), (3, 500), (1000, 700)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_are_those_of_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    folder = tiny_qwen(tmp_path / "model")
    theirs = Qwen2VLImageProcessorPil.from_pretrained(folder)([picture(1, *size)], return_tensors="pt")
    config, processor = read_hf_config(folder).vision, read_processor(folder, qwen_tokenizer())
    assert processor is not None
    (tile,) = processor.prepare("it", picture(1, *size)).tiles
    assert (1, *tile.grid) == tuple(theirs["image_grid_thw"][0].tolist())
    tower = object.__new__(PatchTower)
    tower.config = config
    found = tower._squares(
        torch.frombuffer(bytearray(tile.pixels), dtype=torch.uint8)
        .view(3, tile.grid[0], SQUARE // 2, tile.grid[1], SQUARE // 2)
        .permute(1, 3, 0, 2, 4)
        .flatten(2)
    )
    mean, deviation = (torch.tensor(values).view(3, 1) for values in ([0.5, 0.4, 0.6], [0.5, 0.6, 0.4]))
    normal = ((found.view(len(found), 3, -1) / 255 - mean) / deviation).flatten(1)
    frame = theirs["pixel_values"].view(len(found), 3, 2, -1)[:, :, 0].flatten(1)
    assert torch.allclose(normal, frame, atol=1e-5)


def test_images_that_are_too_long_are_refused(tmp_path: Path) -> None:
    processor = read_processor(tiny_qwen(tmp_path / "model"), qwen_tokenizer())
    assert processor is not None
    with pytest.raises(RequestError, match="one side may be 200 times as long"):
        processor.prepare("it", picture(1, 500, 2))
    whole = read_processor(tiny_qwen(tmp_path / "whole", do_resize=False), qwen_tokenizer())
    assert whole is not None
    with pytest.raises(RequestError, match="takes multiples of 8"):
        whole.prepare("it", picture(1, 9, 8))


def test_equal_pixels_of_another_shape_are_another_image(tmp_path: Path) -> None:
    processor = read_processor(tiny_qwen(tmp_path / "model"), qwen_tokenizer())
    assert processor is not None
    keys = {processor.prepare("it", Image.new("RGB", size)).tiles[0].key for size in ((32, 16), (16, 32))}
    assert len(keys) == 2


def test_positions_are_those_of_transformers(reference: QwenReference) -> None:
    images = [picture(1, 40, 24), picture(2, 24, 64), picture(3, 64, 16)]
    given = reference.known(reference.inputs(reference.text_of("ab", images[0], images[1], "c", images[2]), images))
    ids = given["input_ids"]
    wanted, delta = reference.model.model.get_rope_index(
        ids, given["mm_token_type_ids"], image_grid_thw=given["image_grid_thw"]
    )
    marker = reference.model.config.image_token_id
    spans, index = list[ImageSpan](), 0
    for _, rows, columns in given["image_grid_thw"].tolist():
        index = ids[0].tolist().index(marker, index)
        spans.append(ImageSpan(index, rows * columns // 4, b"", (rows // 2, columns // 2)))
        index = spans[-1].end
    axes, shift = axes_of(spans)
    assert axes.tolist() == wanted[:, 0, : axes.shape[1]].tolist()
    rest = np.arange(axes.shape[1], ids.shape[1]) + shift
    assert [rest.tolist()] * 3 == wanted[:, 0, axes.shape[1] :].tolist()
    assert shift == int(delta)


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


_WIDTHS = {"qwen2_vl": "hidden_size"}
"""Family -> the key of its encoder's config that has the width of results, if it is not ``out_hidden_size``."""


def test_configs_that_do_not_fit_are_refused(folder: Path) -> None:
    def read(part: str, **changes: Any) -> NetworkConfig:
        raw = config_of(folder)
        raw[part] |= changes
        return parse_config(raw)

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 4]}
    with pytest.raises(ModelLoadError, match="mrope_section must be three numbers with the sum"):
        read("text_config", rope_parameters=rope)
    with pytest.raises(ModelLoadError, match="text_config must describe a model of type"):
        read("text_config", model_type="llama")
    with pytest.raises(ModelLoadError, match="hidden_size is 32, but the text model has 64"):
        read("vision_config", **{_WIDTHS.get(config_of(folder)["model_type"], "out_hidden_size"): 32})
    with pytest.raises(ModelLoadError, match="hidden_act 'relu' is not one of"):
        read("vision_config", hidden_act="relu")
    key = "deepstack_visual_indexes" if config_of(folder)["model_type"].startswith("qwen3_vl") else ""
    if not key and config_of(folder)["model_type"] != "qwen2_5_vl":
        return  # no layers are named
    with pytest.raises(ModelLoadError, match="must be ascending numbers of layers below 3"):
        read("vision_config", **{key or "fullatt_block_indexes": [2, 1]})
    if key:
        with pytest.raises(ModelLoadError, match="must be fewer than the text model's 3 layers"):
            read("vision_config", **{key: [0, 1, 2]})


@pytest.mark.nightly
def test_other_names_and_forms_of_the_same_model_load(tmp_path: Path) -> None:
    """Old files of Qwen2.5-VL have the text model's keys beside vision_config; newer ones nest all tensors."""
    folder = tiny_qwen(tmp_path / "model", "qwen2_5_vl")
    raw, tensors = config_of(folder), load_file(folder / "model.safetensors")
    text = raw.pop("text_config")
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 10_000.0}
    del text["rope_parameters"]
    (folder / "config.json").write_text(json.dumps({**text, **raw}))
    nested = {
        name.replace("visual.", "model.visual.")
        if name.startswith("visual.")
        else name.replace("model.", "model.language_model."): tensor
        for name, tensor in tensors.items()
    }
    save_file(nested, folder / "model.safetensors", {"format": "pt"})
    same = tiny_qwen(tmp_path / "same", "qwen2_5_vl")
    check(QwenReference(same), LLM(folder, num_kv_blocks=40, dtype="float32"), (picture(1, 40, 24), "What?"))


@pytest.mark.nightly
def test_experts_load_as_they_are_published(tmp_path: Path) -> None:
    """transformers saves the stacks of experts that it computes with, which are the published ones transposed."""
    folder = tiny_qwen(tmp_path / "model", "qwen3_vl_moe")
    tensors = load_file(folder / "model.safetensors")
    stacks = [name for name in tensors if ".mlp.experts." in name]
    assert len(stacks) == 6
    published = {name: tensors[name].transpose(1, 2).contiguous() for name in stacks}
    save_file({**tensors, **published}, folder / "model.safetensors", {"format": "pt"})
    check(QwenReference(folder), LLM(folder, num_kv_blocks=40, dtype="float32"), (picture(1, 40, 24), "What?"))


_image_rows, _axes, _levels = InputBatch._image_rows, axes_of, StepProgram._after_layer
_merge, _windows, _rotation = PatchTower._merge, PatchTower._windows, PatchTower._rotation


def _shifted(self: InputBatch, chunks: Any, at: int) -> Any:
    return [(place - 1, count, key, first) for place, count, key, first in _image_rows(self, chunks, at) if place]


def _as_text(spans: Any) -> Any:
    axes, _ = _axes(spans)
    return np.repeat(np.arange(axes.shape[1], dtype=np.int32)[None], 3, axis=0), 0


def _no_shift(spans: Any) -> Any:
    return _axes(spans)[0], 0


def _turned(spans: Any) -> Any:
    axes, shift = _axes(spans)
    return axes[[0, 2, 1]], shift


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "rows shifted by one": (InputBatch, "_image_rows", _shifted),
    "positions of a text": (input_batch, "axes_of", _as_text),
    "no offset behind an image": (input_batch, "axes_of", _no_shift),
    "height and width exchanged": (input_batch, "axes_of", _turned),
    "hash left out of the key": (ImageRows, "marks", lambda self, request, start, end: b""),
    "squares in another order": (PatchTower, "_merge", lambda self, state, *how: _merge(self, state, *how).flip(0)),
    "patches not turned": (
        PatchTower,
        "_rotation",
        lambda self, grid: (_rotation(self, grid)[0] * 0 + 1, _rotation(self, grid)[1] * 0),
    ),
}
_LEARNED = "learned positions left out"
DEEP: dict[str, tuple[Any, str, Any]] = {
    "rows added after the wrong layer": (
        StepProgram,
        "_after_layer",
        lambda self, layer: _levels(self, 1 - layer),
    ),
    "rows not added": (program, "_add_rows", lambda into, rows, dtype: None),
    _LEARNED: (PatchTower, "_learned", lambda self, table, rows, columns: 0),
}
WINDOWS: dict[str, tuple[Any, str, Any]] = {
    "no windows": (PatchTower, "_windows", lambda self, grid: (_windows(self, grid)[0], [grid[0] * grid[1]])),
}


def lacking(family: str) -> set[str]:
    """Mutations of what the family does not have."""
    found = set() if family == "qwen2_5_vl" else {*WINDOWS}
    has = {_LEARNED} if family.startswith("qwen3_5") else DEEP.keys() if family.startswith("qwen3_vl") else set()
    return found | (DEEP.keys() - has)


@pytest.mark.planted("test_images_anywhere_in_a_chat_give_the_logits_of_transformers")
@pytest.mark.nightly
@pytest.mark.parametrize("mutation", [*MUTATIONS, *DEEP, *WINDOWS])
def test_the_comparison_notices_planted_bugs(
    mutation: str, reference: QwenReference, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, wrong = {**MUTATIONS, **DEEP, **WINDOWS}[mutation]
    monkeypatch.setattr(where, name, wrong)
    engine = LLM(folder, num_kv_blocks=80, max_num_batched_tokens=17, dtype="float32", max_num_seqs=1)
    conversations = [(text, picture(seed, 48, 40)) for text in ("ab", "abc", "abcd") for seed in (1, 5)]
    if mutation in lacking(config_of(folder)["model_type"]):
        check(reference, engine, *conversations[:2])
        return
    with pytest.raises(AssertionError):
        check(reference, engine, *conversations)
