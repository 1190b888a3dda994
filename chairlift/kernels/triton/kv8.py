# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""K and V in 8 bits, as the CPU stores them: codes with a float32 scale and minimum per token and head.

A number is ``minimum + scale * code``. Heads are rounded once, when they are written. A scale of NaN says that a number
of the head was not finite, or that its numbers are further apart than float32 reaches; rows that read it get NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["centred", "load_scales", "round_heads"]

_LARGEST = tl.constexpr(3.4028234663852886e38)
_TO_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23: a float32 below 2^22 loses its fraction, rounded to nearest even, when this is added."""


@triton.jit
def round_heads(first: tl.tensor, second: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """(codes of the first half, codes of the second half, scales, minimums) of heads [H, Dh / 2] twice. The codes are
    uint8, and the others float32 [H]. Only numbers ``inside`` count."""
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    far = float("inf")
    low = tl.min(tl.where(inside, tl.minimum(a, b), far), axis=1)
    high = tl.max(tl.where(inside, tl.maximum(a, b), -far), axis=1)
    broken = tl.sum(tl.where(inside, (a - a) + (b - b), 0.0), axis=1)  # NaN after a number that is not finite
    minimum = -(0.0 - low)  # the CPU's sign of zero
    span = high - minimum
    scale = tl.where((broken == 0.0) & (span <= _LARGEST), tl.div_rn(span, tl.zeros_like(span) + 255.0), float("nan"))
    unit = tl.where(scale > 0.0, scale, 1.0)  # if all numbers are nearly equal, every code is 0
    return _codes(a, minimum, unit, scale), _codes(b, minimum, unit, scale), scale, minimum


@triton.jit
def _codes(x: tl.tensor, minimum: tl.tensor, unit: tl.tensor, scale: tl.tensor) -> tl.tensor:
    whole = (tl.div_rn(x - minimum[:, None], tl.zeros_like(x) + unit[:, None]) + _TO_WHOLE) - _TO_WHOLE
    known = (scale == scale)[:, None]
    return tl.where(known & (whole > 0.0), tl.minimum(whole, 255.0), 0.0).to(tl.int32).to(tl.uint8)


@triton.jit
def load_scales(scales_ptr: tl.tensor, place: tl.tensor, held: tl.tensor) -> tl.tensor:
    """(scales, numbers of code 128) of the heads at ``place``; 0 for heads that are not ``held``, whatever is there."""
    scale = tl.load(scales_ptr + 2 * place, mask=held, other=0.0)
    return scale, tl.load(scales_ptr + 2 * place + 1, mask=held, other=0.0) + 128.0 * scale


@triton.jit
def centred(codes: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Codes minus 128, which every dtype represents exactly. Small numbers leave small errors in products."""
    return (codes.to(tl.float32) - 128.0).to(dtype)
