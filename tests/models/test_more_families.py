"""Families that differ from Llama in a few places compute what transformers computes, and each place is noticed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from chairlift.cli.main import main
from chairlift.errors import ModelLoadError
from chairlift.kernels.cpu.library import supported_isas
from chairlift.kernels.weights import PLAIN
from chairlift.models.causal_lm import CausalLM
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.hf_config import NetworkConfig, parse_config
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.logprobs import PROMPTS, check_logprobs
from tests.models.paged import PagedRunner, packed_logits
from tests.models.test_families import check_packed_and_chunked, close, load, prompt
from tests.models.tiny import MORE_FAMILIES, hf_logits, hf_model, tiny_hf_model
from tests.native import needs_kernels

_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}


def _longrope(pairs: int) -> dict[str, Any]:
    factors = {"short_factor": [1 + i / 10 for i in range(pairs)], "long_factor": [2 + i for i in range(pairs)]}
    return {"rope_type": "longrope", "rope_theta": 1e4, **factors}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in MORE_FAMILIES},
    "arcee-biases": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "cohere-biases": ("cohere", {"attention_bias": True, "logit_scale": 0.7, "tie_word_embeddings": False}),
    "cohere2-biases": ("cohere2", {"attention_bias": True, "logit_scale": 0.7, "tie_word_embeddings": False}),
    "ernie4_5-biases": ("ernie4_5", {"use_bias": True}),
    "exaone4-no-window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "falcon-groups": ("falcon", {"bias": True, "new_decoder_architecture": True}),
    "falcon-groups-one-norm": ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    "falcon-by-head": (
        "falcon",
        {"multi_query": False, "num_kv_heads": 4, "parallel_attn": False, "tie_word_embeddings": False},
    ),
    "gemma-biases": ("gemma", {"attention_bias": True, "hidden_act": "gelu"}),
    "gemma3_text-linear": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": _PLAIN,
            }
        },
    ),
    "gemma2-no-caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gpt_neox-one-after-the-other": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "glm4-no-biases": ("glm4", {"attention_bias": False, "partial_rotary_factor": 0.75}),
    "granite-factors": (
        "granite",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "helium-biases": ("helium", {"attention_bias": True, "mlp_bias": True}),
    "hunyuan_v1_dense-alpha": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    "hyperclovax-factors": (
        "hyperclovax",
        {
            "attention_bias": True,
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.4,
        },
    ),
    "hyperclovax-no-norms-behind": ("hyperclovax", {"use_post_norm": False, "tie_word_embeddings": True}),
    "internlm3-biases": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "ministral-mixed": ("ministral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "ministral3-scaled": ("ministral3", {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5}}),
    "olmo2-biases": ("olmo2", {"attention_bias": True}),
    "olmo3-yarn": ("olmo3", {"rope_parameters": {"full_attention": _YARN, "sliding_attention": _PLAIN}}),
    "opt-350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-galactica": ("opt", {"activation_function": "gelu", "enable_bias": False}),
    "phi-grouped": ("phi", {"num_key_value_heads": 2, "partial_rotary_factor": 0.75}),
    "phi3-window": ("phi3", {"sliding_window": 9, "tie_word_embeddings": True}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "phi3-longrope": ("phi3", {"rope_parameters": _longrope(8), "original_max_position_embeddings": 2}),
    "phi3-short": ("phi3", {"rope_parameters": _longrope(8), "original_max_position_embeddings": 512}),
    "phi3-partial-longrope": (
        "phi3",
        {"rope_parameters": {**_longrope(6), "partial_rotary_factor": 0.75}, "original_max_position_embeddings": 2},
    ),
    "seed_oss-biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "smollm3-windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 7, "no_rope_layers": [1, 0, 0, 1], "attention_bias": True},
    ),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "starcoder2-window": ("starcoder2", {"sliding_window": 9, "use_bias": False, "tie_word_embeddings": False}),
}


CALLING_OUT = ("hunyuan_v1_dense", "hunyuan_v1_dense-alpha", "ministral3", "ministral3-scaled")
"""The families of which PyTorch computes a part between the native kernels."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_answers_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    model_dir = tiny_hf_model(tmp_path, family, **overrides)
    theirs, ours = hf_model(model_dir), load(model_dir)
    check_packed_and_chunked(ours, theirs)
    for kernels in (*supported_isas()[-1:], "torch"):
        shortest = read_config(model_dir).shortest_prompt  # of which only LongRoPE has one
        settings = {"max_model_len": 256} if shortest > 1 else {}
        prompts = [each for each in PROMPTS if len(each) >= shortest]
        notes = check_logprobs(model_dir, theirs, 1e-3, prompts, dtype="float32", kernels=kernels, **settings)
        lacking = [note for note in notes if note.startswith("the kernels lack")]
        assert bool(lacking) == (variant in CALLING_OUT and kernels != "torch"), notes


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_bfloat16_stays_as_near_to_float32_as_transformers_does(family: str, tmp_path: Path) -> None:
    model_dir, tokens = tiny_hf_model(tmp_path, family, dtype=torch.bfloat16), prompt(50)
    expected = hf_logits(hf_model(model_dir, torch.float32), tokens)
    runner = PagedRunner(load(model_dir), 8)
    ours = torch.cat([runner.step([("a", part)])[0] for part in (tokens[:33], tokens[33:49], tokens[49:])])
    theirs = hf_logits(hf_model(model_dir, torch.bfloat16), tokens)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - expected).std() <= 1.25 * (theirs.float() - expected).std()


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_weights_equal_the_loaded_ones(variant: str, tmp_path: Path) -> None:
    """In the checkpoint's names and order of rows."""
    family, overrides = VARIANTS[variant]
    model_dir = tiny_hf_model(tmp_path, family, **overrides)
    saved, stored = hf_state_dict(load(model_dir, weight_format=PLAIN)), load_file(model_dir / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], stored[name]) for name in stored)


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    """A config.json with only sizes has the defaults of transformers."""
    whole = json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))
    sizes = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    given = {key: whole[key] for key in (*sizes, "ffn_dim", "num_heads", "num_layers") if key in whole}
    assert parse_config(given) == parse_config({**whole, "dtype": None})


