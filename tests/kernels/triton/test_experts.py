"""A layer of experts in Triton: against its definition, and bit for bit whoever else is in the batch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels import ops
from chairlift.kernels.triton import experts as kernels
from chairlift.kernels.triton.experts import experts
from chairlift.kernels.triton.launch import experts_launch
from tests.kernels.expert_layers import ExpertLayer, by_hand, random_layer
from tests.kernels.triton.probes import TOLERANCE, seeds
from tests.sweep import sweep

FORMS: dict[str, dict[str, Any]] = {
    "pairs": {},
    "tiles": {"FEW_PAIRS": 0},
    "invariant": {"batch_invariant": True},
}


def on(device: torch.device, layer: ExpertLayer) -> ExpertLayer:
    biases = layer.biases and tuple(each.to(device) for each in layer.biases)
    moved = {name: each.to(device) for name, each in vars(layer).items() if isinstance(each, Tensor)}
    return dataclasses.replace(layer, **moved, biases=biases)


def compute(layer: ExpertLayer, x: Tensor, shared: Tensor | None, **how: Any) -> Tensor:
    return experts(x, x, shared, layer.gate_up, layer.down, *layer.rest, num_multiprocessors=4, **how)


@pytest.fixture
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments that choose the form of computation."""
    how = dict(FORMS[request.param])
    if "FEW_PAIRS" in how:
        monkeypatch.setattr(kernels, "FEW_PAIRS", how.pop("FEW_PAIRS"))
    return how


every_form = pytest.mark.parametrize("form", FORMS, indirect=True)


def any_layer(seed: int, device: torch.device, dtype: torch.dtype | None = None) -> tuple[ExpertLayer, Tensor, Any]:
    """(layer, rows, results of its shared expert), with all kinds of activations."""
    draw = random.Random(seed)
    gated = seed % 4 != 3
    clamp = (1.7, 1.5) if gated and draw.random() < 0.4 else None
    sizes = {"hidden": draw.choice([3, 16, 70]), "inner": draw.choice([3, 16, 40])}
    dtype = dtype or draw.choice(list(TOLERANCE))
    layer = random_layer(draw, dtype, biased=draw.random() < 0.4, clamp=clamp, gated=gated, **sizes)
    x, shared = layer.rows(draw, draw.choice([1, 1, 5, 17]))
    return on(device, layer), x.to(device), None if shared is None else shared.to(device)


@every_form
@pytest.mark.parametrize("count", seeds(6))
def test_the_layer_equals_its_definition(
    request: pytest.FixtureRequest, count: int, form: dict[str, Any], device: torch.device
) -> None:
    """In float32, in which the definition rounds as float64 nearly does."""

    def check(seed: int) -> None:
        layer, x, shared = any_layer(seed, device, torch.float32)
        expected = by_hand(on(torch.device("cpu"), layer), x.cpu(), None if shared is None else shared.cpu())
        ours = compute(layer, x, shared, **form)
        scale = float(expected.abs().max())
        torch.testing.assert_close(ours.cpu().double(), expected, rtol=1e-4, atol=1e-4 * scale)

    sweep(request, count, check)


@every_form
@pytest.mark.parametrize("count", seeds(4))
def test_16_bits_round_where_the_definition_rounds(
    request: pytest.FixtureRequest, count: int, form: dict[str, Any], device: torch.device
) -> None:
    def check(seed: int) -> None:
        layer, x, shared = any_layer(seed, device, (torch.bfloat16, torch.float16)[seed % 2])
        expected = layer(x, shared)
        ours = compute(layer, x, shared, **form)
        assert ours.dtype == expected.dtype
        atol = 2 * TOLERANCE[x.dtype] * float(expected.abs().max())
        torch.testing.assert_close(ours, expected, rtol=2 * TOLERANCE[x.dtype], atol=atol)

    sweep(request, count, check)


def test_latent_experts_are_routed_by_other_rows(device: torch.device) -> None:
    draw = random.Random(2)
    layer = on(device, random_layer(draw, torch.float32, hidden=40, inner=16, shared=False, num_experts=5, top_k=2))
    x, _ = layer.rows(draw, 6)
    x, routed = x.to(device), torch.cat((x, x.flip(0)), dim=1).to(device)
    router = torch.cat((layer.router.flip(0), layer.router), dim=1)
    given = (layer.gate_up, layer.down, router, layer.routing, layer.correction)
    expected = ops.latent_experts(x, routed, *given)
    ours = experts(x, routed, None, *given, num_multiprocessors=4)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("form", "rows"), [("pairs", 12), ("invariant", 67), ("tiles", 33)], indirect=["form"])
def test_a_row_has_the_same_bits_in_any_company(form: dict[str, Any], rows: int, device: torch.device) -> None:
    """Alone, in all rows, and in another order. Without ``batch_invariant``, batches of one launch are compared."""
    layer = random_layer(random.Random(3), torch.bfloat16, hidden=70, inner=40, num_experts=6, top_k=2, shared=True)
    layer = on(device, layer)
    x, shared = (each.to(device) for each in layer.rows(random.Random(4), rows))  # type: ignore[union-attr]
    together = compute(layer, x, shared, **form)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(5)).to(device)
    assert torch.equal(compute(layer, x[order], shared[order], **form), together[order])
    if form or rows <= 16:  # the others are of another form alone
        for row in (0, 9, rows - 1):
            alone = compute(layer, x[row : row + 1], shared[row : row + 1], **form)
            assert torch.equal(alone[0], together[row])


