"""Gemma 3 answers like transformers. The rows of an image attend to each other both ways, in a layer with a window to
those behind the window's begin, so no chunk cuts an image."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM, SamplingParams
from chairlift.core.rows.images import ImageRows
from chairlift.core.scheduler.prompt_budget import PromptBudget
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.executor.input_batch import InputBatch
from chairlift.models.hf_config import parse_config
from chairlift.models.vision.pooled_tower import PooledTower
from chairlift.models.vision.squares import FramedProcessor, SquareSettings
from chairlift.models.vision.vision_files import read_processor
from tests.models.vision.test_equivalence import chat, check
from tests.models.vision.tiny import GEMMA_SIZE, GemmaReference, gemma_tokenizer, picture, tiny_gemma
from tests.native import needs_kernels

pytestmark = needs_kernels
SETTINGS = {"max_num_seqs": 4}
"""A step of 24 tokens has room for an image beside three decodes."""
_GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gemma(tmp_path_factory.mktemp("gemma") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> GemmaReference:
    return GemmaReference(folder)


def test_images_anywhere_in_a_chat_give_the_logits_of_transformers(
    reference: GemmaReference, llm: Callable[..., LLM]
) -> None:
    one, two, wide = picture(1, 40, 24), picture(2, 24, 64), picture(3, 90, 7)
    conversations = [
        (one, "What?"),
        ("Before\n\n", one, "\n and behind"),
        ("Last ", two),
        (one, " or ", two, wide),
        (two, "\n", two, " twice"),
        ("no image",),
    ]
    check(reference, llm(), *conversations)


@pytest.mark.nightly
@pytest.mark.parametrize("budget", range(11, 36))
def test_a_chunk_may_end_at_each_other_position(
    budget: int, reference: GemmaReference, llm: Callable[..., LLM]
) -> None:
    engine = llm(max_num_batched_tokens=budget, max_num_seqs=2, enable_prefix_caching=False)
    check(reference, engine, ("ab", picture(1, 40, 24), "?"), (picture(2, 24, 64), "c"))


def test_chunks_end_before_an_image_or_behind_it(reference: GemmaReference, llm: Callable[..., LLM]) -> None:
    """Each prompt shifts the border of the chunks by one position."""
    engine = llm(max_num_batched_tokens=10, max_num_seqs=1, enable_prefix_caching=False)
    check(reference, engine, *(("x" * count, picture(4)) for count in range(10)))


def test_an_image_waits_for_a_step_with_room(reference: GemmaReference, llm: Callable[..., LLM]) -> None:
    """With three answers under way a step has room for 9 tokens of prompts: exactly an image."""
    engine = llm(max_num_batched_tokens=12, max_num_seqs=3, enable_prefix_caching=False)
    check(reference, engine, *((("ab", picture(seed), "cd", picture(seed + 1))) for seed in range(4)))


def test_prefixes_end_before_or_behind_an_image(reference: GemmaReference, llm: Callable[..., LLM]) -> None:
    """Blocks have 16 positions. A hit that would end inside an image ends before it."""
    engine = llm()
    one, other = picture(1), picture(5)
    check(reference, engine, ("twelve more ", one, one, "and a text behind it"))
    encoded = engine.engine.core.preparers.images.num_encoded
    (behind,) = check(reference, engine, ("twelve more ", one, one, "and a text behind IT"))
    (changed,) = check(reference, engine, ("twelve more ", one, other, "and a text behind it"))
    (first,) = check(reference, engine, ("twelve more ", other, one, "and a text behind it"))
    # the images have positions 22 to 30 and 37 to 45; blocks end at 16, 32, 48 and 64
    found = [each.num_cached_tokens for each in (behind, changed, first)]
    assert found == [64, 32, 16]
    assert engine.engine.core.preparers.images.num_encoded == encoded + 1, (
        "an image that was seen before was encoded again"
    )
    inside = llm()
    check(reference, inside, ("ten more", one, "and a text behind it"))
    (short,) = check(reference, inside, ("ten more", one, "And"))  # the image has positions 18 to 26
    assert short.num_cached_tokens == 16


def test_a_hit_that_ends_inside_an_image_is_shortened(reference: GemmaReference, llm: Callable[..., LLM]) -> None:
    """The image has positions 26 to 34, and the second block ends at 32. The same image with the text of another
    length behind it hits only the first block, because the third block differs."""
    engine = llm()
    check(reference, engine, ("sixteen letters.", picture(1), "and a text behind it"))
    (cut,) = check(reference, engine, ("sixteen letters.", picture(1), "another text behind it"))
    assert cut.num_cached_tokens == 16


def test_several_answers_share_an_image(reference: GemmaReference, llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, n=3)
    image = picture(6, 40, 24)
    (output,) = llm().chat(chat(image, "What?"), params)
    _, tokens, _ = reference.answer(reference.text_of(image, "What?"), [image], 6)
    assert [answer.token_ids for answer in output.outputs] == [tokens] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("swap", [0, 1 << 20])
@pytest.mark.parametrize("blocks", [14, 17])
@pytest.mark.usefixtures("still_clock")
def test_preempted_requests_keep_their_images(
    blocks: int, swap: int, reference: GemmaReference, llm: Callable[..., LLM]
) -> None:
    cramped = {"num_kv_blocks": blocks, "max_num_seqs": 3, "admission_watermark": 0.0, "swap_space_bytes": swap}
    engine = llm(enable_prefix_caching=False, **cramped)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    images = [picture(seed, 40, 24) for seed in range(3)]
    outputs = engine.chat([chat(image, "What?", image) for image in images], params)
    assert engine.engine.scheduler.num_preemptions, "the cache was large enough for all"
    for image, output in zip(images, outputs, strict=True):
        wanted = reference.answer(reference.text_of(image, "What?", image), [image, image], 40)[1]
        assert output.outputs[0].token_ids == wanted


@pytest.mark.nightly
def test_bits_do_not_depend_on_company(llm: Callable[..., LLM]) -> None:
    conversations = [chat(picture(seed), "?" * seed) for seed in range(1, 5)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    alone = [llm(enable_prefix_caching=False).chat(each, params)[0].outputs[0].logprobs for each in conversations]
    together = llm(enable_prefix_caching=False, max_num_batched_tokens=64).chat(conversations, params)
    assert [output.outputs[0].logprobs for output in together] == alone


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["published", "nested"])
def test_files_with_other_names_of_tensors_load(form: str, tmp_path: Path) -> None:
    """Published files have one more level in the encoder; files of some versions nest all tensors under ``model``."""
    folder = tiny_gemma(tmp_path / "model")
    reference = GemmaReference(folder)
    published = {"vision_tower.": "vision_tower.vision_model."}
    nested = {
        "vision_tower.": "model.vision_tower.",
        "language_model.model.": "model.language_model.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    }
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in (published if form == "published" else nested).items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    del raw["tie_word_embeddings"]  # published files leave it out
    (folder / "config.json").write_text(json.dumps(raw))
    check(reference, LLM(folder, num_kv_blocks=40, dtype="float32"), (picture(1), "What?"))


@pytest.mark.parametrize("size", [(1, 1), (24, 24), (25, 31), (300, 3), (1000, 700)], ids=str)
def test_pixels_are_those_of_transformers(size: tuple[int, int], folder: Path, reference: GemmaReference) -> None:
    processor = read_processor(folder, gemma_tokenizer())
    assert processor is not None
    given = [picture(1, *size)]
    wanted = reference.images(given, return_tensors="pt", do_rescale=False, do_normalize=False)["pixel_values"]
    (tile,) = processor.prepare("it", given[0]).tiles
    found = torch.frombuffer(bytearray(tile.pixels), dtype=torch.uint8).view(3, GEMMA_SIZE, GEMMA_SIZE)
    assert torch.equal(found.float(), wanted[0].float())


class _Lines:
    """A tokenizer whose runs of up to five line breaks are one token, as in Gemma's; letters have their own."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text == "<start_of_image>":
            return [1]
        found: list[int] = []
        while text:
            count = min(len(text) - len(text.lstrip("\n")), 5)
            found.append(100 + count if count else ord(text[0]) + 200)
            text = text[max(count, 1) :]
        return found


