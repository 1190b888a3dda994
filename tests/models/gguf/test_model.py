"""A model in a GGUF file is the model that it was made from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.errors import ModelLoadError
from chairlift.kernels.weights import NATIVE, PLAIN
from chairlift.models.layers.linear import Matrix
from chairlift.models.loader import load_model, resolve_model_dir
from chairlift.models.model_files import read_config
from chairlift.models.rope_config import RopeConfig
from tests.models.gguf.make import real_gguf, to_gguf
from tests.models.paged import packed_logits
from tests.models.test_families import close, prompt
from tests.models.tiny import hf_logits, hf_model, tiny_hf_model
from tests.native import needs_kernels

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def parameters(model_dir: Path) -> dict[str, torch.Tensor]:
    config = read_config(model_dir)
    return dict(load_model(model_dir, config, "float32", weight_format=PLAIN).named_parameters())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_float32_weights_equal_those_of_the_directory(tmp_path: Path, family: str) -> None:
    model_dir = tiny_hf_model(tmp_path, family)
    path = to_gguf(model_dir, tmp_path / "model.gguf")
    ours, theirs = parameters(path), parameters(model_dir)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    found, wanted = read_config(path), read_config(model_dir)
    assert found.layer_windows == wanted.layer_windows and found.eos_token_ids == wanted.eos_token_ids
    assert (found.dtype, found.head_dim, found.rope.theta) == ("float32", wanted.head_dim, wanted.rope.theta)


_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_LONGROPE |= {"short_factor": [1.0, 1.25, 1.5, 1.75], "long_factor": [2.0, 3.0, 4.0, 5.0]}
_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
_GEMMA2 = {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 4.0}
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", _GEMMA2),
    "gemma2-27b": ("gemma2", {**_GEMMA2, "num_hidden_layers": 46, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        {"layer_types": None, "num_hidden_layers": 6, "query_pre_attn_scalar": 32, "rope_parameters": _GEMMA3_ROPES},
    ),
    "phi3": ("phi3", {"sliding_window": 9, "tie_word_embeddings": False}),
    "phi3-longrope": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 8}),
}


@pytest.mark.parametrize("variant", FURTHER)
def test_settings_that_a_file_lacks_are_those_of_its_architecture(tmp_path: Path, variant: str) -> None:
    """Norms that were stored with 1 added, which layers have windows, what scores are divided by, rotations."""
    family, overrides = FURTHER[variant]
    model_dir = tiny_hf_model(tmp_path, family, **overrides)
    path = to_gguf(model_dir, tmp_path / "model.gguf")
    found, wanted = read_config(path), read_config(model_dir)
    assert found.norm_eps == pytest.approx(wanted.norm_eps, rel=1e-6)  # the file has float32
    same: dict[str, Any] = {"generation_unapplied": found.generation_unapplied, "norm_eps": found.norm_eps}
    magnitude = found.rope.attention_factor
    assert (magnitude or 1.0) == pytest.approx(wanted.rope.attention_factor or 1.0, rel=1e-6)
    same["rope"] = dataclasses.replace(wanted.rope, attention_factor=magnitude)
    assert found == dataclasses.replace(wanted, **same)
    ours, theirs = parameters(path), parameters(model_dir)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-7)
    model = load_model(path, found.for_length(40), "float32")
    tokens = prompt(40)
    assert close(packed_logits(model, [tokens])[0], hf_logits(hf_model(model_dir), tokens))


@needs_kernels
@pytest.mark.parametrize("family", ["gemma2", "phi3-longrope"])
def test_answers_of_quantised_gemma_and_phi_equal_those_of_their_weights(tmp_path: Path, family: str) -> None:
    name, overrides = FURTHER[family]
    path = to_gguf(tiny_hf_model(tmp_path, name, **overrides), tmp_path / "model.gguf", "Q8_0")
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 64}
    settings |= {"max_model_len": 128}
    prompts = [[5, 9, 100, 3, 8, 70, 11, 2, 40], list(range(2, 40))]
    answers = []
    for more in ({"quantization": "none", "kernels": "torch"}, {"quantization": "none"}):
        outputs = LLM(str(path), **settings, **more).generate(prompts, GREEDY)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert LLM(str(path), **settings, quantization="stored").info.quantization == "int8"


@needs_kernels
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_the_native_kernels_keep_the_codes_of_the_file(tmp_path: Path, kind: str) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", tie_word_embeddings=True)
    path = to_gguf(model_dir, tmp_path / "model.gguf", kind)
    config = read_config(path)
    plain, native = (load_model(path, config, "float32", weight_format=each) for each in (PLAIN, NATIVE))
    assert native.quantization == ("int4" if kind.startswith("Q4") else "int8")
    assert native.weight_bytes < 0.5 * plain.weight_bytes
    for name, layer in native.named_modules():
        if isinstance(layer, Matrix):
            assert torch.equal(layer.weight.unpack(), plain.get_submodule(name).weight), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_answers_equal_those_of_the_dequantised_weights(tmp_path: Path, kind: str, kernels: str) -> None:
    """The plainest path: the same weights, dequantised by the public package into a directory."""
    import gguf
    from safetensors.numpy import load_file, save_file

    model_dir = tiny_hf_model(tmp_path, "llama", tie_word_embeddings=True)
    path = to_gguf(model_dir, tmp_path / "model.gguf", kind)
    tensors = load_file(model_dir / "model.safetensors")
    number = gguf.GGMLQuantizationType[kind]
    for name, values in tensors.items():
        if values.ndim > 1:
            tensors[name] = gguf.quants.dequantize(gguf.quants.quantize(values, number), number)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    prompts = [[5, 9, 100, 3], list(range(2, 40))]
    settings: dict[str, Any] = {
        "dtype": "float32",
        "quantization": "none",
        "skip_tokenizer_init": True,
        "kernels": kernels,
        "num_kv_blocks": 64,
    }
    answers = []
    for model in (path, model_dir):
        outputs = LLM(str(model), **settings).generate(prompts, GREEDY)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_frequency_divisors_of_llama_3_give_its_rotation(tmp_path: Path) -> None:
    """llama.cpp stores the result of Llama 3.1's scaling, not its settings."""
    from chairlift.models.layers.rotary import inverse_frequencies

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model_dir = tiny_hf_model(tmp_path, "llama", rope_parameters=scaling)
    wanted, _ = inverse_frequencies(16, read_config(model_dir).rope, 512)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
    path = to_gguf(model_dir, tmp_path / "model.gguf", divisors=(plain / wanted).numpy())
    found, _ = inverse_frequencies(16, read_config(path).rope, 512)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert not torch.equal(found, plain)
    assert read_config(path).shortest_prompt == 1  # unlike LongRoPE's, the divisors hold for texts of any length


