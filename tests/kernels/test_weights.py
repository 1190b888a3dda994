"""Formats of weights: each multiplies with the rows it was given, however they came, in as many bytes as it says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.errors import ConfigError
from chairlift.kernels.grouped import GroupedRows, GroupKind
from chairlift.kernels.weights import FP8, NATIVE, ONEDNN, PLAIN, QUANTIZED, MatrixShape, Native, WeightFormat
from tests.native import needs_kernels

CPU = torch.device("cpu")
SHAPES = [MatrixShape(72, 40), MatrixShape(100, 24, interleaved=True)]


def rows_of(shape: MatrixShape, seed: int = 0) -> Tensor:
    return torch.randn(shape[:2], generator=torch.Generator().manual_seed(seed))


def held(weight: Any) -> int:
    """Bytes of the memory of a weight."""
    if isinstance(weight, Tensor):
        return weight.nbytes
    return weight.memory.nbytes if hasattr(weight, "memory") else weight.values.nbytes + weight.scales.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "weight_format",
    [PLAIN, FP8, *(pytest.param(each, marks=needs_kernels) for each in (NATIVE, QUANTIZED["int8"], QUANTIZED["int4"]))],
    ids=repr,
)
def test_a_weight_takes_as_many_bytes_as_its_format_says(weight_format: WeightFormat, dtype: torch.dtype) -> None:
    weights = weight_format.empty(SHAPES, dtype, CPU)
    assert [held(weight) for weight in weights] == [weight_format.nbytes(shape, dtype) for shape in SHAPES]


@pytest.mark.parametrize("weight_format", [PLAIN, ONEDNN, FP8], ids=repr)
def test_rows_may_come_in_slices_and_be_replaced(weight_format: WeightFormat) -> None:
    shape = SHAPES[0]
    x, bias = rows_of(MatrixShape(3, shape.in_features), 1), torch.ones(shape.out_features)
    whole, sliced = weight_format.empty([shape, shape], torch.float32, CPU)
    for seed in (2, 3):
        rows = rows_of(shape, seed)
        weight_format.write(whole, 0, rows, mapped=False)
        for start, end in ((7, 72), (0, 7)):
            weight_format.write(sliced, start, rows[start:end].double(), mapped=False)
        weight_format.finish(whole, bias)
        weight_format.finish(sliced, bias)
        out = weight_format.linear(x, whole, bias)
        assert torch.equal(weight_format.linear(x, sliced, bias), out)
        torch.testing.assert_close(out, x @ rows.T + bias, rtol=0.1, atol=0.5 if weight_format == FP8 else 1e-4)


def test_a_format_is_a_value() -> None:
    for one in (PLAIN, ONEDNN, NATIVE, FP8):
        assert copy.deepcopy(one) == one
    assert len({PLAIN, ONEDNN, NATIVE, FP8}) == 4


@needs_kernels
def test_a_format_says_where_it_works() -> None:
    assert ONEDNN.fitting(torch.float32, CPU) == ONEDNN
    assert ONEDNN.fitting(torch.float32, torch.device("cuda")) == PLAIN
    assert NATIVE.fitting(torch.bfloat16, CPU) == NATIVE
    with pytest.raises(ConfigError, match=r"not torch\.float16 on cpu"):
        NATIVE.fitting(torch.float16, CPU)


@needs_kernels
def test_codes_of_a_checkpoint_stay_what_they_are_unless_asked() -> None:
    kind = GroupKind(4, 32, True)
    shape = MatrixShape(40, 64, kind=kind)
    rows = GroupedRows.quantize(rows_of(shape), kind)
    for weight_format, stored, name in (
        (NATIVE, rows.dequantize(), "int4"),
        (Native(floats=True), rows.dequantize(), None),
        (QUANTIZED["int8"], GroupedRows.quantize(rows.dequantize(), GroupKind(8, 32)).dequantize(), "int8"),
    ):
        (weight,) = weight_format.empty([shape], torch.float32, CPU)
        weight_format.write(weight, 0, rows, mapped=False)
        assert torch.equal(weight.unpack(), stored)
        assert weight_format.name(weight) == name
        assert weight.memory.nbytes == weight_format.nbytes(shape, torch.float32)


@needs_kernels
def test_a_head_has_at_least_8_bits() -> None:
    assert QUANTIZED["int4"].head == QUANTIZED["int8"].head == QUANTIZED["int8"]
    assert NATIVE.head == NATIVE


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("minimum", [False, True])
def test_rounding_is_to_the_nearest_code(bits: int, minimum: bool) -> None:
    kind = GroupKind(bits, 32, minimum)
    rows = rows_of(MatrixShape(50, 70)) * 0.01
    rows[3, 32:64] = 0
    rows[4] = 1.5
    found = GroupedRows.quantize(rows, kind)
    step = found.scales.repeat_interleave(32, 1)[:, :70]
    assert ((found.dequantize() - rows).abs() <= step * 0.502 + 1e-7).all()
    assert not found.dequantize()[3, 32:64].any()
    assert torch.equal(found.scales, found.scales.half().float())


@pytest.mark.parametrize("kind", [GroupKind(8, 32), GroupKind(4, 128), GroupKind(4, 64, True)])
def test_a_wider_kind_holds_the_same_numbers(kind: GroupKind) -> None:
    rows = GroupedRows.quantize(rows_of(MatrixShape(20, 200)), kind)
    wide = kind | GroupKind(8, 32)
    torch.testing.assert_close(rows.to(wide).dequantize(), rows.dequantize(), rtol=0, atol=1e-6)
    wider = kind | GroupKind(8, 32, True)
    torch.testing.assert_close(rows.to(wider).dequantize(), rows.dequantize(), rtol=0, atol=1e-5)
    if kind != GroupKind(8, 32):
        with pytest.raises(ValueError, match="does not fit"):
            rows.to(GroupKind(4, 32) if kind.minimum else GroupKind(4, 256))
