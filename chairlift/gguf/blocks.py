"""How GGUF stores weights: blocks of small integers with scales, and what they are worth in float32.

Layouts and names are llama.cpp's (ggml). A row is a whole number of blocks. Every function takes raw blocks, uint8 [B,
bytes], and returns float32 [B, weights], with the arithmetic of ggml's reference: one product and one sum in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_TYPES", "BlockType"]

_Raw = npt.NDArray[np.uint8]
_Float = npt.NDArray[np.float32]
_BYTES_AT_ONCE: Final = 1 << 22
"""Raw bytes that are dequantised at a time, so that what lies between them and the result stays in the cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockType:
    """One of ggml's types: ``bytes`` hold ``weights`` numbers."""

    name: str
    weights: int
    bytes: int
    values: Callable[[_Raw], _Float]

    def dequantize(self, raw: _Raw) -> _Float:
        """Rows of blocks, uint8 [rows, row bytes] -> float32 [rows, columns]."""
        rows, width = raw.shape
        out = np.empty((rows, width // self.bytes * self.weights), dtype=np.float32)
        at_once = max(1, _BYTES_AT_ONCE // max(width, 1))
        for first in range(0, rows, at_once):
            part = np.ascontiguousarray(raw[first : first + at_once]).reshape(-1, self.bytes)
            out[first : first + at_once] = self.values(part).reshape(-1, out.shape[1])
        return out


def _half(raw: _Raw) -> _Float:
    """float16 at the first two bytes, as float32 [B, 1]."""
    return raw[:, :2].copy().view(np.float16).astype(np.float32)


def _nibbles(raw: _Raw) -> _Raw:
    """[B, n] -> [B, 2 n]: all low halves, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def _bits(raw: _Raw) -> _Raw:
    """32 bits in 4 bytes, lowest first: [B, 4] -> [B, 32]."""
    return np.unpackbits(raw, axis=1, bitorder="little")


def _f32(raw: _Raw) -> _Float:
    return raw.view(np.float32)


def _f16(raw: _Raw) -> _Float:
    return raw.view(np.float16).astype(np.float32)


def _bf16(raw: _Raw) -> _Float:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(raw: _Raw) -> _Float:
    return _half(raw) * (_nibbles(raw[:, 2:]).astype(np.int8) - np.int8(8)).astype(np.float32)


def _q4_1(raw: _Raw) -> _Float:
    return _half(raw) * _nibbles(raw[:, 4:]).astype(np.float32) + _half(raw[:, 2:])


def _q5_0(raw: _Raw) -> _Float:
    quants = _nibbles(raw[:, 6:]) | (_bits(raw[:, 2:6]) << 4)
    return _half(raw) * (quants.astype(np.int8) - np.int8(16)).astype(np.float32)


def _q5_1(raw: _Raw) -> _Float:
    quants = _nibbles(raw[:, 8:]) | (_bits(raw[:, 4:8]) << 4)
    return _half(raw) * quants.astype(np.float32) + _half(raw[:, 2:])


def _q8_0(raw: _Raw) -> _Float:
    return _half(raw) * raw[:, 2:].view(np.int8).astype(np.float32)


def _by_shift(raw: _Raw, groups: int, shifts: list[int], mask: int) -> _Raw:
    """[B, n] in ``groups`` runs of bytes, each read once per shift: [B, groups, shifts, n / groups] as [B, ...]."""
    runs = raw.reshape(len(raw), groups, 1, -1)
    return ((runs >> np.array(shifts, dtype=np.uint8).reshape(1, 1, -1, 1)) & np.uint8(mask)).reshape(len(raw), -1)


def _q2_k(raw: _Raw) -> _Float:
    scales, quants = raw[:, :16], raw[:, 16:80]
    d, dmin = _half(raw[:, 80:]), _half(raw[:, 82:])
    factors = (d * (scales & 15).astype(np.float32))[:, :, None]
    offsets = (dmin * (scales >> 4).astype(np.float32))[:, :, None]
    values = _by_shift(quants, 2, [0, 2, 4, 6], 3).reshape(-1, 16, 16).astype(np.float32)
    return (factors * values - offsets).reshape(len(raw), 256)


def _q3_k(raw: _Raw) -> _Float:
    high, quants, packed, d = raw[:, :32], raw[:, 32:96], raw[:, 96:108], _half(raw[:, 108:])
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    top = _by_shift(packed[:, 8:], 1, [0, 2, 4, 6], 3)
    scales = (low | (top << 4)).astype(np.int8) - np.int8(32)
    missing = (_by_shift(high, 1, list(range(8)), 1) ^ 1) << 2
    values = _by_shift(quants, 2, [0, 2, 4, 6], 3).astype(np.int8) - missing.astype(np.int8)
    factors = (d * scales.astype(np.float32))[:, :, None]
    found: _Float = (factors * values.reshape(-1, 16, 16).astype(np.float32)).reshape(len(raw), 256)
    return found


def _scales_of_k(packed: _Raw) -> tuple[_Raw, _Raw]:
    """Eight scales and eight minimums of 6 bits from 12 bytes, each [B, 8]."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minimums


def _in_groups_of_32(raw: _Raw, values: _Raw) -> _Float:
    """What Q4_K and Q5_K share: two half numbers, twelve bytes of scales, and a value per weight [B, 256]."""
    scales, minimums = _scales_of_k(raw[:, 4:16])
    factors = (_half(raw) * scales.astype(np.float32))[:, :, None]
    offsets = (_half(raw[:, 2:]) * minimums.astype(np.float32))[:, :, None]
    return (factors * values.reshape(-1, 8, 32).astype(np.float32) - offsets).reshape(len(raw), 256)


def _q4_k(raw: _Raw) -> _Float:
    return _in_groups_of_32(raw, _by_shift(raw[:, 16:], 4, [0, 4], 15))


def _q5_k(raw: _Raw) -> _Float:
    high = _by_shift(raw[:, 16:48], 1, list(range(8)), 1)
    return _in_groups_of_32(raw, _by_shift(raw[:, 48:], 4, [0, 4], 15) | (high << np.uint8(4)))


def _q6_k(raw: _Raw) -> _Float:
    low, high, scales, d = raw[:, :128], raw[:, 128:192], raw[:, 192:208], _half(raw[:, 208:])
    values = _by_shift(low, 2, [0, 4], 15) | (_by_shift(high, 2, [0, 2, 4, 6], 3) << 4)
    signed = values.astype(np.int8) - np.int8(32)
    factors = (d * scales.view(np.int8).astype(np.float32))[:, :, None]
    return (factors * signed.reshape(-1, 16, 16).astype(np.float32)).reshape(len(raw), 256)


_IQ4_NL_VALUES: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
_MXFP4_VALUES: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
"""Twice what e2m1 is worth, so that all are whole numbers; the exponent is one less for it."""


def _iq4_nl(raw: _Raw) -> _Float:
    return _half(raw) * _IQ4_NL_VALUES[_nibbles(raw[:, 2:])]


def _mxfp4(raw: _Raw) -> _Float:
    scales = np.ldexp(np.float32(1), raw[:, :1].astype(np.int32) - 128).astype(np.float32)
    return scales * _MXFP4_VALUES[_nibbles(raw[:, 1:])]


def _types(*rows: tuple[int, str, int, int, Any]) -> dict[int, BlockType]:
    return {number: BlockType(name, weights, size, values) for number, name, weights, size, values in rows}


BLOCK_TYPES: Final = _types(
    (0, "F32", 1, 4, _f32),
    (1, "F16", 1, 2, _f16),
    (2, "Q4_0", 32, 18, _q4_0),
    (3, "Q4_1", 32, 20, _q4_1),
    (6, "Q5_0", 32, 22, _q5_0),
    (7, "Q5_1", 32, 24, _q5_1),
    (8, "Q8_0", 32, 34, _q8_0),
    (10, "Q2_K", 256, 84, _q2_k),
    (11, "Q3_K", 256, 110, _q3_k),
    (12, "Q4_K", 256, 144, _q4_k),
    (13, "Q5_K", 256, 176, _q5_k),
    (14, "Q6_K", 256, 210, _q6_k),
    (20, "IQ4_NL", 32, 18, _iq4_nl),
    (30, "BF16", 1, 2, _bf16),
    (39, "MXFP4", 32, 17, _mxfp4),
)
"""By the number that a file has for them."""
