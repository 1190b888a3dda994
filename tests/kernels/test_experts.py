"""Routing, and the definition of a layer of experts in plain torch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels import ops
from chairlift.kernels.experts import route
from chairlift.kernels.routing import Routing
from tests.kernels.expert_layers import ExpertLayer, by_hand, random_layer


def logits_of(rng: random.Random, tokens: int, experts: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(rng.getrandbits(60)))


def test_equal_scores_go_to_the_lower_number() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [0.0] * 5, [5.0, 1.0, 1.0, 5.0, 5.0]])
    for scoring in ("softmax", "softmax_chosen", "sigmoid"):
        weights, chosen = route(logits, Routing(num_experts=5, top_k=3, scoring=scoring, normalise=True))
        assert chosen.tolist() == [[1, 2, 4], [0, 1, 2], [0, 3, 4]]
        assert torch.allclose(weights, torch.full((3, 3), 1 / 3))


def test_equal_groups_go_to_the_lower_number() -> None:
    routing = Routing(num_experts=8, top_k=2, scoring="sigmoid", groups=4, kept_groups=2)
    assert route(torch.zeros(1, 8), routing)[1].tolist() == [[0, 1]]
    logits = torch.tensor([[0.0, 0.0, 9.0, -9.0, 1.0, 1.0, 1.0, 1.0]])  # the best expert is in the worst group
    assert route(logits, routing)[1].tolist() == [[4, 5]]
    best = Routing(num_experts=8, top_k=2, scoring="sigmoid", groups=4, kept_groups=2, group_score="best")
    assert route(logits, best)[1].tolist() == [[2, 4]]


def test_a_correction_chooses_and_does_not_weigh() -> None:
    logits, correction = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.0, 0.0, 5.0])
    weights, chosen = route(logits, Routing(num_experts=3, top_k=2, scoring="sigmoid", scale=2.0), correction)
    assert chosen.tolist() == [[2, 0]]
    assert torch.allclose(weights, 2 * logits.sigmoid()[:, [2, 0]])


def test_each_scoring_equals_its_definition() -> None:
    logits = logits_of(random.Random(1), 50, 7)
    over_all = route(logits, Routing(num_experts=7, top_k=3))
    assert torch.allclose(over_all[0], logits.softmax(-1).topk(3).values)
    chosen = route(logits, Routing(num_experts=7, top_k=3, scoring="softmax_chosen"))
    assert torch.allclose(chosen[0], logits.topk(3).values.softmax(-1))
    normalised = route(logits, Routing(num_experts=7, top_k=3, normalise=True))
    assert torch.allclose(normalised[0], chosen[0], atol=1e-6)
    assert torch.equal(over_all[1], chosen[1])
    assert torch.equal(over_all[1], logits.topk(3).indices)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_k": 0}, "0 experts per token, of 8; choose from 1 to all"),
        ({"top_k": 9}, "9 experts per token"),
        ({"groups": 3}, "8 experts make no 3 groups"),
        ({"groups": 4, "kept_groups": 5}, "5 of 4 groups of 2 experts are kept"),
        ({"groups": 4, "kept_groups": 1, "top_k": 3}, "hold the 3 that a token is sent to"),
        ({"groups": 8, "kept_groups": 4}, "groups have 1 each"),
        ({"scoring": "dice"}, "no such scores: dice of experts"),
    ],
)
def test_impossible_routings_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Routing(**{"num_experts": 8, "top_k": 2, **fields})


@pytest.mark.parametrize("seed", range(8))
def test_the_layer_computes_the_weighted_sum_of_experts(seed: int) -> None:
    rng = random.Random(seed)
    layer = random_layer(rng, torch.float32, gated=seed % 3 != 2)
    x, shared = layer.rows(rng, rng.choice((1, 5, 40)))
    expected = by_hand(layer, x, shared)
    assert torch.allclose(layer(x, shared).double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("clamp", [None, (1.7, 1.5)])
def test_biases_and_clamped_gates_are_applied(clamp: tuple[float, float] | None) -> None:
    rng = random.Random(10)
    layer = random_layer(rng, torch.float32, biased=True, clamp=clamp)
    x, shared = layer.rows(rng, 40)
    expected = by_hand(layer, x, shared)
    assert torch.allclose(layer(x, shared).double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    bare = ExpertLayer(**{**vars(layer), "router_bias": None, "biases": None, "clamp": None})
    assert not torch.allclose(bare(x, shared).double(), expected, rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    layer = random_layer(rng, dtype)
    x, shared = layer.rows(rng, 67)
    together = layer(x, shared)
    for row in (0, 1, 30, 66):
        assert torch.equal(layer(x[row : row + 1], None if shared is None else shared[row : row + 1])[0], together[row])
    order = torch.randperm(67, generator=torch.Generator().manual_seed(5))
    assert torch.equal(layer(x[order], None if shared is None else shared[order]), together[order])


def test_all_tokens_may_go_to_one_expert() -> None:
    rng = random.Random(4)
    layer = random_layer(rng, torch.float32, num_experts=4, top_k=1, shared=False)
    x, _ = layer.rows(rng, 33)
    x[:, 0] = 1.0
    layer.router.zero_()
    layer.router[2, 0] = 5.0
    expected = by_hand(layer, x, None)
    assert torch.allclose(layer(x, None).double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    layer.gate_up[: len(layer.gate_up) // 4] = float("nan")  # expert 0, which nobody chose
    assert layer(x, None).isfinite().all()


def test_a_broken_row_breaks_no_other() -> None:
    rng = random.Random(5)
    layer = random_layer(rng, torch.float32, shared=False)
    x, _ = layer.rows(rng, 9)
    sound = layer(x, None)
    x[4] = float("nan")
    broken = layer(x, None)
    assert broken[4].isnan().all()
    keep = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(broken[keep], sound[keep])


def test_gradients_reach_everything() -> None:
    rng = random.Random(6)
    layer = random_layer(rng, torch.float32, num_experts=4, top_k=2, shared=True)
    x, shared = layer.rows(rng, 40)
    given = [x, layer.gate_up, layer.down, layer.router]
    for tensor in given:
        tensor.requires_grad_(True)
    for gradient in torch.autograd.grad(layer(x, shared).square().sum(), given):
        assert gradient.isfinite().all()
        assert gradient.any()


def test_packed_experts_are_for_programs() -> None:
    layer: ExpertLayer = random_layer(random.Random(7), torch.float32)
    with pytest.raises(InvariantError, match="in a step program only"):
        ops.experts(torch.zeros(1, layer.router.shape[1]), None, None, None, layer.router, layer.routing)  # type: ignore[arg-type]
