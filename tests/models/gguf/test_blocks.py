"""Every block type is worth what the ``gguf`` package says, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from chairlift.models.formats.gguf.blocks import BLOCK_TYPES


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_random_blocks_equal_the_public_reader_bit_for_bit(number: int) -> None:
    kind = BLOCK_TYPES[number]
    theirs = gguf.GGMLQuantizationType(number)
    assert (kind.name, (kind.weights, kind.bytes)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])
    rng = np.random.default_rng(number)
    raw = rng.integers(0, 256, (5, 12 * kind.bytes), dtype=np.uint8)
    if kind.weights == 1:
        raw = rng.normal(size=(5, 24)).astype(np.float32).view(np.uint8)
    with np.errstate(all="ignore"):  # random scales are NaN or infinite at times
        expected, found = gguf.quants.dequantize(raw, theirs), kind.dequantize(raw)
    assert found.dtype == np.float32
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    assert same.all(), "bits differ, and not those of two NaN"


@pytest.mark.parametrize("number", [number for number, kind in BLOCK_TYPES.items() if kind.bits])
def test_codes_in_groups_are_worth_the_same(number: int) -> None:
    kind = BLOCK_TYPES[number]
    raw = np.random.default_rng(number).integers(0, 256, (3000, 5 * kind.bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        codes, scales, minimums = kind.groups(raw)
    assert codes.shape == (3000, 5 * kind.weights) and codes.max() < 1 << kind.bits
    assert scales.shape == (3000, 5 * kind.weights // kind.group)
    assert (minimums is not None) == kind.minimum
    spread = [None if part is None else part.repeat(kind.group, axis=1) for part in (scales, minimums)]
    with np.errstate(all="ignore"):
        zero = np.float32(0 if kind.minimum else 1 << (kind.bits - 1))
        values = spread[0] * (codes.astype(np.float32) - zero)
        values = values if spread[1] is None else values + spread[1]
        np.testing.assert_array_equal(values, kind.dequantize(raw))


def test_many_rows_are_read_in_pieces() -> None:
    raw = np.random.default_rng(0).integers(0, 100, (3000, 200 * 34), dtype=np.uint8)
    kind = BLOCK_TYPES[8]
    np.testing.assert_array_equal(kind.dequantize(raw)[2900:], kind.dequantize(raw[2900:]))