@pytest.mark.parametrize(
    "text",
    ["@", "a@b", "a\n@\n\nb", "@@", "@\n@", "\n\n@\n\n@\n", "a\n\n\n\n@b\n@\n\n\nc", "a\nb@c\nd", "@" + "\n" * 40],
)
def test_line_breaks_around_an_image_are_tokenized_together(text: str, folder: Path) -> None:
    settings = SquareSettings(size=8, resized=(8, 8), resample=2, rows=3, image_token_id=2, around=(1, 3))
    processor, tokens = FramedProcessor(settings, _Lines(), folder), _Lines()
    wanted: list[int] = []
    for index, part in enumerate(text.replace("@", "\n\n@\n\n").split("@")):
        wanted += [*([1, 2, 2, 2, 3] if index else []), *tokens.encode(part)]
    given: list[int] = []
    for index, part in enumerate(text.split("@")):
        given += [*([1] if index else []), *tokens.encode(part)]
    image = processor.prepare("it", picture(1))
    found, spans = processor.expand(given, [image] * text.count("@"))
    assert found == wanted
    assert [found[span.position : span.end] for span in spans] == [[2, 2, 2]] * text.count("@")


def test_files_and_settings_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    def read(part: str = "", **changes: Any) -> None:
        raw = json.loads((folder / "config.json").read_text())
        (raw[part] if part else raw).update(changes)
        parse_config(raw)

    with pytest.raises(ModelLoadError, match="model_type 'clip_vision_model' is not 'siglip_vision_model'"):
        read("vision_config", model_type="clip_vision_model")
    for rows in (8, 16):
        with pytest.raises(ModelLoadError, match=f"mm_tokens_per_image is {rows}, and 6 x 6 patches"):
            read(mm_tokens_per_image=rows)
    with pytest.raises(ModelLoadError, match="do_pan_and_scan is true"):
        read_processor(tiny_gemma(tmp_path / "pan", do_pan_and_scan=True), gemma_tokenizer())
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 12, but an image of this model has 9 tokens"):
        LLM(folder, num_kv_blocks=40, dtype="float32", max_num_batched_tokens=12, max_num_seqs=4)


