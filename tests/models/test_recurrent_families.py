"""Recurrent and hybrid families compute what transformers computes, however their work is cut, and mistakes show."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from chairlift import LLM, RequestOutput, SamplingParams
from chairlift.cli.main import main
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.kernels import recurrent
from chairlift.kernels.cpu.library import supported_isas
from chairlift.kernels.mamba2 import Mamba2
from chairlift.kernels.recurrent import StatePiece
from chairlift.kernels.short_conv import ShortConv
from chairlift.kernels.weights import PLAIN
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.hf_config import NetworkConfig, parse_config
from chairlift.models.loader import load_model
from chairlift.models.mixers import Mamba2Config
from chairlift.models.model_files import read_config
from chairlift.models.registry import FAMILIES
from tests.models.logprobs import check_logprobs
from tests.models.paged import PagedRunner, packed_logits
from tests.models.test_families import close, load, prompt
from tests.models.tiny import RECURRENT_FAMILIES, WHOLE_FAMILIES, hf_logits, hf_model, tiny_fields, tiny_hf_model
from tests.native import needs_kernels

NEMOTRON_EXPERTS: dict[str, Any] = {
    **{"hybrid_override_pattern": "ME*E", "num_hidden_layers": 4, "n_routed_experts": 8, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5},
    **{"n_group": 2, "topk_group": 1},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in RECURRENT_FAMILIES},
    "falcon_h1-norm": (
        "falcon_h1",
        {
            **{"attention_bias": True, "mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_rms_norm": True},
            **{"mlp_bias": True, "projectors_bias": True, "mamba_d_ssm": None},
        },
    ),
    "falcon_h1-norm-behind": (
        "falcon_h1",
        {"head_dim": 32, "mamba_norm_before_gate": False, "mamba_rms_norm": True, "tie_word_embeddings": True},
    ),
    "lfm2-biases": ("lfm2", {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
    "lfm2-convolutions-only": ("lfm2", {"layer_types": ["conv"] * 3, "num_hidden_layers": 3}),
    "lfm2-attention-last": (
        "lfm2",
        {"layer_types": ["conv", "conv", "full_attention"], "num_hidden_layers": 3, "tie_word_embeddings": False},
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        {
            **{"num_local_experts": 0, "position_embedding_type": "rope", "attention_bias": True},
            **{"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "mamba_proj_bias": True},
        },
    ),
    "granitemoehybrid-attention-last": (
        "granitemoehybrid",
        {"layer_types": ["linear_attention"] * 2 + ["full_attention"], "mamba_n_groups": 2, "mamba_d_state": 16},
    ),
    "mamba2-biases": (
        "mamba2",
        {
            **{"use_bias": True, "conv_kernel": 3, "n_groups": 1, "state_size": 32, "tie_word_embeddings": True},
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "mamba2-odd-sizes": ("mamba2", {"head_dim": 8, "num_heads": 16, "state_size": 7}),
    "mamba2-no-biases": ("mamba2", {"use_conv_bias": False, "time_step_limit": (0.3, 0.9)}),
    "nemotron_h-biases": (
        "nemotron_h",
        {
            **{"conv_kernel": 3, "mlp_bias": True, "n_groups": 1, "use_bias": True},
            "use_conv_bias": False,
        },
    ),
    "nemotron_h-experts": ("nemotron_h", NEMOTRON_EXPERTS),
    "nemotron_h-experts-in-fewer-columns": (
        "nemotron_h",
        {
            **{**NEMOTRON_EXPERTS, "hybrid_override_pattern": "EM*-", "moe_latent_size": 32, "mlp_bias": True},
            **{"n_group": 1, "norm_topk_prob": False},
        },
    ),
    "nemotron_h-mlp-first": ("nemotron_h", {"hybrid_override_pattern": "--M**", "mamba_head_dim": 32}),
    "qwen3_5_text-odd-sizes": (
        "qwen3_5_text",
        {"linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_conv_kernel_dim": 3, "attention_bias": True},
    ),
    "qwen3_5_text-one-rate-a-key": (
        "qwen3_5_text",
        {"linear_num_key_heads": 4, "tie_word_embeddings": True, "layer_types": ["linear_attention"] * 3},
    ),
    "qwen3_next-biases": (
        "qwen3_next",
        {"attention_bias": True, "linear_conv_kernel_dim": 3, "linear_num_key_heads": 4, "mlp_only_layers": [0]},
    ),
    "qwen3_next-odd-sizes": (
        "qwen3_next",
        {"layer_types": ["linear_attention"] * 3, "linear_key_head_dim": 12, "linear_value_head_dim": 20},
    ),
}
DELTA_NETS = tuple(variant for variant in VARIANTS if variant.startswith(("qwen3_5", "qwen3_next")))
CALLING_OUT: tuple[str, ...] = ("mamba2-odd-sizes", *(each for each in DELTA_NETS if each.endswith("odd-sizes")))
"""The families of which PyTorch computes a part between the native kernels."""
NIGHTLY = ("qwen3_5_moe_text", "qwen3_next", "falcon_h1", "nemotron_h")
"""Families whose schedules are compared in nightly runs only: one with the same layers is compared in all."""
QUICK = [family for family in RECURRENT_FAMILIES if family not in NIGHTLY]
WITHOUT_KV = ("mamba2",)
"""Families that never attend."""
KERNELS = (*supported_isas()[-1:], "torch")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=pytest.mark.nightly) if v.startswith("qwen3_5_text-") else v for v in VARIANTS],
)
def test_logits_and_greedy_answers_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    model_dir = tiny_hf_model(tmp_path, family, **overrides)
    theirs, ours = hf_model(model_dir), load(model_dir)
    prompts = [prompt(40, 1), prompt(3, 2), prompt(61, 3)]
    expected = [hf_logits(theirs, tokens) for tokens in prompts]
    for logits, reference in zip(packed_logits(ours, prompts), expected, strict=True):
        assert close(logits, reference)
    for kernels in KERNELS:
        notes = check_logprobs(model_dir, theirs, 1e-3, dtype="float32", kernels=kernels)
        lacking = [note for note in notes if note.startswith("the kernels lack")]
        assert bool(lacking) == (variant in CALLING_OUT and kernels != "torch"), notes


@needs_kernels
@pytest.mark.parametrize(
    "isa",
    [pytest.param(isa, marks=pytest.mark.nightly) if number else isa for number, isa in enumerate(supported_isas())],
)
def test_each_path_scans_delta_nets_of_every_shape(isa: str, tmp_path: Path) -> None:
    """Panels of 16 and of 32 columns, one and several heads of values for a head of keys, keys of up to 64 numbers."""
    for seed, (keys, key_dim, values, value_dim) in enumerate(((2, 16, 4, 16), (1, 64, 3, 32), (2, 48, 2, 48))):
        sizes = {"linear_num_key_heads": keys, "linear_key_head_dim": key_dim}
        sizes |= {"linear_num_value_heads": values, "linear_value_head_dim": value_dim}
        model_dir = tiny_hf_model(tmp_path, "qwen3_5_text", seed=seed, **sizes)
        notes = check_logprobs(model_dir, hf_model(model_dir), 1e-3, dtype="float32", kernels=isa)
        assert not any(note.startswith("the kernels lack") for note in notes), notes


@needs_kernels
@pytest.mark.parametrize(
    "isa",
    [pytest.param(isa, marks=pytest.mark.nightly) if number else isa for number, isa in enumerate(supported_isas())],
)
def test_each_path_scans_in_every_shape_of_heads(isa: str, tmp_path: Path) -> None:
    """Heads of one vector, of two, and of three; groups that end inside a padded panel."""
    for seed, (size, heads, groups) in enumerate(((16, 8, 2), (32, 4, 4), (48, 2, 1), (16, 5, 1))):
        sizes = {"hidden_size": size * heads // 2, "head_dim": size, "num_heads": heads, "n_groups": groups}
        state = 24 if heads == 5 else 16 if groups > 1 else 32
        model_dir = tiny_hf_model(tmp_path, "mamba2", seed=seed, **sizes, state_size=state)
        notes = check_logprobs(model_dir, hf_model(model_dir), 1e-3, dtype="float32", kernels=isa)
        assert not any(note.startswith("the kernels lack") for note in notes), notes


def test_the_memory_of_a_step_counts_the_results_of_recurrent_layers(tmp_path: Path) -> None:
    """The first linear layer's, the convolution's and the scan's, beside the rows of the model's width."""
    network = read_config(tiny_hf_model(tmp_path, "mamba2"))
    mixer = network.mixers[0]
    assert isinstance(mixer, Mamba2Config)
    columns = mixer.inner + mixer.channels + mixer.heads
    mixed = 4 * (mixer.channels + mixer.inner)
    assert network.step_bytes(2) >= 2 * columns + mixed + 2 * mixer.inner + 8 * network.hidden_size
    assert network.step_bytes(2) > dataclasses.replace(network, mixers=()).step_bytes(2)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_chunk_may_end_anywhere(family: str, tmp_path: Path) -> None:
    """In company, over snapshots at each multiple of the span, token by token, and in two chunks at every border."""
    ours = load(tiny_hf_model(tmp_path, family))
    tokens, other = prompt(21, 3), prompt(30, 4)
    (expected, beside) = packed_logits(ours, [tokens, other])
    runner = PagedRunner(ours, 4, num_blocks=1024, state_span=8)
    for border in range(1, len(tokens)):
        first = runner.step([(f"o{border}", other[:9]), (f"a{border}", tokens[:border])])
        second = runner.step([(f"a{border}", tokens[border:]), (f"o{border}", other[9:])])
        assert close(torch.cat((first[1], second[0])), expected)
        assert close(torch.cat((first[0], second[1])), beside)
    single = [runner.step([("s", [token])])[0] for token in tokens]
    assert close(torch.cat(single), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_weights_equal_the_loaded_ones(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    model_dir = tiny_hf_model(tmp_path, family, **overrides)
    saved, stored = hf_state_dict(load(model_dir, weight_format=PLAIN)), load_file(model_dir / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], stored[name]) for name in stored)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    whole = json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))
    if "layers_block_type" in whole:  # the default has a layer of experts
        whole["layers_block_type"] = ["linear_attention", "full_attention", "mlp"]
    sizes = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes += ("layers_block_type",)
    given = {key: whole[key] for key in sizes if key in whole}
    assert parse_config(given) == parse_config({**whole, "dtype": None})


@needs_kernels
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_check_accepts_it(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(tiny_hf_model(tmp_path, family))
    assert main(["check", where, "--num-kv-blocks", "60", "--skip-tokenizer-init"]) == 0
    assert "greedy tokens alone and in a batch" in capsys.readouterr().out


# -- the schedule changes no bit ---------------------------------------------------------------------------------------

PROMPTS = [prompt(33, 1), prompt(33, 1)[:20] + prompt(9, 2), prompt(2, 3), prompt(17, 4)]
PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True, logprobs=0, n=2)
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "one token at a time": {"max_num_batched_tokens": 4, "max_num_seqs": 4},
    "chunks of seven": {"max_num_batched_tokens": 7},
    "without a prefix cache": {"enable_prefix_caching": False},
    "few snapshots": {"state_snapshot_interval": 32},
    "recompute": {"num_kv_blocks": 9, "preemption_mode": "recompute"},
    "swap": {"num_kv_blocks": 9, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
    "swap without snapshots": {
        **{"num_kv_blocks": 9, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
        "enable_prefix_caching": False,
    },
    "ahead": {"num_lookahead_steps": 2},
    "a static batch": {"batching": "static", "preferred_batch_sizes": "2"},
}


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [(answer.token_ids, answer.logprobs) for output in outputs for answer in output.outputs]


@pytest.mark.full
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(n, marks=pytest.mark.nightly) for n in NIGHTLY)])
def test_answers_do_not_depend_on_the_schedule(family: str, kernels: str, tmp_path: Path) -> None:
    """On native kernels not a bit of them does. The second time round the prompts are cached."""
    model_dir = tiny_hf_model(tmp_path, family)
    settings = {"kernels": kernels, "dtype": "float32", "skip_tokenizer_init": True, "threads": 1}
    alone = LLM(model_dir, max_num_seqs=1, enable_prefix_caching=False, num_kv_blocks=60, **settings)
    expected = answers([alone.generate([tokens], PARAMS)[0] for tokens in PROMPTS])
    seen = dict.fromkeys(("preempted", "swapped", "cached"), 0)
    for name, schedule in SCHEDULES.items():
        llm = LLM(model_dir, **{"num_kv_blocks": 60, **settings, **schedule})
        for _ in range(2):
            outputs = llm.generate(PROMPTS, PARAMS)
            found = answers(outputs)
            assert [ids for ids, _ in found] == [ids for ids, _ in expected], name
            if kernels != "torch" and family not in CALLING_OUT:
                assert found == expected, name
            seen["cached"] += sum(output.num_cached_tokens for output in outputs)
        seen["preempted"] += llm.engine.scheduler.num_preemptions
        seen["swapped"] += llm.engine.scheduler.preemptor.num_swaps
    assert seen.pop("cached")
    # Without K and V, requests run as far as their states fit, and none is preempted for another.
    assert all(seen.values()) or family in WITHOUT_KV, seen


# -- settings and memory -----------------------------------------------------------------------------------------------


def test_the_number_of_running_requests_follows_from_memory_and_is_shown(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kernels": "torch", "skip_tokenizer_init": True}
    only = tiny_hf_model(tmp_path, "lfm2", **VARIANTS["lfm2-convolutions-only"][1])
    state = 3 * 2 * 64 * 4  # layers, taps before the newest, channels, bytes
    few = LLM(only, kv_cache_memory_bytes=20 * state, max_num_seqs=64, enable_prefix_caching=False, **settings)
    assert "recurrent states: 1.5 KiB a request, so 19 requests may run at once" in few.info.memory_plan
    assert "instead of max_num_seqs 64" in few.info.memory_plan and "no prefix cache" in few.info.memory_plan
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    few.generate([[5]] * 30, params)
    assert max(record.features.num_decodes for record in few.engine.step_log) == 19
    many = LLM(tiny_hf_model(tmp_path, "lfm2", seed=1), num_kv_blocks=33, state_snapshot_interval=64, **settings)
    assert "9 snapshots for the prefix cache, one every 64 tokens" in many.info.memory_plan


def test_a_model_without_k_and_v_admits_what_its_states_allow(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "mamba2")
    state = 3 * (8 * 24 * 16 * 4 + 3 * (128 + 2 * 2 * 24) * 4)  # layers, heads of float32, and the tail of x, B and C
    settings: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 16, "skip_tokenizer_init": True}
    llm = LLM(model_dir, dtype="float32", kv_cache_memory_bytes=6 * state, **settings)
    assert "so 5 requests may run at once instead of max_num_seqs 16" in llm.info.memory_plan
    assert "KV cache" not in llm.info.memory_plan
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    together = answers(llm.generate([[token] for token in range(12)], params))
    assert max(record.features.num_decodes for record in llm.engine.step_log) == 5
    assert together == [answers(llm.generate([[token]], params))[0] for token in range(12)]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_heads": 7}, "must make the inner width 128"),
        ({"n_groups": 3}, "num_heads 8 is not a multiple of n_groups 3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"time_step_limit": [0.5, 0.1]}, "time_step_limit must be two numbers"),
        ({"time_step_limit": [0.0, True]}, "time_step_limit must be two numbers"),
        ({"conv_kernel": 1}, "conv_kernel must be a whole number from 2"),
    ],
)
def test_an_impossible_mamba2_config_is_refused(config: dict[str, Any], words: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "n_groups": 2}
    assert parse_config({"model_type": "mamba2", **sizes}).recurrent
    with pytest.raises(ModelLoadError, match=words):
        parse_config({"model_type": "mamba2", **sizes, **config})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers must be a list of 5 numbers"),
        ({"mlp_multipliers": [1.0, "2"]}, "mlp_multipliers must be a list of 2 numbers above 0"),
        ({"key_multiplier": 0}, "key_multiplier must be a number above 0"),
        ({"mamba_d_ssm": 100}, "must make the inner width 100"),
    ],
)
def test_an_impossible_falcon_h1_config_is_refused(config: dict[str, Any], words: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "mamba_d_ssm": 128, "mamba_n_heads": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_d_state": 16}
    parsed = parse_config({"model_type": "falcon_h1", **sizes})
    assert parsed.recurrent and parsed.attends
    with pytest.raises(ModelLoadError, match=words):
        parse_config({"model_type": "falcon_h1", **sizes, **config})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hybrid_override_pattern": "M-X"}, "layers_block_type must list linear_attention, full_attention, mlp, moe"),
        ({"layers_block_type": []}, "layers_block_type must list"),
        ({"layers_block_type": ["mlp"] * 3}, "num_hidden_layers is 4, but the list or pattern of layers has 3"),
        ({"hybrid_override_pattern": "M-*E", "n_routed_experts": 0}, "n_routed_experts must be a whole number from 1"),
        ({"hybrid_override_pattern": "M-*E", "moe_latent_size": 0}, "moe_latent_size must be a whole number from 1"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act of a Mamba-2 layer must be silu"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported; supported: relu2"),
    ],
)
def test_an_impossible_nemotron_h_config_is_refused(config: dict[str, Any], words: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "hybrid_override_pattern": "M-*M"}
    assert parse_config({"model_type": "nemotron_h", **sizes}).recurrent
    with pytest.raises(ModelLoadError, match=words):
        parse_config({"model_type": "nemotron_h", **sizes, **config})


def test_old_names_of_layers_are_read() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "model_type": "nemotron_h"}
    pattern = parse_config({**sizes, "hybrid_override_pattern": "M*-"})
    assert pattern == parse_config({**sizes, "layers_block_type": ["mamba", "attention", "mlp"]})
    assert pattern.num_hidden_layers == 3


@pytest.mark.parametrize("key", ["time_step_min", "mamba_dt_min"])
def test_steps_of_nemotron_h_have_the_least_time_of_transformers(key: str, tmp_path: Path) -> None:
    """For every token: transformers leaves it out for a token after a cached text, and then differs from itself."""
    model_dir = tiny_hf_model(tmp_path, "nemotron_h", time_step_min=0.5)
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, key: config.pop("time_step_min")}))
    theirs, tokens = hf_model(model_dir), prompt(12, 7)
    assert close(packed_logits(load(model_dir), [tokens])[0], hf_logits(theirs, tokens))
    check_logprobs(model_dir, theirs, 1e-3, dtype="float32")
    path.write_text(json.dumps({**config, "time_step_min": 1e-12}))
    assert not close(packed_logits(load(model_dir), [tokens])[0], hf_logits(theirs, tokens), 0.01)
    path.write_text(json.dumps({**config, "time_step_limit": [0.0, 0.5]}))
    with pytest.raises(ModelLoadError, match=r"time_step_limit \[0.0, 0.5\] is not supported for this family"):
        read_config(model_dir)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"state_snapshot_interval": 24}, "must be a multiple of block_size 16, got 24"),
        ({"kv_cache_memory_bytes": 3000}, "keeps a recurrent state of 1,536 bytes"),
        ({"model_impl": "transformers"}, "recurrent state"),
        ({"kernels": "triton"}, "triton"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ModelLoadError), match=words):
        LLM(tiny_hf_model(tmp_path, "lfm2"), skip_tokenizer_init=True, **settings)


def test_other_models_have_no_snapshots(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state_snapshot_interval is 16, but this model keeps no recurrent states"):
        LLM(tiny_hf_model(tmp_path, "llama"), skip_tokenizer_init=True, state_snapshot_interval=16)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"layer_types": ["conv", "mamba", "conv"]}, "layer_types must name full_attention or conv"),
        ({"layer_types": ["conv"]}, "for each of 3 layers"),
        ({"full_attn_idxs": 2}, "full_attn_idxs must be a list"),
        ({"conv_L_cache": 1}, "conv_L_cache must be a whole number from 2"),
        ({"block_ffn_dim_multiplier": 0}, "block_ffn_dim_multiplier must be a number above 0"),
    ],
)
def test_an_impossible_config_is_refused(config: dict[str, Any], words: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    with pytest.raises(ModelLoadError, match=words):
        parse_config({"model_type": "lfm2", **sizes, "num_attention_heads": 8, **config})


def test_the_first_checkpoints_name_sizes_otherwise() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "model_type": "lfm2"}
    new = {
        **sizes,
        "intermediate_size": 96,
        "tie_word_embeddings": False,
        "layer_types": ["conv", "full_attention", "conv"],
    }
    old = {**sizes, "block_ff_dim": 96, "tie_embedding": False, "full_attn_idxs": [1]}
    assert parse_config(old) == parse_config(new)
    assert parse_config(new).intermediate_size == 256


# -- each way of getting it wrong is noticed ---------------------------------------------------------------------------


def other(**change: Any) -> Callable[[NetworkConfig], NetworkConfig]:
    return lambda config: dataclasses.replace(config, **change)


def all_rotated(config: NetworkConfig) -> NetworkConfig:
    assert config.rope is not None
    return other(rope=dataclasses.replace(config.rope, dim=None))(config)


def not_normalised(config: NetworkConfig) -> NetworkConfig:
    assert config.experts is not None
    routing = dataclasses.replace(config.experts.routing, normalise=False)
    return other(experts=dataclasses.replace(config.experts, routing=routing))(config)


def unscaled(config: NetworkConfig) -> NetworkConfig:
    """Leave out the factor of the experts' weights."""
    assert config.experts is not None
    routing = dataclasses.replace(config.experts.routing, scale=1.0)
    return other(experts=dataclasses.replace(config.experts, routing=routing))(config)


