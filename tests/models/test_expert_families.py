"""Families with experts compute what transformers computes, and each part of their routing is noticed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from chairlift import LLM, SamplingParams
from chairlift.cli.main import main
from chairlift.errors import ModelLoadError
from chairlift.kernels.cpu.library import supported_isas
from chairlift.kernels.weights import PLAIN
from chairlift.models.causal_lm import CausalLM
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.hf_config import NetworkConfig, RopeConfig, parse_config
from chairlift.models.layers.experts import MixtureOfExperts
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.logprobs import PROMPTS, check_logprobs
from tests.models.paged import PagedRunner, packed_logits
from tests.models.test_families import check_packed_and_chunked, close, load, prompt
from tests.models.tiny import EXPERT_FAMILIES, hf_logits, hf_model, tiny_hf_model
from tests.native import needs_kernels

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "truncate": False}
GPT_OSS = {"model_type": "gpt_oss", "num_key_value_heads": 2}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in EXPERT_FAMILIES},
    "glm4_moe-norms": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False}),
    "gpt_oss-published": (
        "gpt_oss",
        {
            "hidden_size": 96,
            "intermediate_size": 64,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_experts_per_tok": 4,
            "rope_parameters": {**YARN, "rope_theta": 100.0},
        },
    ),
    "granitemoe-factors": (
        "granitemoe",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral-window": ("mixtral", {"sliding_window": 9, "num_experts_per_tok": 4}),
    "olmoe-clipped": ("olmoe", {"clip_qkv": 1.5, "norm_topk_prob": True}),
    "qwen2_moe-windows": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "norm_topk_prob": True},
    ),
    "qwen3_moe-some-layers": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3], "norm_topk_prob": True},
    ),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9, "attention_bias": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_answers_equal_transformers(variant: str, tmp_path: Path) -> None:
    """Whole, in chunks, alone and together, in steps of a fixed budget, by PyTorch and by the native kernels."""
    family, overrides = VARIANTS[variant]
    model_dir = tiny_hf_model(tmp_path, family, **overrides)
    theirs, ours = hf_model(model_dir), load(model_dir)
    check_packed_and_chunked(ours, theirs)
    for kernels in (*supported_isas()[-1:], "torch"):
        check_logprobs(model_dir, theirs, 1e-3, dtype="float32", kernels=kernels)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_bfloat16_stays_as_near_to_float32_as_transformers_does(family: str, tmp_path: Path) -> None:
    model_dir, tokens = tiny_hf_model(tmp_path, family, dtype=torch.bfloat16, std=0.1), prompt(50)
    expected = hf_logits(hf_model(model_dir, torch.float32), tokens)
    runner = PagedRunner(load(model_dir), 8)
    ours = torch.cat([runner.step([("a", part)])[0] for part in (tokens[:33], tokens[33:49], tokens[49:])])
    theirs = hf_logits(hf_model(model_dir, torch.bfloat16), tokens)
    assert ours.dtype == torch.bfloat16
    # Medians: a token that changes an expert is as far off as any.
    errors = [(each.float() - expected).abs().amax(-1).median() for each in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_weights_equal_the_loaded_ones(variant: str, tmp_path: Path) -> None:
    """In the checkpoint's names, with experts apart or in one tensor."""
    family, overrides = VARIANTS[variant]
    model_dir = tiny_hf_model(tmp_path, family, **overrides)
    saved, stored = hf_state_dict(load(model_dir, weight_format=PLAIN)), load_file(model_dir / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], stored[name]) for name in stored)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    """A config.json with only sizes has the defaults of transformers."""
    whole = {"head_dim": 128, **json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))}
    sizes = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    assert parse_config({key: whole[key] for key in sizes}) == parse_config({**whole, "dtype": None})


@needs_kernels
def test_answers_survive_preemption_the_prefix_cache_and_company(tmp_path: Path) -> None:
    """To the bit: a request alone, and many that share too few blocks."""
    model_dir = tiny_hf_model(tmp_path, "qwen3_moe")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_batched_tokens": 24, "block_size": 16}
    prompts = [*PROMPTS, PROMPTS[0], [*PROMPTS[2], 5], *([n] * 20 for n in range(5))]
    alone = LLM(model_dir, num_kv_blocks=60, **settings)
    expected = [alone.generate([each], params)[0].outputs[0] for each in prompts]
    together = LLM(model_dir, num_kv_blocks=9, max_model_len=120, max_num_seqs=6, **settings)
    for _ in range(2):
        for output, answer in zip(together.generate(prompts, params), expected, strict=True):
            assert output.outputs[0].token_ids == answer.token_ids
            assert output.outputs[0].logprobs == answer.logprobs


