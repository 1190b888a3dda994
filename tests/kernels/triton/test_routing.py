"""Routing in Triton: the choice of the definition, to the index; pairs sorted by expert, whatever is chosen."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels import experts
from chairlift.kernels.routing import Routing
from chairlift.kernels.triton import routing as kernels
from chairlift.kernels.triton.routing import num_tiles, route, sort_pairs
from tests.kernels.expert_layers import random_layer
from tests.kernels.triton.probes import normal, seeds
from tests.sweep import sweep

nan_warns = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
"""The interpreter warns of a maximum of NaN alone."""


def logits_of(draw: random.Random, rows: int, count: int, device: torch.device) -> Tensor:
    """Some rows have few different values, so that experts tie; one has an infinite logit, one is NaN."""
    logits = normal(rows, count, dtype=torch.float32, seed=draw.getrandbits(30), device=device) * 3
    logits[::3] = logits[::3].round().clamp(-1, 1)
    logits[1::5, draw.randrange(count)] = float("-inf")
    logits[2::7] = float("nan")
    return logits


@nan_warns
@pytest.mark.parametrize("count", seeds(12))
def test_the_choice_is_that_of_the_definition(request: pytest.FixtureRequest, count: int, device: torch.device) -> None:
    def check(seed: int) -> None:
        draw = random.Random(seed)
        layer = random_layer(draw, torch.float32, hidden=4, inner=4)
        routing, rows = layer.routing, draw.choice([1, 2, 9])
        correction = None if layer.correction is None else layer.correction.to(device)
        logits = logits_of(draw, rows, routing.num_experts, device)
        bias = normal(routing.num_experts, dtype=torch.float32, seed=seed, device=device).round()
        bias = bias if draw.random() < 0.5 else None
        expected = experts.route(logits if bias is None else logits + bias, routing, correction)
        # The parts of a split sum whose other parts are 0.
        parts = torch.stack([torch.zeros_like(logits)] * draw.choice([0, 2]) + [logits])
        weights, chosen = route(parts, routing, correction, bias)
        assert torch.equal(chosen.long(), expected[1])
        # The same roundings: only the last bit of an exponential may differ.
        torch.testing.assert_close(weights, expected[0], rtol=1e-6, atol=0, equal_nan=True)

    sweep(request, count, check)


@nan_warns
def test_equal_scores_go_to_the_lower_index_and_nan_goes_first(device: torch.device) -> None:
    nan = float("nan")
    logits = torch.tensor([[0.0, 3.0, -0.0, 3.0, 3.0], [nan] * 5, [1.0, nan, 2.0, nan, 0.0]], device=device)
    _, chosen = route(logits[None], Routing(num_experts=5, top_k=4, scoring="softmax_chosen"))
    assert chosen.tolist() == [[1, 3, 4, 0], [0, 1, 2, 3], [1, 3, 2, 0]]
    nobody = route(logits[None, :0], Routing(num_experts=5, top_k=4))
    assert [each.shape for each in nobody] == [(0, 4), (0, 4)]


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    routing = Routing(num_experts=5, top_k=2)
    with pytest.raises(InvariantError, match=r"parts \[1, 3, 4\] are not the logits of 5 experts, 2 chosen"):
        route(torch.zeros((1, 3, 4), device=device), routing)
    with pytest.raises(InvariantError, match=r"the bias \[4\] must have one number for each of 5 experts"):
        route(torch.zeros((1, 3, 5), device=device), routing, bias=torch.zeros(4, device=device))


def check_sorted(chosen: Tensor, num_experts: int, block_m: int) -> None:
    """Every pair is in one tile of its expert, in order; the other places are empty."""
    pairs = sort_pairs(chosen, num_experts, block_m)
    order, tiles = pairs.order.cpu(), pairs.experts.tolist()
    assert len(order) == len(tiles) == num_tiles(chosen.numel(), num_experts, block_m)
    used = len(tiles) - tiles.count(-1)
    assert -1 not in tiles[:used] and tiles[:used] == sorted(tiles[:used])
    flat = chosen.flatten().cpu()
    for expert in range(num_experts):
        mine = torch.cat([order[:0].flatten(), *(order[i] for i in range(used) if tiles[i] == expert)])
        expected = (flat == expert).nonzero().flatten()
        assert mine[: len(expected)].tolist() == expected.tolist()
        assert (mine[len(expected) :] == -1).all() and len(mine) == -(-len(expected) // block_m) * block_m


@pytest.mark.parametrize("count", seeds(8))
def test_pairs_are_sorted_by_expert_into_tiles(
    request: pytest.FixtureRequest, count: int, device: torch.device
) -> None:
    def check(seed: int) -> None:
        draw = random.Random(seed)
        num_experts, block_m = draw.choice([1, 2, 5, 16]), draw.choice([16, 64])
        top_k, rows = draw.randint(1, min(4, num_experts)), draw.choice([1, 3, 16, 70, 300])
        favourites = draw.sample(range(num_experts), draw.randint(top_k, num_experts))  # the others get no rows
        chosen = [draw.sample(favourites, top_k) for _ in range(rows)]
        check_sorted(torch.tensor(chosen, dtype=torch.int32, device=device), num_experts, block_m)

    sweep(request, count, check)


@pytest.mark.parametrize("expert", [0, 3])
def test_one_expert_may_have_all_pairs(expert: int, device: torch.device) -> None:
    check_sorted(torch.full((600, 1), expert, dtype=torch.int32, device=device), 4, 16)


def the_higher_index_wins(patch: pytest.MonkeyPatch) -> None:
    ranks = kernels._ranks
    patch.setattr(kernels, "_ranks", lambda scores, index: ranks(scores, index) + 2 * index)


def groups_are_not_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernels, "_within_groups", lambda ranks, *_: ranks)


def groups_are_dropped_by_their_best_alone(patch: pytest.MonkeyPatch) -> None:
    within = kernels._within_groups
    patch.setattr(kernels, "_within_groups", lambda *given: within(*given[:-1], False))


def softmax_over_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernels, "SCORINGS", ("softmax", "sigmoid", "softmax_chosen"))


@nan_warns
@pytest.mark.planted("test_the_choice_is_that_of_the_definition")
@pytest.mark.skipif(torch.cuda.is_available(), reason="only interpreted kernels can be replaced")
@pytest.mark.parametrize(
    "fault",
    [the_higher_index_wins, groups_are_not_dropped, groups_are_dropped_by_their_best_alone, softmax_over_all],
)
def test_mistakes_of_routing_are_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        for scoring in ("sigmoid", "softmax_chosen"):
            more: dict[str, Any] = {"groups": 4, "kept_groups": 2, "scoring": scoring}
            for seed in range(2):
                logits = logits_of(random.Random(seed), 7, 12, device)
                found = Routing(num_experts=12, top_k=3, **more)
                weights, chosen = route(logits[None], found)
                expected = experts.route(logits, found)
                assert torch.equal(chosen.long(), expected[1])
                torch.testing.assert_close(weights, expected[0], rtol=1e-6, atol=0, equal_nan=True)

    check()
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check()
