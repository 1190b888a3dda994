"""The operations models are written in. Each picks the fastest implementation that fits its tensors.

Call them through the module (``ops.rms_norm(...)``), so that a replaced implementation is seen by every model. Given a
:class:`~chairlift.kernels.recording.Value` in place of its first tensor, an operation is recorded instead of computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels import fp8, onednn, reference
from chairlift.kernels.onednn import pack_weight
from chairlift.kernels.recording import Value
from chairlift.kernels.reference import apply_rotary, copy_blocks, write_kv
from chairlift.kernels.sdpa import PagedRow, packed_attention, paged_attention, plan_rows

if TYPE_CHECKING:
    from chairlift.kernels.cpu.packing import PackedWeight

__all__ = [
    "PagedRow",
    "Rotary",
    "apply_rotary",
    "call_out",
    "copy_blocks",
    "embedding",
    "fp8_linear",
    "linear",
    "native_linear",
    "pack_weight",
    "packed_attention",
    "packed_linear",
    "paged_attention",
    "plan_rows",
    "rms_norm",
    "rotary_heads",
    "rotary_table",
    "silu_and_mul",
    "write_kv",
]

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of a step's positions, each [T, 1, Dh / 2]."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _recordable(operation: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hand calls on symbols to their recorder's method of the same name."""
    name = operation.__name__

    @functools.wraps(operation)
    def dispatch(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if args and type(args[0]) is Value:
            recorded: _R = getattr(args[0].recorder, name)(*args, **kwargs)
            return recorded
        return operation(*args, **kwargs)

    return dispatch


linear = _recordable(reference.linear)
fp8_linear = _recordable(fp8.fp8_linear)
packed_linear = _recordable(onednn.packed_linear)
rms_norm = _recordable(reference.rms_norm)
silu_and_mul = _recordable(reference.silu_and_mul)


@_recordable
def embedding(token_ids: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """Rows ``token_ids`` [T] of ``weight`` [V, D] -> [T, D]; a packed weight works in step programs only."""
    if not isinstance(weight, Tensor):
        raise InvariantError("the embedding is laid out for the native kernels; it works in a step program only")
    return torch.nn.functional.embedding(token_ids, weight)


@_recordable
def native_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """``x @ weight.T + bias`` for a weight in the native kernels' layout, which works in step programs only."""
    raise InvariantError(
        "this linear layer is laid out for the native kernels, which run it in a step program only; "
        "keep it out of functions given to ops.call_out, or load the model in another layout"
    )


@_recordable
def rotary_table(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Rotary:
    """Cosines and sines of ``positions`` [T] times float32 ``frequencies`` [Dh / 2], scaled by ``factor``."""
    angles = positions.float()[:, None, None] * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


@_recordable
def rotary_heads(
    qkv: Tensor,
    rotary: Rotary | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a product [T, (Hq + 2 Hkv) Dh] into q [T, Hq, Dh], k and v [T, Hkv, Dh].

    q and k are normalised per head where there are ``q_norm`` and ``k_norm`` [Dh] (Qwen3), then rotated where there is
    a ``rotary``; v is left as it is.
    """
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    split = num_heads + num_kv_heads
    v = heads[:, split:]
    if q_norm is None and k_norm is None:
        both = heads[:, :split] if rotary is None else apply_rotary(heads[:, :split], *rotary)
        return both[:, :num_heads], both[:, num_heads:], v
    q, k = heads[:, :num_heads], heads[:, num_heads:split]
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    if rotary is not None:
        q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
    return q, k, v


def call_out(function: Callable[..., Tensor], *values: Tensor, width: int) -> Tensor:
    """``function(*values)``, [T, width], also inside a step program, where it gets tensors like everywhere else.

    The way to use what has no native operation: the program stops, Python computes, and the program goes on. Values
    are activations [T, width], token ids or positions, of the tokens still needed; no row may depend on another.
    """
    given: tuple[Any, ...] = values
    if given and type(given[0]) is Value:
        return cast(Tensor, given[0].recorder.call_out(function, *given, width=width))
    return function(*values)
