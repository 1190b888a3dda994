from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks.floor import floor_seconds
from chairlift.kernels.roof import Roof
from chairlift.models.causal_lm import CausalLM
from chairlift.models.hf_config import NetworkConfig, parse_config
from chairlift.models.step_cost import ExpertCost, ModelCost
from chairlift_lab.bench.floor import workload_floor
from chairlift_lab.workload.lengths import Workload

SIZES = {"vocab_size": 70, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 1},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 10},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32},
    "gpt2": {"model_type": "gpt2", "n_embd": 48, "n_inner": 80, "n_layer": 3, "n_head": 4, "n_positions": 9},
    "arcee": {"model_type": "arcee"},
    "cohere2": {"model_type": "cohere2"},
    "gemma3_text": {"model_type": "gemma3_text", "head_dim": 32, "num_key_value_heads": 2},
    "glm4": {"model_type": "glm4", "num_key_value_heads": 2},
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.5},
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", "num_key_value_heads": 2},
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 2},
    "phi": {"model_type": "phi"},
}
ONE = ModelCost(body_params=100, head_params=10, itemsize=2, kv_bytes=((None, 6),))
MEMORY = Roof(bandwidth=1.0, peak=1e12)
"""A machine that computes in no time."""
ARITHMETIC = Roof(bandwidth=1e12, peak=1.0)
"""A machine that reads in no time."""


def network(name: str) -> NetworkConfig:
    return parse_config({**SIZES, "num_attention_heads": 4, **VARIANTS[name]})


@pytest.mark.parametrize("name", VARIANTS)
def test_every_weight_is_counted_once(name: str) -> None:
    config = network(name)
    with torch.device("meta"):
        model = CausalLM(config)
    model.tie_weights()
    cost = ModelCost.of(config, torch.bfloat16)
    embedding = 0 if config.tie_word_embeddings else 70 * 48
    embedding += 9 * 48 if config.learned_positions else 0
    assert cost.body_params + cost.head_params + embedding == sum(weight.numel() for weight in model.parameters())
    q_width, last = config.num_attention_heads * config.head_dim, "model.layers.2."
    behind = ("self_attn.o_proj", "self_attn.q_norm", "post_attention", "attention_out", "mlp", "model.norm", "lm_head")
    weights = dict(model.named_parameters(remove_duplicate=False))
    sampled = sum(w.numel() for name, w in weights.items() if name.removeprefix(last).startswith(behind))
    queries = sum(w[:q_width].numel() for name, w in weights.items() if name.startswith(last + "self_attn.qkv_proj"))
    assert cost.head_params == sampled + queries
    assert cost.weight_bytes == 2 * (cost.body_params + cost.head_params)
    small = ModelCost.of(config, torch.bfloat16, "fp8")
    fp8 = {name: w for name, w in weights.items() if name.endswith("proj.weight")}
    saved = {name: w.numel() - 4 * len(w) for name, w in fp8.items()}  # a scale of four bytes for each output
    assert cost.weight_bytes - small.weight_bytes == sum(saved.values())
    keys = [w[q_width:].numel() - 4 * len(w[q_width:]) for name, w in fp8.items() if "qkv" in name][-1]
    assert small.head_saved == sum(count for name, count in saved.items() if name.startswith(last)) - keys
    assert cost.kv_read(1) == 2 * sum(2 * layer.num_kv_heads * layer.head_dim for layer in model.kv_cache_spec())


EXPERTS = {
    "qwen2_moe": {"decoder_sparse_step": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 12},
    "glm4_moe": {"n_routed_experts": 6, "moe_intermediate_size": 20, "first_k_dense_replace": 1, "head_dim": 12},
    "mixtral": {"num_local_experts": 6},
}


