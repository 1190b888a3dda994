"""config.json is read as transformers reads it; what we would compute wrongly is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ModelLoadError
from chairlift.models.hf_config import NetworkConfig, parse_config
from chairlift.models.model_files import read_config
from tests.models.tiny import FAMILIES, tiny_hf_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "attention_bias": False,
    "pretraining_tp": 1,
}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "use_mrope": False,
    "eos_token_id": 151643,
}


def test_a_llama_config_of_the_old_form_is_read() -> None:
    config = parse_config(LLAMA)
    assert (config.head_dim, config.num_key_value_heads, config.max_model_len) == (64, 8, 131072)
    assert (config.rope.rope_type, config.rope.factor, config.rope.theta) == ("llama3", 32.0, 500000.0)
    assert (config.dtype, config.tie_word_embeddings) == ("bfloat16", True)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.layer_windows == (None,) * 16
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)


def test_the_window_of_a_qwen2_counts_only_where_it_is_on() -> None:
    config = parse_config(QWEN2)
    assert (config.head_dim, config.qkv_bias, config.o_bias) == (64, True, False)
    assert config.layer_windows == (None,) * 24
    windowed = parse_config({**QWEN2, "use_sliding_window": True, "sliding_window": 100})
    assert windowed.layer_windows == (None,) * 21 + (100,) * 3


def test_generation_config_has_the_last_word_on_eos() -> None:
    assert parse_config(QWEN2, {"eos_token_id": [151645, 151643, 151645]}).eos_token_ids == (151645, 151643)
    assert parse_config(QWEN2, {"temperature": 0.7}).eos_token_ids == (151643,)
    assert parse_config({**QWEN2, "eos_token_id": None}).eos_token_ids == ()


def test_generation_config_says_how_to_sample() -> None:
    asked = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1, "min_p": None}
    config = parse_config(QWEN2, {**asked, "do_sample": True, "max_new_tokens": 2048, "num_beams": 4})
    assert config.sampling_defaults == {name: value for name, value in asked.items() if value is not None}
    assert parse_config(QWEN2).sampling_defaults == {}


def test_a_model_that_does_not_sample_is_greedy_by_default() -> None:
    asked = {"do_sample": False, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    assert parse_config(QWEN2, asked).sampling_defaults == {"temperature": 0.0, "repetition_penalty": 1.1}
    assert parse_config(QWEN2, {"do_sample": None, "top_k": 5}).sampling_defaults == {"top_k": 5}
    with pytest.raises(ModelLoadError, match=r"generation_config.json: do_sample must be true or false, got 'no'"):
        parse_config(QWEN2, {"do_sample": "no"})


def test_settings_of_a_generation_config_without_effect_are_reported() -> None:
    applied = {"do_sample": True, "temperature": 0.5, "eos_token_id": [1, 2], "top_k": 50, "repetition_penalty": 1.1}
    neutral = {
        **{"num_beams": 1, "max_new_tokens": None, "typical_p": 1.0, "min_length": 0, "suppress_tokens": []},
        **{"pad_token_id": 3, "bos_token_id": 1, "use_cache": True, "transformers_version": "5", "max_length": 32768},
        **{"output_scores": True, "assistant_lookbehind": 10, "length_penalty": 1.0, "guidance_scale": None},
    }
    assert parse_config(QWEN2, {**applied, **neutral}).notes() == []
    told = {
        **{"max_new_tokens": 256, "max_length": 512, "min_new_tokens": 4, "stop_strings": ["X"], "num_beams": 4},
        **{"suppress_tokens": [7], "bad_words_ids": [[5]], "forced_bos_token_id": 9, "forced_eos_token_id": 2},
        **{"begin_suppress_tokens": [1], "no_repeat_ngram_size": 3, "typical_p": 0.9, "made_up": 1},
    }
    config = parse_config(QWEN2, {**applied, **neutral, **told})
    assert config.generation_unapplied == told
    (note,) = config.notes()
    assert all(f"{name} {value}" in note for name, value in told.items())
    assert note.endswith(
        "requests can set these parameters instead: bad_words, max_tokens, min_tokens, stop, logit_bias"
    )
    assert config.notes(with_generation_config=False) == []


def test_dynamic_rope_says_how_it_differs() -> None:
    config = parse_config({**QWEN2, "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    (note,) = config.notes()
    assert "scaled for 131,072 tokens" in note and "only past 32,768" in note
    assert config.for_length(32769) is config
    short = config.for_length(32768)
    assert (short.notes(), short.rope) == ([], parse_config(QWEN2).rope)
    assert parse_config({**QWEN2, "rope_scaling": {"type": "linear", "factor": 4.0}}).notes() == []


def test_longest_sequence_counts_rotary_scaling_in() -> None:
    def longest(**rope: Any) -> int:
        return parse_config({**QWEN2, "rope_scaling": rope}).max_model_len

    assert longest(type="linear", factor=4.0) == longest(type="dynamic", factor=4.0) == 131072
    assert longest(type="yarn", factor=4.0, original_max_position_embeddings=32768) == 131072
    assert parse_config(QWEN2).max_model_len == 32768
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    beside = parse_config({**QWEN2, "rope_scaling": rope, "original_max_position_embeddings": 16384})
    assert (beside.rope.original_max_position_embeddings, beside.max_model_len) == (16384, 65536)


def test_a_model_of_dual_chunk_attention_is_served_up_to_its_first_chunk() -> None:
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    long = {**QWEN2, "max_position_embeddings": 1010000, "dual_chunk_attention_config": chunks}
    assert parse_config(long).max_model_len == 253952
    assert parse_config({**QWEN2, "dual_chunk_attention_config": chunks}).max_model_len == 32768


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, family)
    whole = read_config(model_dir)
    path = model_dir / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("hidden_act" if "hidden_act" in raw else "activation_function")
    for key in (
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "rms_norm_eps",
        "layer_norm_epsilon",
        "use_sliding_window",
        "layer_types",
    ):
        raw.pop(key, None)
    assert parse_config(raw, json.loads((model_dir / "generation_config.json").read_text())) == whole
    assert whole.dtype == "float32" and whole.eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bloom"}, ["'bloom'", "gpt2", "llama", "mistral3, mixtral", "qwen2_moe, qwen2_vl, qwen3"]),
        ({"model_type": None}, ["None", "supported"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        ({"hidden_size": 0}, ["hidden_size", "1 to 65536", "0"]),
        ({"hidden_size": 2**40}, ["hidden_size"]),
        ({"vocab_size": 3.5}, ["vocab_size", "3.5"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers", "-1"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers"]),
        ({"num_key_value_heads": 5}, ["32", "multiple", "5"]),
        ({"head_dim": 63}, ["head_dim", "63"]),
        ({"head_dim": None, "hidden_size": 2050}, ["2050", "multiple", "32"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps", "small"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"max_position_embeddings": 2**40}, ["max_position_embeddings"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
        ({"torch_dtype": "int8"}, ["int8", "bfloat16"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
        ({"eos_token_id": [1, -1]}, ["eos_token_id"]),
        ({"num_local_experts": 8}, ["num_local_experts"]),
        ({"use_mrope": True}, ["use_mrope"]),
        ({"logit_scale": 0.5}, ["logit_scale", "0.5"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["architectures"]),
        ({"dual_chunk_attention_config": True}, ["dual_chunk_attention_config", "chunk_size", "missing"]),
        ({"dual_chunk_attention_config": {"chunk_size": 8, "local_size": 8}}, ["local_size", "0 to 7"]),
        ({"is_causal": False}, ["is_causal", "text-generation"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["'longrope'", "yarn"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, ["'longrope'", "yarn"]),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, ["mrope_section"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor", "missing"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["factor", "0"]),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, ["factor", "inf"]),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ["low_freq_factor", "missing"]),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        ({"rope_scaling": [1]}, ["rope parameters"]),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "head_dim"]),
        ({"rope_theta": -1}, ["rope_theta", "-1"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}, "rope_scaling": None}, ["partial_rotary_factor"]),
    ],
)
def test_refused_settings_are_named_with_their_file(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse_config({**LLAMA, **change}, where="dir/config.json")
    assert all(word in str(caught.value) for word in ["dir/config.json", *words]), str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["sliding_attention"] * 24},
        {"layer_types": ["full_attention"] * 23},
        {"layer_types": ["linear_attention"] * 24},
        {"use_sliding_window": True, "sliding_window": 0},
        {"use_sliding_window": True, "max_window_layers": -1},
    ],
)
def test_windows_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"layer_types|sliding_window|max_window_layers"):
        parse_config({**QWEN2, **change})


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 100_000, b"1" * 9999]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=name):
        read_config(tmp_path)


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        read_config(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted(
    {*LLAMA, *QWEN2, "rope_parameters", "layer_types", "generation", "dtype", "head_dim", "quantization_config"}
)


@pytest.mark.full
@settings(max_examples=400, deadline=None, derandomize=True)
@given(base=st.sampled_from([LLAMA, QWEN2]), change=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
def test_any_json_is_a_config_or_a_model_load_error(base: dict[str, Any], change: dict[str, Any]) -> None:
    try:
        config = parse_config({**base, **change}, {"eos_token_id": change.get("generation")})
    except ModelLoadError:
        return
    assert isinstance(config, NetworkConfig)
    assert config.num_attention_heads % config.num_key_value_heads == 0 and len(config.layer_windows) > 0
