"""Experts in codes have the bits of the decoded weights, and rows that only pad a step choose none."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.kernels import ops
from chairlift.kernels.grouped import GroupKind
from chairlift.kernels.triton import experts as kernels
from chairlift.kernels.triton.routing import sort_pairs
from tests.kernels.expert_layers import ExpertLayer, random_layer
from tests.kernels.triton.probes import TOLERANCE, mutated, normal, seeds
from tests.kernels.triton.test_coded_linear import KINDS, coded
from tests.sweep import sweep

FORMS: dict[str, dict[str, Any]] = {"pairs": {}, "tiles": {"few": 0}, "invariant": {"batch_invariant": True}}
E2M1 = GroupKind(4, 32, e2m1=True)


def compute(layer: ExpertLayer, x: Tensor, form: str, module: ModuleType = kernels, **how: Any) -> Tensor:
    """Result of a layer without a shared expert. ``form`` is a key of FORMS."""
    chosen = dict(FORMS[form])
    with pytest.MonkeyPatch.context() as patch:
        if "few" in chosen:
            patch.setattr(module, "FEW_PAIRS", chosen.pop("few"))
        given = (x, x, None, layer.gate_up, layer.down, *layer.rest)
        result: Tensor = module.experts(*given, num_multiprocessors=4, **chosen, **how)
        return result


def coded_pair(
    draw: random.Random, kinds: tuple[GroupKind, GroupKind], dtype: torch.dtype, device: torch.device,
    hidden: int, inner: int, **fields: Any,
) -> tuple[ExpertLayer, ExpertLayer, Callable[[int], Tensor]]:  # fmt: skip
    """(a layer with weights in codes, the same with floats, function that makes rows of it)."""
    layer = random_layer(draw, dtype, hidden=hidden, inner=inner, shared=False, **fields)
    count = layer.routing.num_experts
    seed = draw.getrandbits(30)
    gate_up = coded(count * (1 + layer.gated) * inner, hidden, kinds[0], dtype, seed, device)
    down = coded(count * hidden, inner, kinds[1], dtype, seed + 1, device)
    moved: dict[str, Any] = {name: each.to(device) for name, each in vars(layer).items() if isinstance(each, Tensor)}
    moved["biases"] = layer.biases and tuple(each.to(device) for each in layer.biases)
    moved["routing"] = layer.routing
    floats = {"gate_up": gate_up.unpack(dtype), "down": down.unpack(dtype)}
    one, other = (
        dataclasses.replace(layer, **{**moved, **weights}) for weights in ({"gate_up": gate_up, "down": down}, floats)
    )
    return one, other, lambda rows: normal(rows, hidden, dtype=dtype, seed=seed, device=device) / 8


def has_the_bits_of_the_decoded_weights(seed: int, kind: GroupKind, form: str, device: torch.device) -> None:
    draw = random.Random(seed)
    gated = draw.random() < 0.7
    clamp = (1.7, 1.5) if gated and draw.random() < 0.5 else None
    sizes = {"hidden": draw.choice([31, 64, 161]), "inner": draw.choice([5, 33, 40])}
    fields: dict[str, Any] = {"num_experts": 5, "top_k": 2, "biased": draw.random() < 0.5, "clamp": clamp}
    kinds = (kind, draw.choice(KINDS))
    coded, floats, rows = coded_pair(draw, kinds, draw.choice(list(TOLERANCE)), device, **sizes, **fields, gated=gated)
    x = rows(draw.choice([1, 7]))
    assert torch.equal(compute(coded, x, form), compute(floats, x, form))


@pytest.mark.parametrize("count", seeds(1))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_experts_have_the_bits_of_the_decoded_weights(
    request: pytest.FixtureRequest, kind: GroupKind, form: str, count: int, device: torch.device
) -> None:
    sweep(request, count, lambda seed: has_the_bits_of_the_decoded_weights(seed, kind, form, device))


@pytest.mark.parametrize("rows", [1, 16, 64, 65])
def test_any_number_of_pairs_has_the_bits_of_the_decoded_weights(rows: int, device: torch.device) -> None:
    """The last number of pairs for the form without sorting is 64."""
    fields: dict[str, Any] = {"num_experts": 3, "top_k": 1, "scoring": "softmax"}
    coded, floats, of = coded_pair(random.Random(rows), (E2M1, E2M1), torch.bfloat16, device, 33, 16, **fields)
    x = of(rows)
    ours = compute(coded, x, "pairs")
    assert torch.equal(ours, compute(floats, x, "pairs"))
    expected = floats(x, None)
    atol = 2 * TOLERANCE[x.dtype] * float(expected.abs().max())
    torch.testing.assert_close(ours, expected, rtol=2 * TOLERANCE[x.dtype], atol=atol)


def test_the_definition_takes_codes(device: torch.device) -> None:
    coded, floats, rows = coded_pair(random.Random(1), (E2M1, KINDS[0]), torch.float32, device, 40, 16)
    assert torch.equal(coded(rows(3), None), floats(rows(3), None))
    given = (coded.router, coded.routing, coded.correction)
    expected = ops.latent_experts(rows(3), rows(3), floats.gate_up, floats.down, *given)
    assert torch.equal(ops.latent_experts(rows(3), rows(3), coded.gate_up, coded.down, *given), expected)


@pytest.mark.parametrize("form", FORMS)
def test_an_expert_may_have_no_rows_or_all_rows(form: str, device: torch.device) -> None:
    """Experts that no row chose have scales that are not numbers."""
    fields: dict[str, Any] = {"num_experts": 4, "top_k": 1, "scoring": "softmax"}
    coded, floats, rows = coded_pair(random.Random(4), (KINDS[3], E2M1), torch.float32, device, 33, 20, **fields)
    x = rows(33)
    x[:, 0] = 1.0
    for layer in (coded, floats):
        layer.router.zero_()
        layer.router[2, 0] = 5.0
    expected = compute(floats, x, form)
    unused = torch.ones(4, dtype=torch.bool)
    unused[2] = False
    gate_up: Any = coded.gate_up
    down: Any = coded.down
    gate_up.scales.view(4, -1)[unused] = float("nan")
    down.scales.view(4, -1)[unused] = 255  # the exponent of infinity
    assert torch.equal(compute(coded, x, form), expected)


def padded(form: str, device: torch.device, module: ModuleType = kernels) -> tuple[Tensor, Tensor, list[Any]]:
    """(rows 0, 2, 3 and 5 of a step whose rows 1 and 4 are padding, results of these rows in a step without padding,
    results of the padding). Padding would choose an expert that has no numbers."""
    fields: dict[str, Any] = {"num_experts": 4, "top_k": 2, "scoring": "softmax"}
    layer = random_layer(random.Random(7), torch.float32, hidden=24, inner=16, shared=False, **fields)
    x, _ = layer.rows(random.Random(8), 6)
    x, real, padding = x.to(device), [0, 2, 3, 5], [1, 4]
    layer = dataclasses.replace(
        layer, gate_up=layer.gate_up.to(device), down=layer.down.to(device), router=layer.router.to(device)
    )
    x[real, 0], x[padding, 0] = -1.0, 1.0
    layer.router[3] = 0.0
    layer.router[3, 0] = 100.0
    expected = compute(layer, x[real], form, module)
    layer.gate_up.view(4, -1)[3] = layer.down.view(4, -1)[3] = float("nan")
    slots = torch.tensor([0, -1, 5, 9, -1, 2], device=device)
    found = compute(layer, x, form, module, slots=slots)
    return found[real], expected, found[padding].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_padding_rows_choose_no_expert(form: str, device: torch.device) -> None:
    found, expected, padding = padded(form, device)
    assert torch.equal(found, expected) and padding == [[0.0] * 24] * 2


def test_pairs_without_an_expert_are_in_no_tile(device: torch.device) -> None:
    chosen = torch.tensor([[0, 2], [3, 3], [2, 1], [3, 3]], dtype=torch.int32, device=device)
    pairs = sort_pairs(chosen, 3, 16)
    used = pairs.experts.cpu() >= 0
    assert pairs.experts[used].tolist() == [0, 1, 2]
    assert [sorted(tile) for tile in pairs.order.cpu()[used].tolist()] == [
        [-1] * 15 + [0], [-1] * 15 + [5], [-1] * 14 + [1, 4],
    ]  # fmt: skip


UP, PAIR_FIRST = "first + width + n, inside_out", "first = expert.to(tl.int64) * num_out\n    for"
TILE_FIRST = "expert.to(tl.int64) * num_out\n    x_rows"
OF_PAIR = "first + n, inside_out, step, num_in, row_bytes, num_groups, BITS,\n            "
OF_PAIR += "GROUP_SIZE, ZERO, FLOATS, BLOCK_N, BLOCK_K, "
CODED: dict[str, tuple[str, str, str]] = {
    "up is the gate": ("pairs", UP, "first + n, inside_out"),
    "experts begin one output too early": ("tiles", TILE_FIRST, TILE_FIRST.replace("num_out", "(num_out - 1)")),
    "pairs have the first expert": ("pairs", PAIR_FIRST, PAIR_FIRST.replace("expert", "0 * expert")),
    "a weight is not rounded": ("pairs", OF_PAIR + "dtype", OF_PAIR + "tl.float32"),
    "a tile reads the first inputs only": ("tiles", "column < num_out, step, num", "column < num_out, 0, num"),
    "sums leave out every other input": ("pairs", "parts = left + right", "parts = left"),
}


@pytest.mark.planted("test_experts_have_the_bits_of_the_decoded_weights")
@pytest.mark.parametrize("fault", CODED)
def test_planted_faults_of_codes_are_found(fault: str, tmp_path: Path, device: torch.device) -> None:
    form, old, new = CODED[fault]
    kind = GroupKind(4, 96, True)
    coded, floats, rows = coded_pair(
        random.Random(3), (kind, kind), torch.bfloat16, device, 161, 20, num_experts=4, top_k=2
    )
    x = rows(5)
    expected = compute(floats, x, form)
    assert torch.equal(compute(coded, x, form), expected)
    assert not torch.equal(compute(coded, x, form, mutated(kernels, old, new, tmp_path)), expected)


PADDING: dict[str, tuple[str, str, str]] = {
    "padding is routed": ("tiles", "correction, router_bias, slots)", "correction, router_bias)"),
    "what nobody wrote is added": ("pairs", "NUM_EXPERTS, WIDTH, 0)", "NUM_EXPERTS + 1, WIDTH, 0)"),
}


@pytest.mark.planted("test_padding_rows_choose_no_expert")
@pytest.mark.parametrize("fault", PADDING)
def test_planted_faults_of_padding_are_found(
    fault: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, old, new = PADDING[fault]
    new_empty = Tensor.new_empty

    def unwritten(x: Tensor, *shape: Any, **how: Any) -> Tensor:
        made = new_empty(x, *shape, **how)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", unwritten)
    assert padded(form, device)[2] == [[0.0] * 24] * 2
    found, expected, padding = padded(form, device, mutated(kernels, old, new, tmp_path))
    assert not torch.equal(found, expected) or padding != [[0.0] * 24] * 2