@needs_kernels
def test_check_says_how_many_experts_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(tiny_hf_model(tmp_path, "qwen3_moe", decoder_sparse_step=2))
    assert main(["check", where, "--num-kv-blocks", "60", "--skip-tokenizer-init"]) == 0
    said = capsys.readouterr().out
    assert "greedy tokens alone and in a batch" in said
    assert "6 experts, 3 chosen, in 1 of 3 layers" in said


@needs_kernels
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_are_quantized_too(quantization: str, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "mixtral", hidden_size=64, intermediate_size=96)
    llm = LLM(model_dir, quantization=quantization, num_kv_blocks=60, skip_tokenizer_init=True)
    assert llm.info.quantization is not None
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone = [llm.generate([each], params)[0].outputs[0].token_ids for each in PROMPTS]
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)] == alone


def test_weights_are_replaced_in_place(tmp_path: Path) -> None:
    dirs = [tiny_hf_model(tmp_path / str(seed), "glm4_moe", seed=seed) for seed in (0, 1)]
    settings: dict[str, Any] = {"num_kv_blocks": 60, "skip_tokenizer_init": True, "dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm, other = (LLM(model_dir, **settings) for model_dir in dirs)
    expected = [output.outputs[0].token_ids for output in other.generate(PROMPTS, params)]
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)] != expected
    llm.update_weights(dirs[1], version=1)
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)] == expected


# -- each way of getting it wrong is noticed ---------------------------------------------------------------------------


def routed(**change: Any) -> Callable[[NetworkConfig], NetworkConfig]:
    def wrong(config: NetworkConfig) -> NetworkConfig:
        assert config.experts is not None
        routing = dataclasses.replace(config.experts.routing, **change)
        assert routing != config.experts.routing
        return dataclasses.replace(config, experts=dataclasses.replace(config.experts, routing=routing))

    return wrong


def other(**change: Any) -> Callable[[NetworkConfig], NetworkConfig]:
    return lambda config: dataclasses.replace(config, **change)


def whole_heads_rotated(config: NetworkConfig) -> NetworkConfig:
    assert config.rope is not None
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, dim=None))


def in_experts(spoil: Callable[[MixtureOfExperts], object]) -> Callable[[CausalLM], None]:
    def wrong(model: CausalLM) -> None:
        layers = [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, MixtureOfExperts)]
        assert layers
        for layer in layers:
            spoil(layer)

    return wrong


def no_yarn(config: NetworkConfig) -> NetworkConfig:
    assert config.rope is not None
    return dataclasses.replace(config, rope=RopeConfig(theta=config.rope.theta))


def truncated(config: NetworkConfig) -> NetworkConfig:
    assert config.rope is not None
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, truncate=True))


def clamped(clamp: tuple[float, float] | None) -> Callable[[NetworkConfig], NetworkConfig]:
    def wrong(config: NetworkConfig) -> NetworkConfig:
        assert config.experts is not None
        assert config.experts.clamp not in (None, clamp)
        return dataclasses.replace(config, experts=dataclasses.replace(config.experts, clamp=clamp))

    return wrong


def without(*names: str) -> Callable[[CausalLM], None]:
    """Parameters by the ends of their names, set to zero."""

    def wrong(model: CausalLM) -> None:
        found = [each for name, each in model.named_parameters() if name.endswith(names)]
        assert found
        for parameter in found:
            parameter.zero_()

    return wrong


def drop_sinks(model: CausalLM) -> None:
    for layer in model.model.layers:
        assert layer.self_attn.sinks is not None
        layer.self_attn.sinks = None


def swap_experts(layer: MixtureOfExperts) -> None:
    rows = len(layer.experts.down_proj.weight) // layer.routing.num_experts
    layer.experts.down_proj.weight.copy_(layer.experts.down_proj.weight.roll(rows, 0))


