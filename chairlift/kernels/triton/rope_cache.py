# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""One launch that turns the QKV matmul's result into queries and cached keys and values: split, norm, rotation, and
write to the blocks.

As separate operations, these would be six launches that each read and write the same numbers. Every multiplication is
rounded to the model's dtype where :mod:`chairlift.kernels.reference` rounds it. A head's bits depend on that head only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.triton.dependent import dependent_launch, wait_for_inputs
from chairlift.kernels.triton.kv8 import round_heads
from chairlift.kernels.triton.launch import ROPE_HEADS, ROPE_WARPS, power_of_2
from chairlift.kernels.triton.norms import add_parts

__all__ = ["rope_and_cache", "rotary_table"]


@triton.jit
def _times(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a * b, rounded to a's dtype."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


@triton.jit
def _normalise(
    first: tl.tensor, second: tl.tensor, selected: tl.tensor, weight_ptr: tl.tensor, eps: tl.tensor, i: tl.tensor,
    HALF: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """RMSNorm of the heads for which ``selected`` [H] is true. Other heads are returned unchanged. The heads are given
    as two halves [H, Dh / 2]."""
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF)
    factor = tl.rsqrt(mean + eps)[:, None]
    weight_1 = tl.load(weight_ptr + i, mask=i < HALF, other=0.0)
    weight_2 = tl.load(weight_ptr + HALF + i, mask=i < HALF, other=0.0)
    normed_1 = _times((a * factor).to(first.dtype), weight_1[None, :])
    normed_2 = _times((b * factor).to(first.dtype), weight_2[None, :])
    return tl.where(selected[:, None], normed_1, first), tl.where(selected[:, None], normed_2, second)


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_and_cache(
    q_ptr: tl.tensor, key_ptr: tl.tensor, value_ptr: tl.tensor, key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor, qkv_ptr: tl.tensor, bias_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor,
    slots_ptr: tl.tensor, q_norm_ptr: tl.tensor, k_norm_ptr: tl.tensor, eps: tl.tensor, qkv_stride: tl.tensor,
    num_tokens: tl.tensor, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, BLOCK_H: tl.constexpr, NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel of :func:`rope_and_cache`. One program per token and block of heads. Heads are numbered consecutively:
    first q, then k, then v. If there are splits, qkv is the sum of float32 parts."""
    K: tl.constexpr = NUM_HEADS
    V: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, HALF_PAD)
    inside = (h < V + NUM_KV_HEADS)[:, None] & (i < HALF)[None, :]
    n = (h * 2 * HALF)[:, None] + i[None, :]
    wait_for_inputs(PDL)
    if NUM_SPLITS > 0:
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        first = add_parts(qkv_ptr, bias_ptr, token, n, inside, num_tokens, qkv_stride, NUM_SPLITS).to(dtype)
        second = add_parts(qkv_ptr, bias_ptr, token, n + HALF, inside, num_tokens, qkv_stride, NUM_SPLITS).to(dtype)
    else:
        source = qkv_ptr + token * qkv_stride + n
        first = tl.load(source, mask=inside, other=0.0)
        second = tl.load(source + HALF, mask=inside, other=0.0)
    if q_norm_ptr is not None:
        first, second = _normalise(first, second, h < K, q_norm_ptr, eps, i, HALF)
    if k_norm_ptr is not None:
        first, second = _normalise(first, second, (h >= K) & (h < V), k_norm_ptr, eps, i, HALF)
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
        sin = tl.load(sin_ptr + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
        low = _times(first, cos).to(tl.float32) - _times(second, sin).to(tl.float32)
        high = _times(second, cos).to(tl.float32) + _times(first, sin).to(tl.float32)
        turned = (h < V)[:, None]
        first, second = tl.where(turned, low.to(first.dtype), first), tl.where(turned, high.to(first.dtype), second)

    queries = q_ptr + ((token * NUM_HEADS + h) * 2 * HALF)[:, None] + i[None, :]
    tl.store(queries, first, mask=inside & (h < K)[:, None])
    tl.store(queries + HALF, second, mask=inside & (h < K)[:, None])
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        key = slot * NUM_KV_HEADS + h - K
        value = slot * NUM_KV_HEADS + h - V
        is_key = (h >= K) & (h < V)
        is_value = (h >= V) & (h < V + NUM_KV_HEADS)
        stored_1 = first
        stored_2 = second
        if key_scales_ptr is not None:
            stored_1, stored_2, scale, minimum = round_heads(first, second, inside)
            tl.store(key_scales_ptr + 2 * key, scale, mask=is_key)
            tl.store(key_scales_ptr + 2 * key + 1, minimum, mask=is_key)
            tl.store(value_scales_ptr + 2 * value, scale, mask=is_value)
            tl.store(value_scales_ptr + 2 * value + 1, minimum, mask=is_value)
        keys = key_ptr + (key * 2 * HALF)[:, None] + i[None, :]
        tl.store(keys, stored_1, mask=inside & is_key[:, None])
        tl.store(keys + HALF, stored_2, mask=inside & is_key[:, None])
        values = value_ptr + (value * 2 * HALF)[:, None] + i[None, :]
        tl.store(values, stored_1, mask=inside & is_value[:, None])
        tl.store(values + HALF, stored_2, mask=inside & is_value[:, None])


@triton.jit
def _rotary_table(
    out_ptr: tl.tensor, positions_ptr: tl.tensor, frequencies_ptr: tl.tensor, factor: tl.tensor,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel of :func:`rotary_table`. One program per token."""
    token = tl.program_id(0)
    i = tl.arange(0, HALF_PAD)
    frequencies = tl.load(frequencies_ptr + i, mask=i < HALF, other=0.0)
    angles = tl.load(positions_ptr + token).to(tl.float32) * frequencies
    out = out_ptr + token * HALF + i
    factors = tl.where(frequencies == 0.0, 1.0, factor)
    tl.store(out, (tl.cos(angles) * factors).to(out_ptr.dtype.element_ty), mask=i < HALF)
    sines = (tl.sin(angles) * factors).to(out_ptr.dtype.element_ty)
    tl.store(out + tl.num_programs(0) * HALF, sines, mask=i < HALF)


def rotary_table(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines [2, T, 1, Dh / 2] of the angles ``positions`` (integers [T]) times ``frequencies`` (float32 [Dh
    / 2]), scaled by ``factor`` where the frequency is not 0."""
    half = len(frequencies)
    out = torch.empty((2, len(positions), 1, half), dtype=dtype, device=positions.device)
    if len(positions):
        _rotary_table[(len(positions),)](
            out, positions, frequencies, factor, HALF=half, HALF_PAD=power_of_2(half), num_warps=ROPE_WARPS
        )
    return out


def rope_and_cache(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Split ``qkv``, normalise q and k per head (Qwen3), rotate them, and write k and v to their slots.

    Args:
        qkv: [T, (Hq + 2 Hkv) Dh], rows contiguous; Dh even. Or the parts of a split sum, float32 [S, T, (Hq + 2 Hkv)
            Dh], contiguous: their sum and ``bias`` are rounded to ``dtype`` first.
        rotary: cosines and sines of the positions, each [T, 1, Dh / 2], contiguous, in qkv's dtype; None: no rotation.
        key_cache, value_cache: [num_blocks, block_size, Hkv, Dh], contiguous, in ``dtype``, or uint8 with ``scales``;
            changed in place.
        slots: int32 or int64 [T]: ``block * block_size + offset`` for each token, or -1 to write nothing.
        num_heads: Hq.
        q_norm, k_norm: weights [Dh], or None.
        eps: epsilon of the norms.
        bias: [(Hq + 2 Hkv) Dh], added to parts; None: no bias.
        scales: of K and V in 8 bits, each float32 [num_blocks, block_size, Hkv, 2]: a scale and a minimum; changed in
            place. See :mod:`~chairlift.kernels.triton.kv8`. None: K and V have the model's dtype.
        dtype: the model's dtype; None: the cache's.

    Returns:
        q, [T, Hq, Dh], contiguous, in the model's dtype.

    Raises:
        InvariantError: the shapes do not fit together.
    """
    num_tokens, (num_kv_heads, head_dim) = qkv.shape[-2], key_cache.shape[2:]
    num_parts = num_heads + 2 * num_kv_heads
    if qkv.shape[-1] != num_parts * head_dim or head_dim % 2 or key_cache.shape != value_cache.shape:
        raise InvariantError(f"qkv {list(qkv.shape)} is not {num_parts} heads for caches {list(key_cache.shape)}")
    if not (key_cache.is_contiguous() and value_cache.is_contiguous() and qkv.stride(-1) == 1):
        raise InvariantError("the caches and the rows of qkv must be contiguous")
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=dtype or key_cache.dtype, device=qkv.device)
    if num_tokens:
        cos, sin = (None, None) if rotary is None else rotary
        key_scales, value_scales = (None, None) if scales is None else scales
        block = min(ROPE_HEADS, power_of_2(num_parts))
        # Fused multiply-adds are disabled, because they would skip roundings that the reference does.
        _rope_and_cache[(num_tokens, -(-num_parts // block))](
            q, key_cache, value_cache, key_scales, value_scales, qkv, bias, cos, sin, slots, q_norm, k_norm, eps,
            qkv.stride(-2), num_tokens,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2, HALF_PAD=power_of_2(head_dim // 2),
            BLOCK_H=block, NUM_SPLITS=len(qkv) if qkv.ndim == 3 else 0, num_warps=ROPE_WARPS, enable_fp_fusion=False,
            **dependent_launch(q.device),
        )  # fmt: skip
    return q