@needs_kernels
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_check_accepts_it(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(tiny_hf_model(tmp_path, family))
    assert main(["check", where, "--num-kv-blocks", "60", "--skip-tokenizer-init"]) == 0
    assert "greedy tokens alone and in a batch" in capsys.readouterr().out


# -- each way of getting it wrong is noticed ---------------------------------------------------------------------------


def drop_biases(kind: str) -> Callable[[CausalLM], None]:
    def wrong(model: CausalLM) -> None:
        biases = [bias for name, bias in model.named_parameters() if name.endswith(f"{kind}.bias")]
        assert biases
        for bias in biases:
            bias.zero_()

    return wrong


def drop_norms(which: str) -> Callable[[CausalLM], None]:
    def wrong(model: CausalLM) -> None:
        for layer in model.model.layers:
            assert getattr(layer, which) is not None
            setattr(layer, which, None)

    return wrong


def drop_head_norms(model: CausalLM) -> None:
    for layer in model.model.layers:
        assert layer.self_attn.q_norm is not None
        layer.self_attn.q_norm = layer.self_attn.k_norm = None


def norm_each_head(model: CausalLM) -> None:
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.qk_norm = "head"
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight = torch.nn.Parameter(norm.weight[: attention.head_dim])


def one_after_the_other(model: CausalLM) -> None:
    """The MLP reads what attention added to."""
    for layer in model.model.layers:
        assert layer.parallel
        layer.parallel = False
        layer.post_attention_layernorm = layer.post_attention_layernorm or layer.input_layernorm


def first_rows(row: int) -> Callable[[CausalLM], None]:
    def wrong(model: CausalLM) -> None:
        assert model.model.first_row == 2
        model.model.first_row = row

    return wrong


def norms_first(model: CausalLM) -> None:
    for layer in model.model.layers:
        assert layer.sums_first
        layer.sums_first = False


def other_rope(**change: Any) -> Callable[[NetworkConfig], NetworkConfig]:
    def wrong(config: NetworkConfig) -> NetworkConfig:
        assert config.rope is not None
        return dataclasses.replace(config, rope=dataclasses.replace(config.rope, **change))

    return wrong


def other(**change: Any) -> Callable[[NetworkConfig], NetworkConfig]:
    return lambda config: dataclasses.replace(config, **change)


CONFIG_MISTAKES: list[tuple[str, str, Callable[[NetworkConfig], NetworkConfig]]] = [
    ("arcee", "another activation", other(mlp="gelu_tanh")),
    ("cohere2", "rotation in all layers", other(rope_layers=())),
    ("cohere2", "halves for pairs", other_rope(interleaved=False)),
    ("cohere2", "logits as they are", other(logit_scale=1.0)),
    ("cohere2", "no windows", other(layer_windows=(None,) * 4)),
    ("cohere2", "RMSNorm", other(norm="rms")),
    ("cwm", "no windows", other(layer_windows=(None,) * 3)),
    ("cwm", "windows in all layers", other(layer_windows=(9,) * 3)),
    ("cwm", "plain frequencies", other_rope(rope_type="default")),
    ("ernie4_5", "halves for pairs", other_rope(interleaved=False)),
    ("ernie4_5", "another base", other_rope(theta=1e4)),
    ("exaone4", "rotation in all layers", other(rope_layers=())),
    ("exaone4", "no windows", other(layer_windows=(None,) * 4)),
    ("exaone4", "norms behind the rotation", other(qk_norm="rotated")),
    ("exaone4-no-window", "no rotation", other(rope_layers=(False,) * 4)),
    ("gemma", "embeddings as they are", other(embedding_scale=1.0)),
    ("gemma", "norms times weight", other(norm="rms")),
    ("gemma", "silu in the gate", other(mlp="swiglu")),
    ("gemma2", "scores without a cap", other(score_cap=None)),
    ("gemma2", "another cap of scores", other(score_cap=12.0)),
    ("gemma2", "logits without a cap", other(logit_cap=None)),
    ("gemma2", "usual scores", other(layer_scales=(32**-0.5,) * 4)),
    ("gemma2", "no windows", other(layer_windows=(None,) * 4)),
    ("gemma3_text", "usual scores", other(layer_scales=(32**-0.5,) * 3)),
    ("gemma3_text", "one rotation for all layers", other(window_rope=None)),
    ("gemma3_text", "no windows", other(layer_windows=(None,) * 3)),
    ("gemma3_text", "norms behind the rotation", other(qk_norm="rotated")),
    ("gpt_neox", "whole heads rotated", other_rope(dim=None)),
    ("gpt_neox", "another activation", other(mlp="relu2")),
    ("glm", "halves for pairs", other_rope(interleaved=False)),
    ("glm", "whole heads rotated", other_rope(dim=None)),
    ("glm4", "halves for pairs", other_rope(interleaved=False)),
    ("glm4", "whole heads rotated", other_rope(dim=None)),
    ("granite-factors", "usual scores", other(layer_scales=(0.25,) * 3)),
    ("granite-factors", "embeddings as they are", other(embedding_scale=1.0)),
    ("granite-factors", "branches as they are", other(residual_scale=1.0)),
    ("granite-factors", "logits as they are", other(logit_scale=1.0)),
    ("helium", "halves for pairs", other_rope(interleaved=False)),
    ("hunyuan_v1_dense", "norm before rotation", other(qk_norm="head")),
    ("hunyuan_v1_dense-alpha", "alpha", other_rope(theta=1e4)),
    ("hyperclovax-factors", "usual scores", other(layer_scales=(32**-0.5,) * 3)),
    ("hyperclovax-factors", "embeddings as they are", other(embedding_scale=1.0)),
    ("hyperclovax-factors", "branches as they are", other(residual_scale=1.0)),
    ("hyperclovax-factors", "logits as they are", other(logit_scale=1.0)),
    ("hyperclovax-factors", "logits divided, as in granite", other(logit_scale=2.5)),
    ("ministral-mixed", "windows in all layers", other(layer_windows=(9,) * 3)),
    ("ministral3-scaled", "queries as they are", other(query_scaling=None)),
    ("olmo3", "no windows", other(layer_windows=(None,) * 4)),
    ("olmo3-yarn", "one rotation for all layers", other(window_rope=None)),
    ("opt", "another activation", other(mlp="gelu")),
    ("opt", "another eps", other(norm_eps=0.1)),
    ("phi", "whole heads rotated", other_rope(dim=None)),
    ("phi3-window", "no window", other(layer_windows=(None,) * 3)),
    ("phi3-partial", "whole heads rotated", other_rope(dim=None)),
    ("phi3-longrope", "plain frequencies", other_rope(divisors=())),
    ("phi3-longrope", "no factor of attention", other_rope(attention_factor=1.0)),
    ("phi3-partial-longrope", "no factor of attention", other_rope(attention_factor=1.0)),
    ("phi3-short", "long factors", other_rope(divisors=tuple(2.0 + i for i in range(8)))),
    ("smollm3", "rotation in all layers", other(rope_layers=())),
    ("smollm3-windows", "no windows", other(layer_windows=(None,) * 4)),
    ("stablelm", "whole heads rotated", other_rope(dim=None)),
    ("starcoder2-window", "no windows", other(layer_windows=(None,) * 3)),
]
MODEL_MISTAKES: list[tuple[str, str, Callable[[CausalLM], None]]] = [
    ("arcee-biases", "biases of the MLP", drop_biases("mlp.up_proj")),
    ("ernie4_5-biases", "biases of q, k and v", drop_biases("qkv_proj")),
    ("cohere2-biases", "bias of the output", drop_biases("o_proj")),
    ("exaone4", "norms of heads", drop_head_norms),
    ("exaone4", "norms behind attention", drop_norms("attention_out_norm")),
    ("exaone4", "norms behind the MLP", drop_norms("mlp_out_norm")),
    ("gemma3_text", "norms behind attention", drop_norms("attention_out_norm")),
    ("gemma3_text", "norms behind the MLP", drop_norms("mlp_out_norm")),
    ("gemma3_text", "norms of heads", drop_head_norms),
    ("gemma2", "norms behind attention", drop_norms("attention_out_norm")),
    ("gemma2", "norms behind the MLP", drop_norms("mlp_out_norm")),
    ("gpt_neox", "MLP behind attention", one_after_the_other),
    ("gpt_neox", "biases of norms", drop_biases("layernorm")),
    ("opt", "positions from row 0 on", first_rows(0)),
    ("opt", "positions from row 1 on", first_rows(1)),
    ("opt", "biases of norms", drop_biases("layernorm")),
    ("opt", "biases of the MLP", drop_biases("mlp.up_proj")),
    ("opt-350m", "norms before the branches", norms_first),
    ("phi", "MLP behind attention", one_after_the_other),
    ("phi", "bias of the head", drop_biases("lm_head")),
    ("phi", "biases of the MLP", drop_biases("up_proj")),
    ("stablelm", "biases of norms", drop_biases("layernorm")),
    ("stablelm-parallel", "MLP behind attention", one_after_the_other),
    ("starcoder2", "biases of norms", drop_biases("layernorm")),
    ("starcoder2", "biases of q, k and v", drop_biases("qkv_proj")),
    ("glm", "biases of q, k and v", drop_biases("qkv_proj")),
    ("glm4", "biases of q, k and v", drop_biases("qkv_proj")),
    ("glm4", "norms behind attention", drop_norms("attention_out_norm")),
    ("glm4", "norms behind the MLP", drop_norms("mlp_out_norm")),
    ("glm4", "norms before attention", drop_norms("input_layernorm")),
    ("hyperclovax", "norms behind attention", drop_norms("attention_out_norm")),
    ("hyperclovax", "norms behind the MLP", drop_norms("mlp_out_norm")),
    ("hyperclovax-factors", "biases of q, k and v", drop_biases("qkv_proj")),
    ("olmo2", "norms behind attention", drop_norms("attention_out_norm")),
    ("olmo2", "norms behind the MLP", drop_norms("mlp_out_norm")),
    ("olmo2", "norms of all heads", drop_head_norms),
    ("olmo2", "norms of each head", norm_each_head),
    ("olmo2-biases", "bias of the output", drop_biases("o_proj")),
    ("cohere2", "MLP behind attention", one_after_the_other),
    ("helium-biases", "biases of q, k and v", drop_biases("qkv_proj")),
    ("internlm3-biases", "bias of the output", drop_biases("o_proj")),
    ("seed_oss", "biases of q, k and v", drop_biases("qkv_proj")),
    ("seed_oss-biases", "bias of the output", drop_biases("o_proj")),
]


def names(mistakes: list[Any]) -> list[str]:
    return [f"{variant}: {what}" for variant, what, _ in mistakes]


def check(
    variant: str, tmp_path: Path, spoil: Callable[[NetworkConfig], NetworkConfig]
) -> tuple[CausalLM, torch.Tensor]:
    """The spoilt model, after the sound one was compared, and what transformers computes."""
    family, overrides = VARIANTS[variant]
    model_dir = tiny_hf_model(tmp_path, family, **overrides)
    expected = hf_logits(hf_model(model_dir), prompt(40))
    assert close(packed_logits(load(model_dir), [prompt(40)])[0], expected)
    return load_model(model_dir, spoil(read_config(model_dir)), weight_format=PLAIN), expected


@pytest.mark.planted("test_logits_and_greedy_answers_equal_transformers[{variant}]")
@pytest.mark.parametrize(("variant", "what", "spoil"), CONFIG_MISTAKES, ids=names(CONFIG_MISTAKES))
def test_a_feature_that_is_left_out_is_noticed(
    variant: str, what: str, spoil: Callable[[NetworkConfig], NetworkConfig], tmp_path: Path
) -> None:
    model, expected = check(variant, tmp_path, spoil)
    assert not close(packed_logits(model, [prompt(40)])[0], expected, 0.01), what


@pytest.mark.planted("test_logits_and_greedy_answers_equal_transformers[{variant}]")
@pytest.mark.parametrize(("variant", "what", "spoil"), MODEL_MISTAKES, ids=names(MODEL_MISTAKES))
def test_a_part_that_is_left_out_is_noticed(
    variant: str, what: str, spoil: Callable[[CausalLM], None], tmp_path: Path
) -> None:
    model, expected = check(variant, tmp_path, lambda config: config)
    spoil(model)
    assert not close(packed_logits(model, [prompt(40)])[0], expected, 0.01), what


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "internlm3", "qkv_bias": True, "bias": False}, "qkv_bias True must equal bias False"),
        ({"model_type": "cwm", "sliding_window": None}, "sliding_window is not set"),
        ({"model_type": "arcee", "hidden_act": "silu"}, "hidden_act 'silu' is not supported; supported: relu2"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "alpha": 2.0}}, "alpha"),
        ({"model_type": "helium", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm = True is not supported"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "computes embeddings and no text",
        ),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "computes embeddings and no text"),
        ({"model_type": "gemma2", "attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be a number above 0"),
        ({"model_type": "gemma2", "final_logit_softcapping": 0}, "final_logit_softcapping must be a number above 0"),
        ({"model_type": "opt", "ffn_dim": 96, "layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ({"model_type": "opt", "ffn_dim": 96, "_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ({"model_type": "opt", "ffn_dim": 96, "activation_function": "silu"}, "supported: relu, gelu, gelu_new"),
        ({"model_type": "opt"}, "ffn_dim is missing"),
        ({"model_type": "olmo2", "clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers must have 0 or 1"),
        ({"model_type": "smollm3", "layer_types": ["sliding_attention"] * 3}, "sliding_window is not set"),
        ({"model_type": "granite", "residual_multiplier": 0}, "residual_multiplier must be a number above 0"),
        ({"model_type": "granite", "logit_scale": 0.5}, "logit_scale = 0.5 is not supported"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be a whole number"),
        ({"model_type": "olmo3", "rope_parameters": {"rope_theta": 1e4}}, "must have full_attention and sliding"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
            "short_factor must be 8 numbers",
        ),
        ({"model_type": "phi3", "rope_scaling": {"type": "llama3"}}, "supported: default, longrope, su, yarn"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.2}, "is 3 dimensions, which are no pairs"),
        ({"model_type": "cohere2", "head_dim": 32}, "head_dim 32 must be hidden_size / num_attention_heads, 16"),
        ({"model_type": "seed_oss", "logit_scale": 0.5}, "logit_scale = 0.5 is not supported"),
    ],
)
def test_settings_that_would_change_the_result_are_refused_by_name(config: dict[str, Any], words: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    with pytest.raises(ModelLoadError, match=words):
        parse_config({**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **config})


def test_code_in_the_directory_is_not_run_and_a_note_says_so() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    for family, code, known in (
        ("internlm3", "modeling_internlm3.InternLM3ForCausalLM", True),
        ("phi3", "modeling_phi3.Phi3ForCausalLM", True),
        ("phi3", "microsoft/Phi-3-mini-4k-instruct--modeling_phi3.Phi3ForCausalLM", True),
        ("internlm3", "evil.Model", False),
        ("llama", "modeling_llama.LlamaForCausalLM", False),
    ):
        fields = {**sizes, "num_attention_heads": 4, "model_type": family}
        config = parse_config({**fields, "auto_map": {"AutoModelForCausalLM": code}})
        notes = [note for note in config.notes() if note.startswith("auto_map in config.json names")]
        assert len(notes) == (not known) and all(code in note for note in notes)
        assert dataclasses.replace(config, unused_code=None) == parse_config(fields)
