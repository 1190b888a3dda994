"""The operations of which models consist. The definition of each is a function in plain torch, plus the width of its
result.

Call operations through the module (``ops.rms_norm(...)``), so that a replaced implementation takes effect in every
model. A new operation needs only a definition here. A backend that has no kernel for it runs the plain torch function.
See :class:`~chairlift.kernels.recording.Op`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels import coded, fp8, onednn
from chairlift.kernels.coded import CodedWeight
from chairlift.kernels.experts import experts, latent_experts
from chairlift.kernels.onednn import pack_weight
from chairlift.kernels.recording import Op, Value, expect, operation
from chairlift.kernels.reference import apply_rotary, copy_blocks, write_kv
from chairlift.kernels.sdpa import PagedRow, bidirectional_attention, packed_attention, paged_attention, plan_rows

if TYPE_CHECKING:
    from chairlift.kernels.cpu.packing import PackedMatrix

__all__ = [
    "PagedRow",
    "Rotary",
    "apply_rotary",
    "bidirectional_attention",
    "call_out",
    "clip",
    "coded_linear",
    "columns",
    "copy_blocks",
    "embedding",
    "experts",
    "fp8_linear",
    "gelu",
    "gelu_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "latent_experts",
    "layer_norm",
    "linear",
    "native_linear",
    "norm_all_heads",
    "pack_weight",
    "packed_attention",
    "packed_linear",
    "paged_attention",
    "plan_rows",
    "relu",
    "relu_squared",
    "rms_norm",
    "rms_norm_offset",
    "rotary_heads",
    "rotary_table",
    "rotate_and_norm",
    "scale",
    "scale_queries",
    "sigmoid_gate",
    "silu",
    "silu_and_mul",
    "soft_cap",
    "write_kv",
]

Rotary = tuple[Tensor, Tensor]
"""(cosines, sines) of a step's positions, each [T, 1, Dh / 2]."""


def _product(x: Value, weight: Tensor | CodedWeight, bias: Tensor | None) -> int:
    expect(x, "rows", weight.shape[1])
    return weight.shape[0]


packed_linear = operation(lambda x, packed, bias: _product(x, packed, bias))(onednn.packed_linear)
fp8_linear = operation(lambda x, weight, bias: _product(x, weight.values, bias))(fp8.fp8_linear)
coded_linear = operation(lambda x, weight, bias: _product(x, weight, bias))(coded.coded_linear)