def without_factor(part: int) -> Callable[[NetworkConfig], NetworkConfig]:
    """Leave out a factor of the parts of the first product of a Mamba-2 layer."""

    def spoil(config: NetworkConfig) -> NetworkConfig:
        mixer: Any = config.mixers[0]
        factors = (*mixer.factors[:part], 1.0, *mixer.factors[part + 1 :])
        return other(mixers=(dataclasses.replace(mixer, factors=factors),) * len(config.mixers))(config)

    return spoil


CONFIG_MISTAKES: list[tuple[str, str, Callable[[NetworkConfig], NetworkConfig]]] = [
    ("falcon_h1", "mixers without factors", other(mixer_scales=(1.0, 1.0))),
    ("falcon_h1", "attention without factors", other(attention_scales=(1.0, 1.0))),
    ("falcon_h1", "no factor of gates", other(mlp_scales=(1.0, 0.5))),
    ("falcon_h1", "no factor of keys", other(layer_scales=(0.25,) * 3)),
    *(("falcon_h1", f"no factor of part {part}", without_factor(part)) for part in range(5)),
    ("lfm2", "no norms of heads before the rotation", other(qk_norm="rotated")),
    ("lfm2", "no rotation", other(rope_layers=(False,) * 4)),
    ("lfm2", "another eps", other(norm_eps=0.1)),
    ("nemotron_h", "no square behind the ReLU", other(mlp="relu")),
    ("nemotron_h", "another eps of nemotron_h", other(norm_eps=0.1)),
    ("nemotron_h", "other scores", other(layer_scales=(1.0,) * 5)),
    ("nemotron_h-experts", "weights of experts of Nemotron as they are", not_normalised),
    ("nemotron_h-experts", "no factor of the experts", unscaled),
    ("qwen3_next", "plain norms", other(norm="rms")),
    ("qwen3_next", "all of a head rotated", all_rotated),
    ("qwen3_5_text", "plain norms of Qwen3.5", other(norm="rms")),
    ("qwen3_5_text", "all of a head of Qwen3.5 rotated", all_rotated),
    ("qwen3_5_moe_text", "weights of experts as they are", not_normalised),
]