@every_form
def test_an_expert_may_have_no_rows_or_all_rows(form: dict[str, Any], device: torch.device) -> None:
    layer = on(device, random_layer(random.Random(4), torch.float32, num_experts=4, top_k=1, shared=False))
    x = layer.rows(random.Random(5), 33)[0].to(device)
    x[:, 0] = 1.0
    layer.router.zero_()
    layer.router[2, 0] = 5.0
    expected = layer(x, None)
    unused = torch.ones(4, dtype=torch.bool)
    unused[2] = False
    layer.gate_up.view(4, -1)[unused] = float("nan")  # experts that no row chose
    layer.down.view(4, -1)[unused] = float("nan")
    torch.testing.assert_close(compute(layer, x, None, **form), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's
@every_form
def test_a_broken_row_breaks_no_other(form: dict[str, Any], device: torch.device) -> None:
    layer = on(device, random_layer(random.Random(5), torch.float32, shared=False, biased=True, clamp=(1.7, 1.5)))
    x = layer.rows(random.Random(6), 9)[0].to(device)
    sound = compute(layer, x, None, **form)
    x[4] = float("nan")
    broken = compute(layer, x, None, **form)
    assert broken[4].isnan().all()
    keep = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(broken[keep], sound[keep])


def test_the_launches_depend_on_shapes_only(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a captured graph serves any choice."""
    layer = on(device, random_layer(random.Random(7), torch.float32, num_experts=5, top_k=2, shared=False))
    rows = layer.rows(random.Random(8), 12)[0].to(device)
    same = rows[:1].expand(12, -1).contiguous()
    grids = []
    for x in (rows, same):
        found: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "FEW_PAIRS", 4)
            for name in ("_of_pairs", "_of_tiles", "_add_chosen"):
                patch.setattr(kernels, name, _Watched(getattr(kernels, name), found))
            for part in (x, x[:2]):
                torch.testing.assert_close(compute(layer, part, None), layer(part, None), rtol=1e-4, atol=1e-4)
        grids.append(found)
    assert grids[0] == grids[1] and len(grids[0]) == 6


class _Watched:
    """A kernel that notes the grids with which it is launched."""

    def __init__(self, kernel: Any, grids: list[Any]) -> None:
        self._kernel, self._grids = kernel, grids

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._grids.append(grid)
        return self._kernel[grid]


def test_tiles_grow_with_the_pairs_of_an_expert() -> None:
    assert experts_launch(128 * 8, 128).block_m == 16
    assert experts_launch(128 * 8, 8).block_m == experts_launch(8, 128, any_rows=True).block_m == 64


def test_edge_shapes_give_empty_results_or_are_refused(device: torch.device) -> None:
    layer = on(device, random_layer(random.Random(9), torch.float32, hidden=16, inner=8, shared=False))
    assert compute(layer, torch.zeros((0, 16), device=device), None).shape == (0, 16)
    with pytest.raises(InvariantError, match="are not those of"):
        compute(dataclasses.replace(layer, down=layer.down[:-1]), torch.zeros((1, 16), device=device), None)


def weights_in_another_order(patch: pytest.MonkeyPatch) -> None:
    route = kernels.route

    def wrong(*given: Any) -> tuple[Tensor, Tensor]:
        weights, chosen = route(*given)
        return weights.flip(1).contiguous(), chosen

    patch.setattr(kernels, "route", wrong)


def pairs_are_one_too_low(patch: pytest.MonkeyPatch) -> None:
    sort = kernels.sort_pairs

    def wrong(*given: Any) -> Any:
        pairs = sort(*given)
        pairs.order[pairs.order > 0] -= 1
        return pairs

    patch.setattr(kernels, "sort_pairs", wrong)


def a_tile_has_another_expert(patch: pytest.MonkeyPatch) -> None:
    sort = kernels.sort_pairs

    def wrong(*given: Any) -> Any:
        pairs = sort(*given)
        pairs.experts[0] += 1
        return pairs

    patch.setattr(kernels, "sort_pairs", wrong)


def no_clamp(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernels, "_CLAMPED", kernels._SWIGLU)


def the_gate_is_up(patch: pytest.MonkeyPatch) -> None:
    activated = kernels._activated
    patch.setattr(kernels, "_activated", lambda gate, up, *how: activated(up, gate, *how))


@pytest.mark.planted("test_the_layer_equals_its_definition")
@pytest.mark.skipif(torch.cuda.is_available(), reason="only interpreted kernels can be replaced")
@pytest.mark.parametrize(
    ("form", "fault"),
    [
        ("pairs", weights_in_another_order),
        ("tiles", weights_in_another_order),
        ("tiles", pairs_are_one_too_low),
        ("tiles", a_tile_has_another_expert),
        ("pairs", no_clamp),
        ("tiles", no_clamp),
        ("pairs", the_gate_is_up),
        ("tiles", the_gate_is_up),
    ],
    indirect=["form"],
)
def test_mistakes_are_noticed(
    form: dict[str, Any], fault: Callable[[pytest.MonkeyPatch], None], device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    draw = random.Random(11)
    sizes = {"hidden": 16, "inner": 24, "num_experts": 4, "top_k": 3}
    layer = on(device, random_layer(draw, torch.float32, biased=True, clamp=(1.7, 1.5), shared=True, **sizes))
    x, shared = (each.to(device) for each in layer.rows(draw, 7))  # type: ignore[union-attr]
    expected = layer(x, shared)
    torch.testing.assert_close(compute(layer, x, shared, **form), expected, rtol=1e-4, atol=1e-4)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(compute(layer, x, shared, **form), expected, rtol=1e-4, atol=1e-4)