def swap_gate_and_up(layer: MixtureOfExperts) -> None:
    weight = layer.experts.gate_up_proj.weight
    weight.copy_(weight.view(layer.routing.num_experts, 2, -1, weight.shape[1]).flip(1).reshape(weight.shape))


def drop_shared(layer: MixtureOfExperts) -> None:
    assert layer.shared_expert is not None
    layer.shared_expert = layer.shared_expert_gate = None


def drop_shared_gate(layer: MixtureOfExperts) -> None:
    assert layer.shared_expert_gate is not None
    layer.shared_expert_gate = None


def drop_correction(layer: MixtureOfExperts) -> None:
    assert layer.gate.e_score_correction_bias is not None
    layer.gate.e_score_correction_bias.zero_()


def drop_head_norms(model: CausalLM) -> None:
    for layer in model.model.layers:
        assert layer.self_attn.q_norm is not None
        layer.self_attn.q_norm = layer.self_attn.k_norm = None


CONFIG_MISTAKES: list[tuple[str, str, Callable[[NetworkConfig], NetworkConfig]]] = [
    ("glm4_moe", "whole heads rotated", whole_heads_rotated),
    ("glm4_moe", "no groups", routed(groups=1, kept_groups=1)),
    ("glm4_moe", "groups by their best", routed(group_score="best")),
    ("glm4_moe", "all groups kept", routed(kept_groups=4)),
    ("glm4_moe", "weights as they are", routed(scale=1.0)),
    ("glm4_moe", "weights not normalised", routed(normalise=False)),
    ("glm4_moe-norms", "weights normalised", routed(normalise=True)),
    ("glm4_moe", "softmax", routed(scoring="softmax")),
    ("gpt_oss", "softmax over all", routed(scoring="softmax")),
    ("gpt_oss", "no windows", other(layer_windows=(None,) * 3)),
    ("gpt_oss", "windows in the other layers", other(layer_windows=(None, 9, None))),
    ("gpt_oss", "usual gates", clamped(None)),
    ("gpt_oss", "gates without a limit", clamped((1.702, 1e6))),
    ("gpt_oss", "another alpha", clamped((1.0, 1.5))),
    ("gpt_oss-published", "windows as without layer types", other(layer_windows=(9, None, 9))),
    ("gpt_oss-published", "usual rotation", no_yarn),
    ("gpt_oss-published", "rotation truncated", truncated),
    ("granitemoe", "softmax over all", routed(scoring="softmax")),
    ("granitemoe-factors", "branches as they are", other(residual_scale=1.0)),
    ("granitemoe-factors", "embeddings as they are", other(embedding_scale=1.0)),
    ("granitemoe-factors", "usual scores", other(layer_scales=(0.25,) * 3)),
    ("granitemoe-factors", "logits as they are", other(logit_scale=1.0)),
    ("mixtral", "weights not normalised", routed(normalise=False)),
    ("mixtral", "one expert less", routed(top_k=1)),
    ("mixtral-window", "no window", other(layer_windows=(None,) * 3)),
    ("olmoe", "weights normalised", routed(normalise=True)),
    ("olmoe", "norms of each head", other(qk_norm=None)),
    ("olmoe-clipped", "not clipped", other(qkv_clip=None)),
    ("olmoe-clipped", "weights not normalised", routed(normalise=False)),
    ("qwen2_moe", "weights normalised", routed(normalise=True)),
    ("qwen2_moe", "one expert more", routed(top_k=4)),
    ("qwen2_moe-windows", "windows in all layers", other(layer_windows=(9,) * 3)),
    ("qwen2_moe-windows", "no windows", other(layer_windows=(None,) * 3)),
    ("qwen3_moe", "weights normalised", routed(normalise=True)),
    ("qwen3_moe-some-layers", "weights not normalised", routed(normalise=False)),
    ("qwen3_moe-window", "no window", other(layer_windows=(None,) * 3)),
]
MODEL_MISTAKES: list[tuple[str, str, Callable[[CausalLM], None]]] = [
    *((family, "experts in another order", in_experts(swap_experts)) for family in EXPERT_FAMILIES),
    *((family, "gate for up", in_experts(swap_gate_and_up)) for family in EXPERT_FAMILIES),
    ("glm4_moe", "no shared expert", in_experts(drop_shared)),
    ("glm4_moe", "no correction", in_experts(drop_correction)),
    ("glm4_moe-norms", "norms of heads", drop_head_norms),
    ("gpt_oss", "no bias of the router", without("gate.bias")),
    ("gpt_oss", "no biases of gate and up", without("gate_up_proj.bias")),
    ("gpt_oss", "no biases of down", without("down_proj.bias")),
    ("gpt_oss", "no biases of q, k and v", without("qkv_proj.bias")),
    ("gpt_oss", "no biases of o", without("o_proj.bias")),
    ("gpt_oss", "no sinks", drop_sinks),
    ("olmoe", "norms of all heads", drop_head_norms),
    ("qwen2_moe", "no shared expert", in_experts(drop_shared)),
    ("qwen2_moe", "no gate of the shared expert", in_experts(drop_shared_gate)),
    ("qwen3_moe", "norms of heads", drop_head_norms),
]