@pytest.mark.planted("test_logits_and_greedy_answers_equal_transformers[{variant}]")
@pytest.mark.parametrize(("variant", "what", "spoil"), CONFIG_MISTAKES, ids=[what for _, what, _ in CONFIG_MISTAKES])
def test_a_feature_that_is_left_out_is_noticed(
    variant: str, what: str, spoil: Callable[[NetworkConfig], NetworkConfig], tmp_path: Path
) -> None:
    family, overrides = VARIANTS[variant]
    model_dir = tiny_hf_model(tmp_path, family, **overrides)
    expected = hf_logits(hf_model(model_dir), prompt(40))
    model = load_model(model_dir, spoil(read_config(model_dir)), weight_format=PLAIN)
    assert not close(packed_logits(model, [prompt(40)])[0], expected, 0.01), what


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("family", [family for family in WHOLE_FAMILIES if family.startswith("qwen")])
def test_a_whole_checkpoint_answers_texts(family: str, stacked: bool, tmp_path: Path) -> None:
    """Its image encoder and the layers that predict further tokens are left out; experts may be one tensor."""
    text = {**tiny_fields(f"{family}_text"), "pad_token_id": None}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision)
    torch.manual_seed(3)
    theirs = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.25)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["mtp.norm.weight"] = torch.ones(64)
    if stacked:
        for layer in range(3):
            stack_experts(tensors, f"model.language_model.layers.{layer}.mlp.experts.")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt(40)]), use_cache=False).logits[0]
    assert close(packed_logits(load(tmp_path, weight_format=PLAIN), [prompt(40)])[0], expected)