def test_all_settings_of_yarn_are_read(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "attn_factor": 1.0}
    changes = {f"llama.rope.scaling.{key}": value for key, value in yarn.items()}
    changes |= {"llama.rope.scaling.yarn_beta_fast": 8.0, "llama.rope.scaling.yarn_beta_slow": 2.0}
    path = to_gguf(tiny_hf_model(tmp_path, "llama"), tmp_path / "model.gguf", **changes)
    assert read_config(path).rope == RopeConfig("yarn", 1e4, 4.0, 128, beta_fast=8.0, beta_slow=2.0)
    both = to_gguf(tmp_path / "llama-0", tmp_path / "both.gguf", divisors=np.ones(8, np.float32), **changes)
    with pytest.raises(ModelLoadError, match=r"type is yarn, beside a tensor rope_freqs.weight"):
        read_config(both)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general.architecture": "phimoe"},
            "architecture 'phimoe' is not supported.*safetensors.*: arcee, baili.*, chatglm",
        ),
        (
            {"general.architecture": "mamba"},
            "architecture 'mamba' is not supported.*safetensors.*: arcee, baili.*, chatglm",
        ),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
        ({"llama.expert_gating_func": 2}, "expert_gating_func is 2, which llama models do not compute"),
        ({"llama.rope.dimension_count": 8}, "is 8 of 16 dimensions"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.rope.scaling.attn_factor": 1.25}, "attn_factor is 1.25, which is supported with the type yarn only"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.yarn_ext_factor": 0.5,
            },
            "yarn_ext_factor is 0.5, which is not supported; only 1 is",
        ),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier changes the magnitude of YaRN"),
        ({"llama.attention.value_length": 8, "llama.attention.key_length": 16}, "differs from key_length 16"),
        ({"llama.attention.head_count": [4, 4, 2]}, "differs between layers"),
        ({"llama.block_count": "three"}, "llama.block_count must be a number, got 'three'"),
    ],
)
def test_impossible_metadata_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama")
    path = to_gguf(model_dir, tmp_path / "model.gguf", **changes)
    with pytest.raises(ModelLoadError, match=message):
        read_config(resolve_model_dir(path))


@pytest.mark.nightly
def test_a_real_model_answers_as_transformers_does() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = real_gguf()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    questions = ("What is the capital of France?", "Write a haiku about snow.", "Why is the sky blue?", "2 + 2 =")
    questions += ("Name three rivers.", "Translate 'good morning' to Spanish.", "What is a GPU?", "Tell me a joke.")
    questions += ("Who wrote Hamlet?", "Define entropy.", "List the planets.", "How do I boil an egg?")
    chats = [[{"role": "user", "content": question}] for question in questions]
    llm = LLM(str(path), dtype="float32", quantization="none", max_model_len=256)
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
    for chat, output in zip(chats, outputs, strict=True):
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert output.prompt_token_ids == prompt
        given = torch.tensor([prompt])
        whole = torch.ones_like(given)  # else tokens that are also used to pad would not be seen
        ids = theirs.generate(given, attention_mask=whole, max_new_tokens=32, do_sample=False, eos_token_id=None)
        assert output.outputs[0].token_ids == ids[0, len(prompt) :].tolist()