@pytest.mark.parametrize("family", EXPERTS)
def test_every_expert_is_counted_once(family: str) -> None:
    own = {"model_type": family, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    counted = {} if family != "qwen2_moe" else {"num_experts": 6}
    config = parse_config({**SIZES, **own, **counted, **EXPERTS[family]})
    with torch.device("meta"):
        model = CausalLM(config)
    weights = dict(model.named_parameters())
    experts = sum(weight.numel() for name, weight in weights.items() if ".experts." in name)
    cost = ModelCost.of(config, torch.bfloat16)
    apart = [part.layers * part.count * part.params for part in cost.experts]
    assert sum(apart) == experts
    embedding = 0 if config.tie_word_embeddings else 70 * 48
    assert cost.body_params + cost.head_params + sum(apart) + embedding == sum(w.numel() for w in weights.values())
    assert cost.weight_bytes == 2 * (cost.body_params + cost.head_params + experts)
    tail = sum(w.numel() for name, w in weights.items() if name.startswith("model.layers.2.") and ".experts." in name)
    assert sum(part.layers * part.count * part.params for part in cost.experts if part.in_tail) == tail


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    part = ExpertCost(layers=2, in_tail=False, count=8, top_k=2, params=10, nbytes=20)
    assert part.read(1) == 2 * 2 * 20
    assert part.read(2) == pytest.approx(2 * 3.5 * 20)  # the second finds a quarter of its experts there
    assert part.read(10_000) == pytest.approx(2 * 8 * 20)
    cost = dataclasses.replace(ONE, experts=(part,))
    assert workload_floor([(1, 1)], cost, Roof(1.0, 1e9)).seconds == 220 + 80
    assert workload_floor([(1, 1)], cost, ARITHMETIC).seconds == 220 + 2 * 2 * 2 * 10


def test_a_step_reads_what_fp8_has_left() -> None:
    fp8 = dataclasses.replace(ONE, body_saved=80, head_saved=8)
    roof = Roof(1.0, 1e9)
    assert workload_floor([(4, 1)], fp8, roof).seconds == 220 - 88
    assert workload_floor([(4, 1)], ONE, roof).seconds == 220


def test_a_window_bounds_what_is_read() -> None:
    cost = ModelCost.of(network("mistral"), torch.float32)
    per_token = 2 * 2 * 12 * 4 * 3  # K and V, heads, their size, bytes, layers
    assert [cost.kv_read(context) for context in (9, 10, 11, 500)] == [n * per_token for n in (9, 10, 10, 10)]
    mixed = ModelCost(1, 1, 2, ((None, 4), (10, 100)))
    assert mixed.kv_read(12) == 12 * 4 + 10 * 100


def test_the_floor_of_one_request_adds_up_step_by_step() -> None:
    # Prompt in chunks of 2, 2 and 1; the last samples. Then two decodes over 5 and 6 cached tokens.
    floor = workload_floor([(5, 3)], ONE, MEMORY, budgets=[2])
    weights = 2 * (100 + 100 + 110 + 110 + 110)
    assert (floor.steps, floor.token_budget) == (5, 2)
    assert floor.seconds == pytest.approx(weights + 6 * (5 + 6))
    # Computing: five prompt tokens and two decodes pass the body, three tokens are sampled.
    floor = workload_floor([(5, 3)], ONE, ARITHMETIC, budgets=[2])
    assert floor.seconds == pytest.approx(2 * (7 * 100 + 3 * 10))


def test_requests_share_the_weights() -> None:
    # Both prompts fit into the first step, and both decode in the second.
    both = workload_floor([(3, 2), (4, 2)], ONE, MEMORY, budgets=[8])
    assert (both.steps, both.seconds) == (2, pytest.approx(2 * 110 * 2 + 6 * (3 + 4)))
    # One after the other they cannot, but the second joins in the step after the first has ended.
    alone = workload_floor([(3, 2), (4, 2)], ONE, MEMORY, budgets=[8], max_num_seqs=1)
    assert (alone.steps, alone.seconds) == (4, pytest.approx(4 * 110 * 2 + 6 * (3 + 4)))


def test_each_step_takes_the_longer_of_reading_and_computing() -> None:
    roof = Roof(bandwidth=2.0, peak=4.0)
    # Reading the weights takes 110 s; computing 2 * (tokens * 100 + 10) / 4: 55 s for one token, 255 s for five.
    assert workload_floor([(1, 1)], ONE, roof, budgets=[8]).seconds == pytest.approx(110)
    assert workload_floor([(5, 1)], ONE, roof, budgets=[8]).seconds == pytest.approx(255)


def test_the_floor_uses_the_fastest_of_its_budgets() -> None:
    small, large = (workload_floor([(6, 1)], ONE, MEMORY, budgets=[budget]) for budget in (2, 6))
    assert small.seconds > large.seconds
    assert workload_floor([(6, 1)], ONE, MEMORY, budgets=[2, 6]) == large


@pytest.mark.parametrize("roof", [Roof(31.5e9, 6.24e12), Roof(45e9, 1.05e12)])
@pytest.mark.parametrize("seqs", [16, 128])
def test_the_floor_agrees_with_the_formula_of_the_benchmarks(roof: Roof, seqs: int) -> None:
    """Written twice, because the scripts that drive other engines run without Chairlift."""
    cost = ModelCost(357_898_112, 136_134_656, 2, ((None, 12_288),))
    requests = Workload(count=96).requests()
    lengths = [(len(prompt), count) for prompt, count in requests]
    other = floor_seconds(
        requests, cost.body_params, cost.head_params, 12_288, roof.bandwidth, roof.peak, max_num_seqs=seqs
    )
    assert workload_floor(lengths, cost, roof, max_num_seqs=seqs).seconds == pytest.approx(other)