def stack_experts(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    """Replace the tensors of single experts by stacks, as published checkpoints have them."""
    count = sum(name.startswith(prefix) and name.endswith("down_proj.weight") for name in tensors)
    parts = {
        part: torch.stack([tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(count)])
        for part in ("gate_proj", "up_proj", "down_proj")
        if count
    }
    if count:
        tensors[f"{prefix}gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        tensors[f"{prefix}down_proj"] = parts["down_proj"]


@pytest.mark.planted("test_logits_and_greedy_answers_equal_transformers[qwen3_5_text]")
def test_rates_in_another_order_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of decay in place of the rate of writing."""
    model_dir = tiny_hf_model(tmp_path, "qwen3_5_text")
    expected = hf_logits(hf_model(model_dir), prompt(40))
    family, name = FAMILIES["qwen3_5_text"], "model.layers.*.mixer.rates_proj"
    swapped = dataclasses.replace(family, tensors={**family.tensors, name: family.tensors[name][::-1]})
    monkeypatch.setitem(FAMILIES, "qwen3_5_text", swapped)
    assert not close(packed_logits(load(model_dir, weight_format=PLAIN), [prompt(40)])[0], expected, 0.01)


Scan = Callable[[Any, tuple[Any, ...], tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]


def tail_lost(scan: Scan) -> Scan:
    return lambda self, inputs, state: scan(self, inputs, (torch.zeros_like(state[0]), *state[1:]))


def tail_late(scan: Scan) -> Scan:
    """The state lacks the newest token."""

    def wrong(self: Any, inputs: tuple[Any, ...], state: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        out, (after, *others) = scan(self, inputs, state)
        return out, (torch.cat((state[0][:, -1:], after[:, :-1]), dim=1), *others)

    return wrong


def scan_state_lost(scan: Scan) -> Scan:
    return lambda self, inputs, state: scan(self, inputs, (state[0], torch.zeros_like(state[1])))


def scan_state_late(scan: Scan) -> Scan:
    """The state is that before the newest tokens."""

    def wrong(self: Any, inputs: tuple[Any, ...], state: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        out, (tail, _) = scan(self, inputs, state)
        return out, (tail, state[1])

    return wrong


def scan_state_in_16_bits(scan: Scan) -> Scan:
    def wrong(self: Any, inputs: tuple[Any, ...], state: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        out, (tail, after) = scan(self, inputs, state)
        return out, (tail, after.bfloat16().float())

    return wrong


def decay_in_16_bits(scan: Scan) -> Scan:
    return lambda self, inputs, state: scan(
        dataclasses.replace(self, a_log=self.a_log.float().exp().bfloat16().float().log()), inputs, state
    )


def no_time_limit(scan: Scan) -> Scan:
    shape = {"time_limit": (0.0, float("inf"))}
    return lambda self, inputs, state: scan(
        dataclasses.replace(self, shape=dataclasses.replace(self.shape, **shape)), inputs, state
    )


def norm_over_all_groups(scan: Scan) -> Scan:
    return lambda self, inputs, state: scan(
        dataclasses.replace(self, shape=dataclasses.replace(self.shape, norm_groups=1)), inputs, state
    )


def norm_before_the_gate(scan: Scan) -> Scan:
    return lambda self, inputs, state: scan(
        dataclasses.replace(self, shape=dataclasses.replace(self.shape, norm_first=True)), inputs, state
    )


def no_gate_within(scan: Scan) -> Scan:
    def wrong(self: ShortConv, inputs: tuple[Any, ...], state: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        _, c, x = inputs[0].chunk(3, dim=-1)
        return scan(self, (torch.cat((torch.ones_like(x), c, x), dim=-1),), state)

    return wrong


def no_gate_behind(scan: Scan) -> Scan:
    def wrong(self: ShortConv, inputs: tuple[Any, ...], state: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        b, _, x = inputs[0].chunk(3, dim=-1)
        return scan(self, (torch.cat((b, torch.ones_like(x), x), dim=-1),), state)

    return wrong


def not_reset(pieces: list[StatePiece]) -> list[StatePiece]:
    return [dataclasses.replace(piece, read=max(piece.read, 0)) for piece in pieces]


def slot_of_a_neighbour(pieces: list[StatePiece]) -> list[StatePiece]:
    return [dataclasses.replace(piece, write=pieces[i - 1].write) for i, piece in enumerate(pieces)]


def read_of_a_neighbour(pieces: list[StatePiece]) -> list[StatePiece]:
    return [
        dataclasses.replace(piece, read=pieces[i - 1].read if min(piece.read, pieces[i - 1].read) >= 0 else piece.read)
        for i, piece in enumerate(pieces)
    ]


SCAN_MISTAKES = (
    *(tail_lost, tail_late, scan_state_lost, scan_state_late, scan_state_in_16_bits, decay_in_16_bits),
    *(norm_over_all_groups, norm_before_the_gate),
)
CELLS: dict[str, tuple[type, tuple[Callable[[Scan], Scan], ...]]] = {
    "falcon_h1": (Mamba2, (tail_lost, scan_state_lost)),
    "lfm2": (ShortConv, (tail_lost, tail_late, no_gate_within, no_gate_behind)),
    "mamba2": (Mamba2, (*SCAN_MISTAKES, no_time_limit)),
    "nemotron_h": (Mamba2, (tail_lost, scan_state_lost)),
}
"""Family -> its cell, and mistakes in it."""
PIECE_MISTAKES = {mistake.__name__: mistake for mistake in (not_reset, slot_of_a_neighbour, read_of_a_neighbour)}
MISTAKES = [
    (family, mistake)
    for family, (_, mistakes) in CELLS.items()
    for mistake in (*(each.__name__ for each in mistakes), *PIECE_MISTAKES)
]


@pytest.mark.planted("test_a_chunk_may_end_anywhere[{family}]")
@pytest.mark.parametrize(("family", "mistake"), MISTAKES)
def test_a_state_that_goes_wrong_is_noticed(
    family: str, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = tiny_hf_model(tmp_path, family, **({"time_step_limit": (0.0, 1.0)} if family == "mamba2" else {}))
    theirs, tokens = hf_model(model_dir), [prompt(24, 5), prompt(24, 6)]
    cell, mistakes = CELLS[family]
    planted = {each.__name__: each for each in mistakes}
    if mistake in planted:
        monkeypatch.setattr(cell, "scan", planted[mistake](cell.scan))  # type: ignore[attr-defined]
    else:
        plan = recurrent.plan_pieces
        monkeypatch.setattr("chairlift.models.context.plan_pieces", lambda *args: PIECE_MISTAKES[mistake](plan(*args)))
    runner = PagedRunner(load(model_dir, weight_format=PLAIN), 8)
    for part in (slice(0, 9), slice(9, 24)):
        logits = runner.step([("a", tokens[0][part]), ("b", tokens[1][part])])
    expected = [hf_logits(theirs, each)[9:] for each in tokens]
    tolerance = 3e-4 if mistake.endswith("16_bits") else 0.01
    assert not all(close(found, truth, tolerance) for found, truth in zip(logits, expected, strict=True))
