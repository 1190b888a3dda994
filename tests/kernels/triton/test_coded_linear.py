"""The product with a weight in codes: bit for bit that of the decoded weight, for all codes, rows and splits."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.coded import CodedWeight
from chairlift.kernels.grouped import GroupedRows, GroupKind
from chairlift.kernels.triton import coded_linear as kernels
from chairlift.kernels.triton.launch import GemmLaunch
from chairlift.kernels.triton.linear_small import linear_parts, linear_small
from tests.kernels.triton.probes import TOLERANCE, mutated, normal, seeds
from tests.sweep import sweep

KINDS = [
    *(GroupKind(bits, group, minimum) for bits in (4, 8) for group in (32, 128) for minimum in (False, True)),
    GroupKind(4, 96, True),
    GroupKind(4, 32, e2m1=True),
    GroupKind(8, 128, e4m3=True),
]
WIDTHS = [1, 31, 33, 64, 100, 161, 200, 257]
"""Numbers of inputs: odd ones, and last groups and units that are short."""


def coded(
    num_out: int, num_in: int, kind: GroupKind, dtype: torch.dtype, seed: int, device: torch.device
) -> CodedWeight:
    """Random codes. Each output has scales of its own, far from its neighbours'."""
    draw = torch.Generator().manual_seed(seed)
    groups = -(-num_in // kind.group)
    codes = torch.randint(0, 1 << kind.bits, (num_out, num_in), generator=draw, dtype=torch.uint8)
    if kind.e4m3:
        codes = torch.where(codes & 127 == 127, codes - 1, codes)  # the bits of NaN
    scales = 2.0 ** torch.randint(-9, 0, (num_out, groups), generator=draw)
    minimums = None
    if kind.e4m3:
        scales = scales * torch.rand(num_out, groups, generator=draw)
    elif not kind.e2m1:
        scales = (scales * (1 + torch.rand(num_out, groups, generator=draw))).half().float()
    if kind.minimum:
        minimums = (torch.randn(num_out, groups, generator=draw) / 8).half().float()
    weight = CodedWeight(num_out, num_in, kind, dtype, device)
    weight.pack_rows(GroupedRows(kind, codes, scales, minimums))
    assert not weight.rounds_scales and not weight.rounds_weights
    return weight


def has_the_bits_of_the_decoded_weight(seed: int, kind: GroupKind, device: torch.device) -> None:
    draw = random.Random(seed)
    dtype, num_in, num_out = draw.choice(list(TOLERANCE)), draw.choice(WIDTHS), draw.choice([2, 18, 34])
    rows, gated = draw.choice([1, 16, 17, 64]), draw.random() < 0.5
    launch = GemmLaunch(64 if rows == 64 else 16, *draw.choices([32, 64], k=2), draw.choice([1, 2, 3, 7]), 4, 2)
    weight = coded(num_out, num_in, kind, dtype, seed, device)
    x = normal(rows, num_in + 8, dtype=dtype, seed=seed, device=device)[:, :num_in]
    bias = normal(num_out, dtype=dtype, seed=seed + 2, device=device) if draw.random() < 0.5 else None
    ours = kernels.coded_linear(x, weight, bias, launch=launch, gated=gated)
    assert torch.equal(ours, linear_small(x, weight.unpack(dtype), bias, launch=launch, gated=gated))


@pytest.mark.parametrize("count", seeds(2))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_product_has_the_bits_of_the_decoded_weight(
    request: pytest.FixtureRequest, kind: GroupKind, count: int, device: torch.device
) -> None:
    sweep(request, count, lambda seed: has_the_bits_of_the_decoded_weight(seed, kind, device))


def parts_are_those_of_the_decoded_weight(kind: GroupKind, module: ModuleType, device: torch.device) -> bool:
    """Float32 parts of the sums of a small layer, which show a difference in the last bit of a weight."""
    x, launch = normal(3, 161, dtype=torch.bfloat16, seed=1, device=device), GemmLaunch(16, 32, 32, 2, 4, 2)
    weight = coded(18, 161, kind, torch.bfloat16, 1, device)
    expected = linear_parts(x, weight.unpack(torch.bfloat16), launch=launch)
    return torch.equal(module.coded_parts(x, weight, launch=launch), expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_parts_of_sums_have_the_bits_of_the_decoded_weight(kind: GroupKind, device: torch.device) -> None:
    assert parts_are_those_of_the_decoded_weight(kind, kernels, device)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_decoded_rows_are_what_the_codes_stand_for(kind: GroupKind, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = coded(37, 161, kind, dtype, 3, device)
        truth = weight.unpack(dtype)
        assert torch.equal(kernels.decoded_rows(weight, dtype), truth)
        assert torch.equal(kernels.decoded_rows(weight, dtype, 5, 20), truth[5:25])
        ids = torch.tensor([36, 0, 7, 7], dtype=torch.int32, device=device)
        assert torch.equal(kernels.decoded_rows(weight, dtype, ids=ids), truth[ids.long()])


def test_many_rows_meet_the_weight_in_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = coded(75, 96, GroupKind(4, 32, True), torch.float32, 1, device)
    x = normal(40, 96, dtype=torch.float32, seed=2, device=device)
    for bias in (None, normal(75, dtype=torch.float32, seed=3, device=device)):
        truth = x.double() @ weight.unpack(torch.float64).T + (0 if bias is None else bias.double())
        for most in (kernels.DECODED_BYTES, 32 * 96 * 4, 1):
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "DECODED_BYTES", most)
                ours = kernels.library_linear(x, weight, bias)
            torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_row_has_the_same_bits_in_any_company(num_splits: int, device: torch.device) -> None:
    launch = GemmLaunch(16, 16, 32, num_splits, 4, 2)
    x = normal(20, 112, dtype=torch.bfloat16, seed=1, device=device)
    weight = coded(24, 112, GroupKind(4, 32), torch.bfloat16, 2, device)
    together = kernels.coded_linear(x, weight, None, launch=launch)
    for rows in ([0], [7, 3], list(range(19, -1, -1))):
        assert torch.equal(kernels.coded_linear(x[rows], weight, None, launch=launch), together[rows])


def test_a_nan_stays_in_its_row_and_a_group_without_numbers_in_its_output(device: torch.device) -> None:
    weight = coded(16, 64, GroupKind(8, 32), torch.float32, 1, device)
    x = normal(4, 64, dtype=torch.float32, seed=1, device=device)
    x[2, 5] = float("nan")
    out = kernels.coded_linear(x, weight, None, launch=GemmLaunch(16, 16, 32, 2, 4, 2))
    assert out[2].isnan().all() and not out[[0, 1, 3]].isnan().any()
    weight.scales[3, 1] = float("nan")
    out = kernels.coded_linear(x, weight, None, launch=GemmLaunch(16, 16, 32, 1, 4, 2))
    assert out[:, 3].isnan().all() and not out[:2, [0, 1, 2, 4]].isnan().any()


def test_edge_shapes_give_empty_results_or_are_refused(device: torch.device) -> None:
    weight, launch = coded(16, 32, GroupKind(4, 32), torch.float32, 1, device), GemmLaunch(16, 16, 32, 2, 4, 2)
    none = torch.zeros((0, 32), device=device)
    assert kernels.coded_linear(none, weight, None, launch=launch).shape == (0, 16)
    assert kernels.coded_linear(none, weight, None, launch=launch, gated=True).shape == (0, 8)
    assert kernels.decoded_rows(weight, torch.float32, ids=torch.zeros(0, dtype=torch.int32)).shape == (0, 32)
    odd = coded(15, 32, GroupKind(4, 32), torch.float32, 1, device)
    with pytest.raises(InvariantError, match="even number of both; got 15"):
        kernels.coded_linear(torch.zeros((1, 32), device=device), odd, None, launch=launch, gated=True)
    with pytest.raises(InvariantError, match="share K"):
        kernels.coded_linear(torch.zeros((1, 31), device=device), weight, None, launch=launch)


INTEGERS, LONG, MINIMUMS = GroupKind(4, 32), GroupKind(4, 96, True), GroupKind(8, 32, True)
FLOAT4, FLOAT8 = GroupKind(4, 32, e2m1=True), GroupKind(8, 128, e4m3=True)
FAULTS: dict[str, tuple[GroupKind, str, str]] = {
    "the halves of a unit are not in order": (INTEGERS, "[0, 1, 3, 2]), [BLOCK_N", "[0, 1, 2, 3]), [BLOCK_N"),
    "the halves of a byte are exchanged": (INTEGERS, "join(codes & 15, codes >> 4)", "join(codes >> 4, codes & 15)"),
    "a zero point is off by one": (INTEGERS, "(8388608.0 + ZERO)", "(8388607.0 + ZERO)"),
    "all groups have the size of a unit": (LONG, "group = first // GROUP_SIZE", "group = first // _UNIT"),
    "scales are those of the first step": (INTEGERS, "first = step * BLOCK_K + tl", "first = 0 * step + tl"),
    "scales are those of the first output": (INTEGERS, "table = rows[:, None]", "table = (rows * 0)[:, None]"),
    "a table's unit is forgotten": (INTEGERS, "entries *= _INVERSE", "entries *= 1"),
    "minimums are scaled": (MINIMUMS, "numbers += _table", "numbers += scales[:, :, None] * _table"),
    "an 8-bit float loses its sign": (FLOAT8, "((bits & 128) << 8) | ", ""),
    "an 8-bit float's exponent is off": (FLOAT8, "* 256.0", "* 128.0"),
    "a 4-bit float loses its sign": (FLOAT4, "((bits & 8) << 12) | ", ""),
    "a 4-bit float's exponent is off": (FLOAT4, "* 32768.0", "* 16384.0"),
    "exponents lose their last bit": (FLOAT4, "(exponents << 23)", "((exponents & 254) << 23)"),
    "the last input is cut": (
        INTEGERS,
        "k < num_in)[None, :], other=0.0)\n        weight",
        "k < num_in - 1)[None, :], other=0.0)\n        weight",
    ),
    "rows of codes begin too early": (MINIMUMS, "rows[:, None] * row_bytes", "rows[:, None] * (row_bytes - 1)"),
    "splits overlap": (INTEGERS, "range(split * share, tl", "range(split * (share - 1), tl"),
    "a weight is rounded twice": (MINIMUMS, "weight.to(x.dtype)", "weight.to(tl.float16).to(x.dtype)"),
}


@pytest.mark.planted("test_the_parts_of_sums_have_the_bits_of_the_decoded_weight")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path, device: torch.device) -> None:
    kind, old, new = FAULTS[fault]
    assert not parts_are_those_of_the_decoded_weight(kind, mutated(kernels, old, new, tmp_path), device)


def test_tests_can_tell_a_weight_from_its_neighbour() -> None:
    """Codes, scales and minimums of the random weights differ everywhere, so that no fault is invisible."""
    weight: Tensor = coded(8, 96, GroupKind(4, 32, True), torch.float32, 1, torch.device("cpu")).unpack(torch.float32)
    assert len(weight.unique(dim=0)) == 8 and len(weight.view(-1, 32).unique(dim=0)) == 24