@operation(_product)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` with ``weight`` [out, in]."""
    return torch.nn.functional.linear(x, weight, bias)


@operation(lambda x, weight, eps: expect(x, "rows", len(weight)))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019).

    Computed in float32, rounded to ``x``'s dtype, then scaled by ``weight``. Hugging Face models use this order, so
    bf16 results agree to the bit.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


@operation(lambda x, weight, eps, offset: expect(x, "rows", len(weight)))
def rms_norm_offset(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Root mean square norm over the last dimension, multiplied by ``offset + weight`` and then rounded (Gemma: offset
    1)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (offset + weight.float())).to(x.dtype)


@operation(lambda x, weight, bias, eps: expect(x, "rows", len(weight)))
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dimension (Ba et al., 2016), with an optional bias."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


@operation(lambda x: expect(x))
def gelu_tanh(x: Tensor) -> Tensor:
    """GELU, approximated with tanh (Hendrycks and Gimpel, 2016)."""
    return torch.nn.functional.gelu(x, approximate="tanh")


@operation(lambda x: expect(x))
def gelu(x: Tensor) -> Tensor:
    """GELU (Hendrycks and Gimpel, 2016).

    It is computed in float64, because the bits of torch's float32 GELU for a row depend on the other rows.
    """
    return torch.nn.functional.gelu(x.double()).to(x.dtype)


@operation(lambda gate_up: expect(gate_up) // 2)
def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """GEGLU (Shazeer, 2020) with the tanh approximation: [..., 2 I] with the gate first -> gelu_tanh(gate) * up, [...,
    I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


@operation(lambda pair: expect(pair) // 2)
def gelu_and_mul(pair: Tensor) -> Tensor:
    """GEGLU (Shazeer, 2020): [..., 2 I] with the gate first -> gelu(gate) * up, [..., I]."""
    gate, up = pair.chunk(2, dim=-1)
    return gelu.reference(gate) * up


@operation(lambda x: expect(x))
def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return torch.nn.functional.relu(x)


@operation(lambda x: expect(x))
def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0) squared (So et al., 2021)."""
    return torch.nn.functional.relu(x).square()


@operation(lambda x: expect(x))
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return torch.nn.functional.silu(x)


@operation(lambda x, factor: expect(x))
def scale(x: Tensor, factor: float) -> Tensor:
    """``x * factor``."""
    return x * factor


@operation(lambda x, limit: expect(x))
def clip(x: Tensor, limit: float) -> Tensor:
    """``x`` with each element limited to -limit..limit (OLMoE uses it for q, k and v)."""
    return x.clamp(-limit, limit)


def _columns_width(x: Value, first: int, count: int) -> int:
    if not 0 <= first <= first + count <= expect(x):
        raise ValueError(f"columns {first} to {first + count} are not among the {x.width} of the rows")
    return count


@operation(_columns_width)
def columns(x: Tensor, first: int, count: int) -> Tensor:
    """Columns ``first`` to ``first + count`` (excluded) of ``x`` [T, W]: [T, count]."""
    return x[:, first : first + count]


@operation(lambda x, gate: expect(x, "rows", expect(gate)))
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)``, elementwise (Qwen3-Next uses it for the results of attention)."""
    return x * torch.sigmoid(gate)


@operation(lambda x, cap: expect(x))
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, which is between -cap and cap (Gemma 2)."""
    return cap * torch.tanh(x / cap)


@operation(lambda gate_up, factor=1.0: expect(gate_up) // 2)
def silu_and_mul(gate_up: Tensor, factor: float = 1.0) -> Tensor:
    """SwiGLU (Shazeer, 2020): [..., 2 I] with the gate first -> silu(factor * gate) * up, [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate if factor == 1.0 else gate * factor) * up


def _embedding_width(ids: Value, weight: Tensor | PackedMatrix | CodedWeight) -> int:
    if isinstance(weight, Tensor):
        expect(ids, "positions" if ids.role == "positions" else "token_ids")
        return weight.shape[1]
    if ids is not ids.recorder.token_ids:
        raise TypeError("a packed embedding can be looked up by the batch's token ids only")
    return weight.k


@operation(_embedding_width)
def embedding(ids: Tensor, weight: Tensor | PackedMatrix | CodedWeight) -> Tensor:
    """Rows ``ids`` [T] of ``weight`` [V, D]: [T, D]. A packed weight is allowed only in step programs."""
    if isinstance(weight, CodedWeight):
        return weight.unpack(weight.dtype, ids)
    if not isinstance(weight, Tensor):
        raise InvariantError("the embedding is laid out for the native kernels; it works in a step program only")
    return torch.nn.functional.embedding(ids, weight)


def _packed_product(x: Value, weight: PackedMatrix) -> int:
    expect(x, "rows", weight.k)
    return weight.layer_outputs


@operation(_packed_product)
def native_linear(x: Tensor, weight: PackedMatrix) -> Tensor:
    """``x @ weight.T + bias`` for a weight in the native kernels' layout. It is allowed only in step programs."""
    raise InvariantError(
        "this linear layer is laid out for the native kernels, which run it in a step program only; "
        "keep it out of functions given to ops.call_out, or load the model in another layout"
    )


def _table_width(
    positions: Value, frequencies: Tensor, factor: float, dtype: torch.dtype, axes: Tensor | None = None
) -> int:
    expect(positions, "positions")
    return 2 * len(frequencies)


@operation(_table_width, role="rotary")
def rotary_table(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype, axes: Tensor | None = None
) -> Rotary:
    """Cosines and sines of the angles ``positions`` [T] times float32 ``frequencies`` [Dh / 2], scaled by ``factor``.

    A frequency of 0 marks a pair of dimensions that is not rotated. ``factor`` does not apply to it, so that its cosine
    is 1 and its sine 0.

    ``axes`` [Dh / 2] says which of a token's three positions each frequency uses: time, height or width (0, 1, 2). The
    three are equal for text. Only native step programs support different positions; see
    :attr:`~chairlift.base.step_batch.StepBatch.axes`.
    """
    return _cosines_and_sines(positions.float()[:, None, None] * frequencies, frequencies, factor, dtype)


def _cosines_and_sines(angles: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Rotary:
    """Cosines and sines of ``angles`` [T, 1, Dh / 2], scaled by ``factor`` where the frequency is not 0."""
    factors = factor if factor == 1.0 else torch.where(frequencies == 0.0, 1.0, factor)
    return (angles.cos() * factors).to(dtype), (angles.sin() * factors).to(dtype)


def _head_widths(
    qkv: Value, rotary: Value | None, num_heads: int, num_kv_heads: int, head_dim: int, *_: Any, **__: Any
) -> tuple[int, int, int]:
    expect(qkv, "rows", (num_heads + 2 * num_kv_heads) * head_dim)
    if rotary is not None:
        expect(rotary, "rotary", head_dim)
    return num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim


@operation(_head_widths, role="heads")
def rotary_heads(
    qkv: Tensor,
    rotary: Rotary | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a linear layer's result [T, (Hq + 2 Hkv) Dh] into q [T, Hq, Dh], k and v [T, Hkv, Dh].

    With ``q_norm`` and ``k_norm`` [Dh], q and k are normalised per head (Qwen3; plus ``norm_offset``, Gemma). Then q
    and k are rotated, if ``rotary`` is given. v is unchanged.
    """
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    split = num_heads + num_kv_heads
    v = heads[:, split:]
    if q_norm is None and k_norm is None:
        both = heads[:, :split] if rotary is None else apply_rotary(heads[:, :split], *rotary)
        return both[:, :num_heads], both[:, num_heads:], v
    q = _normed(heads[:, :num_heads], q_norm, eps, norm_offset)
    k = _normed(heads[:, num_heads:split], k_norm, eps, norm_offset)
    if rotary is not None:
        q = apply_rotary(q, *rotary)
        k = apply_rotary(k, *rotary)
    return q, k, v


def _normed(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """RMSNorm of ``x`` over the last dimension with ``offset + weight``; ``x`` itself without a weight."""
    if weight is None:
        return x
    return rms_norm_offset(x, weight, eps, offset) if offset else rms_norm(x, weight, eps)


@operation(lambda qkv, q_norm, k_norm, eps, norm_offset=0.0: expect(qkv))
def norm_all_heads(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, norm_offset: float = 0.0) -> Tensor:
    """Apply RMSNorm over all heads of q together, and over all heads of k together, to ``qkv`` [T, (Hq + 2 Hkv) Dh]. v
    is unchanged (OLMo 2).

    ``q_norm`` is [Hq Dh], ``k_norm`` [Hkv Dh]. ``norm_offset`` is added to both.
    """
    split = len(q_norm)
    both = len(q_norm) + len(k_norm)
    q = _normed(qkv[:, :split], q_norm, eps, norm_offset)
    k = _normed(qkv[:, split:both], k_norm, eps, norm_offset)
    return torch.cat((q, k, qkv[:, both:]), dim=-1)


def _turned_width(
    qkv: Value, positions: Value, frequencies: Tensor, factor: float, num_heads: int, num_kv_heads: int, head_dim: int,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    expect(positions, "positions")
    return expect(qkv, "rows", (num_heads + 2 * num_kv_heads) * head_dim)


@operation(_turned_width)
def rotate_and_norm(
    qkv: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    factor: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
) -> Tensor:
    """Rotate q and k in ``qkv`` [T, (Hq + 2 Hkv) Dh], then normalise them per head (Hunyuan). v is unchanged.

    The angles are ``positions`` [T] times float32 ``frequencies`` [Dh / 2]. ``factor`` scales the cosines and sines of
    all frequencies that are not 0, as in :func:`rotary_table`. ``norm_offset`` is added to the norms' weights [Dh].
    """
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    # Angles are float64, because the rounding of torch's float32 cosine depends on an element's index in the tensor,
    # and a row must not depend on other rows.
    angles = (positions.float()[:, None, None] * frequencies).double()
    cos, sin = _cosines_and_sines(angles, frequencies, factor, qkv.dtype)
    split = num_heads + num_kv_heads
    both = apply_rotary(heads[:, :split], cos, sin)
    q = _normed(both[:, :num_heads], q_norm, eps, norm_offset)
    k = _normed(both[:, num_heads:], k_norm, eps, norm_offset)
    return torch.cat((q, k, heads[:, split:]), dim=1).flatten(1)


@operation(lambda qkv, positions, width, beta, interval: expect(qkv))
def scale_queries(qkv: Tensor, positions: Tensor, width: int, beta: float, interval: int) -> Tensor:
    """Multiply q at position p, the first ``width`` columns of ``qkv``, by 1 + beta ln(1 + floor(p / interval)).

    This keeps attention sharp over long texts (Llama 4, Ministral 3). ``qkv`` is [T, (Hq + 2 Hkv) Dh], ``positions``
    [T].
    """
    factors = 1 + beta * torch.log(1 + torch.floor(positions.double() / interval))
    return torch.cat((qkv[:, :width] * factors.to(qkv.dtype)[:, None], qkv[:, width:]), dim=-1)


def call_out(function: Callable[..., Tensor], *values: Tensor, width: int) -> Tensor:
    """``function(*values)``, [T, width]. The function gets tensors inside a step program, too.

    Use it for a computation that is not one of the operations: the program stops, Python computes, and the program
    continues. ``values`` are activations [T, width], token ids or positions. Only tokens that are still needed are
    passed. The result for a row must not depend on other rows.
    """

    def widths(*given: Value) -> int:
        for value in given:
            if value.role not in ("rows", "token_ids", "positions"):
                raise TypeError(f"call_out takes activations, token ids and positions, got {value.role}")
        return width

    return Op(function, widths)(*values)
