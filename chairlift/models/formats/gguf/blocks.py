"""How GGUF stores weights: blocks of small integers with scales, and their conversion to float32.

Layouts and names are llama.cpp's (ggml). A row is a whole number of blocks. Every integer type is a case of
:class:`Groups`, except types whose values come from large tables; the package ``gguf`` converts these to floats. The
arithmetic equals that of ggml's reference: one multiplication and one addition in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_TYPES", "OTHER_TYPES", "BlockType", "Groups"]

_Raw = npt.NDArray[np.uint8]
_Float = npt.NDArray[np.float32]
_BYTES_AT_ONCE: Final = 1 << 22
"""Number of raw bytes that are unpacked at a time, chosen so that intermediate results stay in the cache."""


class Groups(NamedTuple):
    """Codes in groups of columns. A weight is ``scale * (code - zero)``, or ``scale * code + minimum``."""

    codes: _Raw
    """uint8 [rows, columns], one code per weight."""
    scales: _Float
    """float32 [rows, groups], the scale of each group."""
    minimums: _Float | None
    """float32 [rows, groups], the minimum of each group; None if the type has no minimums."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockType:
    """One of ggml's types of weights. A block of ``bytes`` bytes stores ``weights`` weights."""

    name: str
    weights: int
    bytes: int
    unpack: Callable[[_Raw], Any]
    """Function from raw blocks, uint8 [B, bytes], to Groups of [B, weights]; to float32 [B, weights] if ``bits`` is
    0."""
    bits: int = 0
    """Number of bits of an unpacked code (8 or 4), which may differ from the number in the file. 0 for a float type."""
    group: int = 0
    """Number of columns that share a scale."""
    minimum: bool = False
    """Whether groups have minimums. Without them, the zero point is half the range of codes."""
    rounded: bool = False
    """Whether :attr:`unpack` returns numbers (``bits`` is 0) that a layer with integers rounds to 8 bits."""

    @property
    def kind_bits(self) -> int:
        """Number of bits of the codes in memory; 0 for a type that stays floats."""
        return 8 if self.rounded else self.bits

    def dequantize(self, raw: _Raw) -> _Float:
        """Convert rows of blocks, uint8 [rows, row bytes], to float32 [rows, columns]."""
        out = np.empty((len(raw), raw.shape[1] // self.bytes * self.weights), dtype=np.float32)
        for rows, found in self._pieces(raw):
            out[rows] = (self._worth(found) if self.bits else found).reshape(-1, out.shape[1])
        return out

    def groups(self, raw: _Raw) -> Groups:
        """Codes in rows of blocks, uint8 [rows, row bytes]. The type must be an integer type (``bits`` is not 0)."""
        blocks = raw.shape[1] // self.bytes
        shape = (len(raw), blocks * self.weights)
        scales_shape = (len(raw), blocks * self.weights // self.group)
        codes = np.empty(shape, dtype=np.uint8)
        scales = np.empty(scales_shape, dtype=np.float32)
        minimums = np.empty_like(scales) if self.minimum else None
        for rows, found in self._pieces(raw):
            codes[rows] = found.codes.reshape(-1, shape[1])
            scales[rows] = found.scales.reshape(-1, scales_shape[1])
            if minimums is not None:
                minimums[rows] = found.minimums.reshape(-1, scales_shape[1])
        return Groups(codes, scales, minimums)

    def _pieces(self, raw: _Raw) -> Iterator[tuple[slice, Any]]:
        at_once = max(1, _BYTES_AT_ONCE // max(raw.shape[1], 1))
        for first in range(0, len(raw), at_once):
            part = np.ascontiguousarray(raw[first : first + at_once]).reshape(-1, self.bytes)
            yield slice(first, first + at_once), self.unpack(part)

    def _worth(self, found: Groups) -> _Float:
        values = found.codes.reshape(*found.scales.shape, self.group).astype(np.float32)
        if found.minimums is None:
            values -= np.float32(1 << (self.bits - 1))
        values *= found.scales[:, :, None]
        if found.minimums is not None:
            values += found.minimums[:, :, None]
        return values


def _half(raw: _Raw) -> _Float:
    """The float16 number in the first two bytes of each block, as float32 [B, 1]."""
    return raw[:, :2].copy().view(np.float16).astype(np.float32)


def _nibbles(raw: _Raw) -> _Raw:
    """Split each byte of [B, n] into two numbers of 4 bits: [B, 2 n], first the low halves of all bytes, then the high
    halves."""
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def _bits(raw: _Raw) -> _Raw:
    """Split 4 bytes into bits, lowest bit first: [B, 4] -> [B, 32]."""
    return np.unpackbits(raw, axis=1, bitorder="little")


def _f32(raw: _Raw) -> _Float:
    return raw.view(np.float32)


def _f16(raw: _Raw) -> _Float:
    return raw.view(np.float16).astype(np.float32)


def _bf16(raw: _Raw) -> _Float:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(raw: _Raw) -> Groups:
    return Groups(_nibbles(raw[:, 2:]), _half(raw), None)


def _q4_1(raw: _Raw) -> Groups:
    return Groups(_nibbles(raw[:, 4:]), _half(raw), _half(raw[:, 2:]))


def _q5_0(raw: _Raw) -> Groups:
    quants = _nibbles(raw[:, 6:]) | (_bits(raw[:, 2:6]) << np.uint8(4))
    return Groups(quants + np.uint8(128 - 16), _half(raw), None)


def _q5_1(raw: _Raw) -> Groups:
    quants = _nibbles(raw[:, 8:]) | (_bits(raw[:, 4:8]) << np.uint8(4))
    return Groups(quants, _half(raw), _half(raw[:, 2:]))


def _q8_0(raw: _Raw) -> Groups:
    return Groups(raw[:, 2:] ^ np.uint8(128), _half(raw), None)  # from signed bytes to unsigned: add 128


def _by_shift(raw: _Raw, groups: int, shifts: list[int], mask: int) -> _Raw:
    """Divide [B, n] into ``groups`` parts, shift each part right by each of ``shifts``, and mask the result. Returns
    [B, groups * shifts * n / groups], in this order of dimensions."""
    runs = raw.reshape(len(raw), groups, 1, -1)
    return ((runs >> np.array(shifts, dtype=np.uint8).reshape(1, 1, -1, 1)) & np.uint8(mask)).reshape(len(raw), -1)


def _q2_k(raw: _Raw) -> Groups:
    scales = raw[:, :16]
    quants = raw[:, 16:80]
    d = _half(raw[:, 80:])
    dmin = _half(raw[:, 82:])
    factors = d * (scales & 15).astype(np.float32)
    offsets = dmin * (scales >> 4).astype(np.float32)
    return Groups(_by_shift(quants, 2, [0, 2, 4, 6], 3), factors, -offsets)


def _q3_k(raw: _Raw) -> Groups:
    high = raw[:, :32]
    quants = raw[:, 32:96]
    packed = raw[:, 96:108]
    d = _half(raw[:, 108:])
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    top = _by_shift(packed[:, 8:], 1, [0, 2, 4, 6], 3)
    scales = (low | (top << 4)).astype(np.int8) - np.int8(32)
    values = _by_shift(quants, 2, [0, 2, 4, 6], 3) | (_by_shift(high, 1, list(range(8)), 1) << np.uint8(2))
    return Groups(values + np.uint8(128 - 4), d * scales.astype(np.float32), None)


def _scales_of_k(packed: _Raw) -> tuple[_Raw, _Raw]:
    """(scales, minimums), each [B, 8], unpacked from 12 bytes with 6 bits per number."""
    first = packed[:, :4]
    second = packed[:, 4:8]
    third = packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minimums


def _in_groups_of_32(raw: _Raw, values: _Raw) -> Groups:
    """Groups of Q4_K and Q5_K blocks, which start with two float16 numbers and twelve bytes of scales. ``values`` [B,
    256] are the codes."""
    scales, minimums = _scales_of_k(raw[:, 4:16])
    return Groups(values, _half(raw) * scales.astype(np.float32), -(_half(raw[:, 2:]) * minimums.astype(np.float32)))


def _q4_k(raw: _Raw) -> Groups:
    return _in_groups_of_32(raw, _by_shift(raw[:, 16:], 4, [0, 4], 15))


def _q5_k(raw: _Raw) -> Groups:
    high = _by_shift(raw[:, 16:48], 1, list(range(8)), 1)
    return _in_groups_of_32(raw, _by_shift(raw[:, 48:], 4, [0, 4], 15) | (high << np.uint8(4)))


def _q6_k(raw: _Raw) -> Groups:
    low = raw[:, :128]
    high = raw[:, 128:192]
    scales = raw[:, 192:208]
    d = _half(raw[:, 208:])
    values = _by_shift(low, 2, [0, 4], 15) | (_by_shift(high, 2, [0, 2, 4, 6], 3) << np.uint8(4))
    return Groups(values + np.uint8(128 - 32), d * scales.view(np.int8).astype(np.float32), None)


_IQ4_NL_CODES: Final = np.array(
    [128 + value for value in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)],
    dtype=np.uint8,
)
_MXFP4_CODES: Final = np.array(
    [128 + sign * value for sign in (1, -1) for value in (0, 1, 2, 3, 4, 6, 8, 12)], dtype=np.uint8
)
"""MXFP4 code -> 128 + twice its e2m1 value. Doubling makes all values integers; the exponent of the scale is lowered by
one to compensate."""


def _iq4_nl(raw: _Raw) -> Groups:
    return Groups(_IQ4_NL_CODES[_nibbles(raw[:, 2:])], _half(raw), None)


def _mxfp4(raw: _Raw) -> Groups:
    scales = np.ldexp(np.float32(1), raw[:, :1].astype(np.int32) - 128).astype(np.float32)
    return Groups(_MXFP4_CODES[_nibbles(raw[:, 1:])], scales, None)


def _iq4_xs(raw: _Raw) -> Groups:
    low = raw[:, 4:8]
    high = raw[:, 2:4].copy().view(np.uint16)
    scales = np.stack([low & 15, low >> 4], axis=2).reshape(len(raw), 8)
    scales |= ((high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3).astype(np.uint8) << np.uint8(4)
    codes = _IQ4_NL_CODES[_by_shift(raw[:, 8:], 8, [0, 4], 15)]
    return Groups(codes, _half(raw) * (scales.astype(np.float32) - np.float32(32)), None)


def _ternary(digits: _Raw, scales: _Float) -> Groups:
    """Groups of blocks of 256 numbers -1, 0 and 1, stored as ``digits`` 0, 1 and 2, with one scale [B, 1] each."""
    return Groups(digits + np.uint8(7), np.repeat(scales, 8, axis=1), None)


def _tq1_0(raw: _Raw) -> Groups:
    powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8).reshape(1, -1, 1)
    runs = []
    for first, last, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):  # a byte has up to five digits of base 3
        spread = raw[:, None, first:last] * powers[:, :count]  # modulo 256
        runs.append(((spread.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(raw), -1))
    return _ternary(np.concatenate(runs, axis=1), _half(raw[:, 52:]))


def _tq2_0(raw: _Raw) -> Groups:
    return _ternary(_by_shift(raw[:, :64], 2, [0, 2, 4, 6], 3), _half(raw[:, 64:]))


def _of_package(number: int) -> Callable[[_Raw], _Float]:
    """Function that unpacks a type whose tables of values the package ``gguf`` has."""

    def unpack(raw: _Raw) -> _Float:
        from gguf import GGMLQuantizationType, quants

        found: _Float = quants.dequantize(raw, GGMLQuantizationType(number))
        return found

    return unpack


def _packaged(number: int, name: str, size: int, weights: int = 256) -> BlockType:
    return BlockType(name, weights, size, _of_package(number), rounded=True)


BLOCK_TYPES: Final = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _f16),
    2: BlockType("Q4_0", 32, 18, _q4_0, 4, 32),
    3: BlockType("Q4_1", 32, 20, _q4_1, 4, 32, minimum=True),
    6: BlockType("Q5_0", 32, 22, _q5_0, 8, 32),
    7: BlockType("Q5_1", 32, 24, _q5_1, 8, 32, minimum=True),
    8: BlockType("Q8_0", 32, 34, _q8_0, 8, 32),
    10: BlockType("Q2_K", 256, 84, _q2_k, 8, 16, minimum=True),
    11: BlockType("Q3_K", 256, 110, _q3_k, 8, 16),
    12: BlockType("Q4_K", 256, 144, _q4_k, 4, 32, minimum=True),
    13: BlockType("Q5_K", 256, 176, _q5_k, 8, 32, minimum=True),
    14: BlockType("Q6_K", 256, 210, _q6_k, 8, 16),
    16: _packaged(16, "IQ2_XXS", 66),
    17: _packaged(17, "IQ2_XS", 74),
    18: _packaged(18, "IQ3_XXS", 98),
    19: _packaged(19, "IQ1_S", 50),
    20: BlockType("IQ4_NL", 32, 18, _iq4_nl, 8, 32),
    21: _packaged(21, "IQ3_S", 110),
    22: _packaged(22, "IQ2_S", 82),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs, 8, 32),
    29: _packaged(29, "IQ1_M", 56),
    30: BlockType("BF16", 1, 2, _bf16),
    34: BlockType("TQ1_0", 256, 54, _tq1_0, 4, 32),
    35: BlockType("TQ2_0", 256, 66, _tq2_0, 4, 32),
    39: BlockType("MXFP4", 32, 17, _mxfp4, 8, 32),
}
"""Number of a type in a GGUF file -> the type's blocks."""
OTHER_TYPES: Final = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    40: "NVFP4",
    41: "Q1_0",
}
"""Number -> name of the types that are not read, for messages."""