_image_rows, _seen_ends, _pool = InputBatch._image_rows, InputBatch._seen_ends, PooledTower._pool


def _shifted(self: InputBatch, chunks: Any, at: int) -> Any:
    return [(place - 1, count, key, first) for place, count, key, first in _image_rows(self, chunks, at) if place]


def _last_row_unseen(self: InputBatch, chunks: Any, positions: Any, at: int) -> Any:
    found = _seen_ends(self, chunks, positions, at)
    return None if found is None else np.maximum(found - 1, positions + 1)


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "rows shifted by one": (InputBatch, "_image_rows", _shifted),
    "causal inside an image": (InputBatch, "_seen_ends", lambda self, chunks, positions, at: None),
    "last row of an image unseen": (InputBatch, "_seen_ends", _last_row_unseen),
    "hash left out of the key": (ImageRows, "marks", lambda self, request, start, end: b""),
    "order of patches": (PooledTower, "_pool", lambda self, state: _pool(self, state.flip(0))),
}


@pytest.mark.planted("test_images_anywhere_in_a_chat_give_the_logits_of_transformers")
@pytest.mark.nightly
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_planted_bugs(
    mutation: str, reference: GemmaReference, llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, wrong = MUTATIONS[mutation]
    monkeypatch.setattr(where, name, wrong)
    engine = llm(max_num_batched_tokens=17, max_num_seqs=1)
    conversations = [(text, picture(seed)) for text in ("ab", "abc", "abcd") for seed in (1, 5)]
    with pytest.raises(AssertionError):
        check(reference, engine, *conversations)


def test_a_chunk_that_cuts_an_image_is_refused(llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptBudget, "_uncut", lambda self, request, num_tokens, step: num_tokens)
    engine = llm(max_num_batched_tokens=13, max_num_seqs=1)
    (output,) = engine.chat(chat("ab", picture(1)), _GREEDY)
    assert output.outputs[0].finish_reason == "error"


def test_a_hit_that_cuts_an_image_is_refused(llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm()
    engine.chat(chat("sixteen letters.", picture(1), "and a text behind it"), _GREEDY)
    monkeypatch.setattr(ImageRows, "whole", lambda self, request, index: None)
    (output,) = engine.chat(chat("sixteen letters.", picture(1), "another text behind it"), _GREEDY)
    assert output.outputs[0].finish_reason == "error"