def names(mistakes: list[Any]) -> list[str]:
    return [f"{variant}: {what}" for variant, what, _ in mistakes]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.Tensor]]:
    """A variant's directory, and what transformers computes, once for all mistakes."""
    known: dict[str, tuple[Path, torch.Tensor]] = {}

    def find(variant: str) -> tuple[Path, torch.Tensor]:
        if variant not in known:
            family, overrides = VARIANTS[variant]
            model_dir = tiny_hf_model(tmp_path_factory.mktemp(variant), family, **overrides)
            known[variant] = model_dir, hf_logits(hf_model(model_dir), prompt(40))
            assert close(packed_logits(load(model_dir), [prompt(40)])[0], known[variant][1])
        return known[variant]

    return find


@pytest.mark.planted("test_logits_and_greedy_answers_equal_transformers[{variant}]")
@pytest.mark.parametrize(("variant", "what", "spoil"), CONFIG_MISTAKES, ids=names(CONFIG_MISTAKES))
def test_a_feature_that_is_left_out_is_noticed(variant: str, what: str, spoil: Any, expected: Any) -> None:
    model_dir, logits = expected(variant)
    config = spoil(read_config(model_dir))
    if config.qk_norm != read_config(model_dir).qk_norm:  # its weights would be surplus
        model = load(model_dir, weight_format=PLAIN)
        drop_head_norms(model)
    else:
        model = load_model(model_dir, config, weight_format=PLAIN)
    assert not close(packed_logits(model, [prompt(40)])[0], logits, 0.01), what


@pytest.mark.planted("test_logits_and_greedy_answers_equal_transformers[{variant}]")
@pytest.mark.parametrize(("variant", "what", "spoil"), MODEL_MISTAKES, ids=names(MODEL_MISTAKES))
def test_a_part_that_is_left_out_is_noticed(variant: str, what: str, spoil: Any, expected: Any) -> None:
    model_dir, logits = expected(variant)
    model = load(model_dir, weight_format=PLAIN)
    spoil(model)
    assert not close(packed_logits(model, [prompt(40)])[0], logits, 0.01), what


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be a whole number from 1 to 6, got 9"),
        ({"num_experts": 5000}, "num_experts must be a whole number from 1 to 4096, got 5000"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layer numbers, got 3"),
        ({"model_type": "glm4_moe", "n_routed_experts": 6, "n_group": 4}, "6 experts make no 4 groups"),
        ({"model_type": "llama"}, "num_experts = 6 is not supported for model_type 'llama'"),
        ({**GPT_OSS, "swiglu_limit": 0}, "swiglu_limit must be a number above 0"),
        ({**GPT_OSS, "sliding_window": None}, "sliding_window is not set"),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(config: dict[str, Any], words: str) -> None:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_experts": 6, "num_experts_per_tok": 2, "model_type": "qwen3_moe"}
    if config.get("model_type") == "glm4_moe":
        sizes = {**sizes, "num_key_value_heads": 2}
        del sizes["num_experts"]
    with pytest.raises(ModelLoadError, match=words):
        parse_config({**sizes, **config})


def test_a_stack_of_another_shape_is_refused(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "granitemoe")
    tensors = load_file(model_dir / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    tensors[name] = tensors[name].flatten(0, 1)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"has shape \[960, 64\], but config.json asks for \[5, 192, 64\]"):
        load(model_dir)
