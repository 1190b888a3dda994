"""Every approximation of a loaded model is named, and an explicit float32 has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM, SamplingParams
from tests.models.gguf.test_exact import one_layer
from tests.models.quantized import packers
from tests.models.quantized.make import model_pair
from tests.models.tiny import tiny_hf_model
from tests.models.vision.tiny import tiny_gemma, tiny_llava, tiny_qwen, tiny_vlm
from tests.native import needs_kernels

ACTIVATIONS = "8-bit activations in matmuls with integer weights"
TO_INT8, TO_BFLOAT16 = "weights rounded to int8", "weights rounded to bfloat16"
SCALES = "scales of weights rounded to float16"


def loaded(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), skip_tokenizer_init=True, num_kv_blocks=32, **settings)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Q8_0", (ACTIVATIONS,)),
        ("Q4_1", (ACTIVATIONS,)),
        ("IQ4_NL", (ACTIVATIONS,)),
        ("Q4_K", (ACTIVATIONS, SCALES)),
        ("Q6_K", (ACTIVATIONS, TO_INT8)),
        ("Q2_K", (ACTIVATIONS, TO_INT8)),
        ("F16", ()),
        ("BF16", ()),
    ],
)
def test_a_gguf_file_is_exact_in_float32_unless_its_integers_are_asked_for(
    tmp_path: Path, name: str, expected: tuple[str, ...]
) -> None:
    path = tmp_path / "model.gguf"
    one_layer(path, name)
    exact, stored = (loaded(path, dtype="float32", **more) for more in ({}, {"quantization": "stored"}))
    usual = loaded(path)
    assert exact.info.approximations == () and exact.info.quantization is None
    assert stored.info.approximations == expected
    assert usual.info.approximations == (*expected, TO_BFLOAT16)  # norms are float32
    assert any("stay integers" in note for note in exact.notes) is bool(expected)
    assert not any("stay integers" in note for note in (*stored.notes, *usual.notes))
    assert len({each.info.fingerprint for each in (exact, stored, usual)}) == (3 if expected else 2)


@needs_kernels
def test_exact_float32_answers_as_the_kernels_of_pytorch_do(tmp_path: Path) -> None:
    path, greedy = tmp_path / "model.gguf", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    one_layer(path, "Q6_K")
    outputs = [
        loaded(path, dtype="float32", kernels=kernels).generate([[5, 9, 60, 3]], greedy)[0].outputs[0].token_ids
        for kernels in ("auto", "torch")
    ]
    assert outputs[0] == outputs[1]


@needs_kernels
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dtype": "float32"}, ()),
        ({"dtype": "bfloat16"}, (TO_BFLOAT16,)),
        ({"dtype": "bfloat16", "kernels": "torch"}, (TO_BFLOAT16,)),
        ({"dtype": "float32", "quantization": "int8"}, (ACTIVATIONS, TO_INT8)),
        ({"dtype": "float32", "kv_cache_dtype": "int8"}, ("8-bit K and V",)),
    ],
)
def test_settings_that_round_a_float32_checkpoint_are_named(
    tmp_path: Path, settings: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert loaded(tiny_hf_model(tmp_path, "llama"), **settings).info.approximations == expected


@needs_kernels
def test_quantised_directories_are_exact_in_float32_too(tmp_path: Path) -> None:
    quantised, _ = model_pair(tmp_path, *packers.gptq())
    assert loaded(quantised, dtype="float32").info.approximations == ()
    assert ACTIVATIONS in loaded(quantised).info.approximations
    assert ACTIVATIONS in loaded(quantised, dtype="float32", quantization="stored").info.approximations


def cast(model_dir: Path, dtype: torch.dtype) -> None:
    path = model_dir / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path, {"format": "pt"})


@needs_kernels
@pytest.mark.parametrize("make", [tiny_vlm, tiny_qwen, tiny_llava, tiny_gemma])
def test_rounded_weights_of_an_image_encoder_are_named(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    model_dir = make(tmp_path / "model")
    images = "weights of the image encoder rounded to bfloat16"
    rounded = LLM(str(model_dir), num_kv_blocks=64, dtype="bfloat16").info
    assert images in rounded.approximations
    assert LLM(str(model_dir), num_kv_blocks=64, dtype="float32").info.approximations == ()
    cast(model_dir, torch.bfloat16)
    exact = LLM(str(model_dir), num_kv_blocks=64, dtype="bfloat16").info
    assert exact.approximations == ()


@needs_kernels
def test_rounded_adapters_are_named(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama")
    names = [loaded(model_dir, dtype=dtype, enable_lora=True).info.approximations for dtype in ("bfloat16", "float32")]
    assert names == [(TO_BFLOAT16, "scaled matrices of adapters rounded to bfloat16"), ()]


@needs_kernels
def test_new_weights_change_the_list_and_the_fingerprint(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama")
    wide = load_file(model_dir / "model.safetensors")
    cast(model_dir, torch.bfloat16)
    llm = loaded(model_dir, dtype="bfloat16")
    assert llm.info.approximations == ()
    llm.update_weights(wide, 1)
    rounded = llm.info
    assert rounded.approximations == (TO_BFLOAT16,)
    llm.update_weights({name: tensor.bfloat16() for name, tensor in wide.items()}, 1)
    assert llm.info.approximations == () and llm.info.fingerprint != rounded.fingerprint


def test_a_static_base_for_dynamic_rotation_is_named(tmp_path: Path) -> None:
    ropes = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    model_dir = tiny_hf_model(tmp_path, "llama", rope_parameters=ropes)
    (found,) = loaded(model_dir, dtype="float32", max_model_len=700).info.approximations
    assert "rope_type dynamic" in found
    assert loaded(model_dir, dtype="float32").info.approximations == ()  # texts end where the base would change
