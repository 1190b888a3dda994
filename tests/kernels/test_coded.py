"""Weights in codes for the Triton kernels: the codes of the CPU, in any slices, and what rounds them is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chairlift.errors import ConfigError
from chairlift.kernels import ops
from chairlift.kernels.coded import CodedWeight, coded_bytes
from chairlift.kernels.cpu.packed_codes import PackedCodes
from chairlift.kernels.grouped import GroupedRows, GroupKind
from chairlift.kernels.weights import CODED, DEVICE_QUANTIZED, MatrixShape
from tests.native import needs_kernels

CPU = torch.device("cpu")
KINDS = [
    *(GroupKind(bits, group, minimum) for bits in (4, 8) for group in (32, 128) for minimum in (False, True)),
    GroupKind(4, 32, e2m1=True),
    GroupKind(8, 128, e4m3=True),
]


def rows_of(count: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(count, k, generator=torch.Generator().manual_seed(seed))


def same(one: GroupedRows, other: GroupedRows) -> bool:
    tables = [(one.codes, other.codes), (one.scales, other.scales)]
    if one.minimums is not None and other.minimums is not None:
        tables.append((one.minimums, other.minimums))
    return one.kind == other.kind and all(torch.equal(a, b) for a, b in tables)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("k", [1, 33, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_as_they_were_however_they_came(dtype: torch.dtype, kind: GroupKind, k: int) -> None:
    rows = GroupedRows.quantize(rows_of(20, k), kind)
    weight = CodedWeight(20, k, kind, dtype, CPU)
    places = weight.codes.data_ptr(), weight.scales.data_ptr()
    for start, end in ((7, 20), (0, 7)):
        weight.pack_rows(rows[start:end], start)
    assert same(weight.rows(), rows) and not weight.rounds_scales and not weight.rounds_weights
    assert torch.equal(weight.unpack(torch.float32), rows.dequantize())
    assert torch.equal(weight.unpack(torch.bfloat16, torch.tensor([3, 0])), rows.dequantize()[[3, 0]].bfloat16())
    assert weight.nbytes == coded_bytes(20, k, kind, dtype) and weight.shape == (20, k) and len(weight) == 20
    assert (weight.codes.data_ptr(), weight.scales.data_ptr()) == places


@needs_kernels
@pytest.mark.parametrize("kind", KINDS[:-1], ids=str)
def test_the_codes_are_those_of_the_cpu(kind: GroupKind) -> None:
    """For codes and for floats, which both round, and for codes of a narrower kind."""
    cpu, ours = PackedCodes(70, 100, kind), CodedWeight(70, 100, kind, torch.bfloat16, CPU)
    sources: list[Tensor | GroupedRows] = [GroupedRows.quantize(rows_of(70, 100), kind), rows_of(70, 100, 1)]
    if kind.bits == 8:
        sources.append(GroupedRows.quantize(rows_of(70, 100, 2), GroupKind(4, 128)))
    for source in sources:
        cpu.pack_rows(source)
        ours.pack_rows(source)
        assert same(ours.rows(), cpu.rows())
        assert (ours.rounds_weights, ours.rounds_scales) == (cpu.rounds_weights, cpu.rounds_scales)


def test_8_bit_floats_are_rounded_to_the_nearest_and_keep_what_is_no_number() -> None:
    rows = rows_of(4, 200)
    rows[2, 130] = float("nan")
    weight = CodedWeight(4, 200, GroupKind(8, 128, e4m3=True), torch.float32, CPU)
    weight.pack_rows(rows)
    found = weight.unpack(torch.float32)
    assert found[2, 128:].isnan().all() and not found[2, :128].isnan().any() and not found[[0, 1, 3]].isnan().any()
    fine = rows.isfinite() & found.isfinite()
    largest = rows.abs()[:, :128].amax(1)
    assert torch.allclose(found[fine], rows[fine], rtol=1 / 16, atol=float(largest.max()) * 2.0**-16)
    assert torch.equal(found[:, :128].abs().amax(1), largest)
    with pytest.raises(ValueError, match="not float8 in groups of 128"):
        PackedCodes(4, 200, weight.kind)


def test_no_kind_of_integers_holds_8_bit_floats() -> None:
    floats, integers = GroupKind(8, 128, e4m3=True), GroupKind(4, 32)
    assert (floats | integers).bits == (integers | floats).bits == (floats | integers | floats).bits == 32
    assert floats | GroupKind(8, 32, e4m3=True) == GroupKind(8, 32, e4m3=True)


def test_what_is_rounded_is_named() -> None:
    kind = GroupKind(4, 32, True)
    shape = MatrixShape(4, 32, kind=kind)
    codes = GroupedRows.quantize(rows_of(4, 32), kind)
    for dtype, source, losses in (
        (torch.float32, codes, []),
        (torch.bfloat16, codes, ["weights rounded to bfloat16"]),
        (torch.float32, rows_of(4, 32), ["weights rounded to int4"]),
        (torch.float32, GroupedRows(kind, codes.codes, codes.scales * 1.0001, codes.minimums), []),
        (
            torch.float16,
            GroupedRows(kind, codes.codes, codes.scales * 1.0001, codes.minimums),
            ["scales of weights", "weights rounded to float16"],
        ),
    ):
        (weight,) = CODED.empty([shape], dtype, CPU)
        CODED.write(weight, 0, source, mapped=False)
        found = CODED.losses(weight)
        assert len(found) == len(losses) and all(a.startswith(b) for a, b in zip(found, losses, strict=True))


def test_floats_stay_plain_and_settings_round_everything() -> None:
    shape = MatrixShape(4, 40)
    (plain,) = CODED.empty([shape], torch.float32, CPU)
    assert isinstance(plain, Tensor) and CODED.name(plain) is None and CODED.losses(plain) == ()
    assert CODED.nbytes(shape, torch.float32) == 4 * 40 * 4 and CODED.head == CODED == CODED.stacked
    int4, int8 = DEVICE_QUANTIZED["int4"], DEVICE_QUANTIZED["int8"]
    assert int4.head == int8.head == int8 and int4.stacked == int4
    (weight,) = int4.empty([shape], torch.float32, CPU)
    int4.write(weight, 0, rows_of(4, 40), mapped=False)
    assert int4.name(weight) == "int4" and weight.nbytes == int4.nbytes(shape, torch.float32)
    x = rows_of(3, 40, 1)
    out = int4.linear(x, weight, torch.ones(4))
    assert torch.equal(out, torch.nn.functional.linear(x, weight.unpack(torch.float32), torch.ones(4)))
    ids = torch.tensor([2, 2, 0])
    assert torch.equal(ops.embedding(ids, weight), weight.unpack(torch.float32)[ids])


def test_rows_and_kinds_that_do_not_fit_are_refused() -> None:
    weight = CodedWeight(4, 32, GroupKind(4, 32), torch.float32, CPU)
    for source, first in ((rows_of(5, 32), 0), (rows_of(4, 31), 0), (rows_of(1, 32), 4), (rows_of(1, 32), -1)):
        with pytest.raises(ValueError, match="do not fit into"):
            weight.pack_rows(source, first)
    with pytest.raises(ValueError, match="multiple of 32, not int4 in groups of 48"):
        CodedWeight(4, 96, GroupKind(4, 48), torch.float32, CPU)
    weight = CodedWeight(4, 32, GroupKind(4, 32), torch.bfloat16, CPU)
    with pytest.raises(ConfigError, match=r"scale or minimum of 1000.*quantization='none'"):
        weight.pack_rows(
            GroupedRows(GroupKind(4, 32), torch.ones(4, 32, dtype=torch.uint8), torch.full((4, 1), 1000.0))
        )
