"""What an adapter changes in each matrix of a loaded model, computed from the adapter and the model's own weights.

DoRA scales each row of ``w + b @ a`` to a learnt norm. The norms of a model's own rows follow from the weights that are
served. If these are quantised, they are the rounded weights, as in PEFT, which dequantises a quantised base.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.kernels.cpu.low_rank import LowRankPart, MatrixChange
from chairlift.kernels.cpu.packing import KeptRows
from chairlift.lora.adapter import Adapter, LowRank, Replaced
from chairlift.lora.sites import HEAD

__all__ = ["Own", "change_of", "depends_on_weights", "with_tied_rows"]

_ROWS_AT_ONCE = 4096
"""Number of rows whose norms are computed at a time. It bounds the memory."""


class Own(NamedTuple):
    """A matrix of the served model."""

    out_features: int
    in_features: int
    weight: Callable[[], Tensor]
    """Returns the weight [out, in] as the model multiplies with it, in any float dtype."""
    bias: Callable[[], Tensor | None]
    """Returns the bias, float32 [out]; None if there is none."""
    plain: bool = False
    """Whether a change must be one whole new weight."""
    kept: KeptRows | None = None
    """Outputs that this process computes, if other processes compute the others: then ``weight`` and ``bias`` have
    zeros for the others."""


def depends_on_weights(adapter: Adapter, plain: Collection[str]) -> bool:
    """Whether a change must be computed again after the model's weights were replaced. ``plain``: names of matrices
    whose changes are whole new weights."""
    scaled = any(part.magnitude is not None for parts in adapter.layers.values() for part in parts)
    return scaled or bool(adapter.replaced) or any(name in plain for name in adapter.names)


def with_tied_rows(adapter: Adapter, own: Own) -> Adapter:
    """The adapter, with the embeddings of replaced tokens also in the output head, which shares the embedding's weight.
    ``own`` is the output head."""
    change = adapter.embedding
    if change is None or change.rows is None or change.token_ids is None:
        return adapter
    whole = own.weight().to("cpu", torch.float32).clone()
    whole[change.token_ids] = change.rows
    return dataclasses.replace(adapter, replaced={**adapter.replaced, HEAD: [Replaced(0, whole)]})


def change_of(adapter: Adapter, name: str, own: Own) -> MatrixChange:
    """Change of the matrix ``name`` by an adapter, as :class:`~chairlift.kernels.cpu.low_rank.MatrixChange` describes
    it. Raises ModelLoadError if numbers are not finite."""
    parts = adapter.layers.get(name, [])
    replaced = adapter.replaced.get(name, [])
    whole = _whole(replaced, own)
    gains = _gains(parts, own, whole)
    offsets = _offsets(parts, replaced, own)
    if own.kept is not None:
        whole, gains, offsets = (None if each is None else own.kept.of(each) for each in (whole, gains, offsets))
    if own.plain:
        base = own.weight() if whole is None else whole
        return MatrixChange(whole=_merged(parts, base, gains, offsets, name))
    for each, what in ((gains, "lora_magnitude_vector"), (offsets, "bias")):
        if each is not None and not bool(each.isfinite().all()):
            raise ModelLoadError(f"{what} of {name} gives numbers that are not finite; train the adapter again")
    low = [LowRankPart(part.start, part.a, part.b) for part in parts]
    return MatrixChange(low, whole, gains, offsets)


def _whole(replaced: Sequence[Replaced], own: Own) -> Tensor | None:
    """The new weight [out, in]. Rows that are not replaced are the model's own. None if no row is replaced."""
    new = [part for part in replaced if part.weight is not None]
    if not new:
        return None
    first = new[0].weight
    if len(new) == 1 and first is not None and len(first) == own.out_features:
        return first
    whole = own.weight().float().clone()
    for part in new:
        if part.weight is not None:
            whole[part.start : part.start + len(part.weight)] = part.weight.float()
    return whole


def _gains(parts: Sequence[LowRank], own: Own, whole: Tensor | None) -> Tensor | None:
    scaled = [part for part in parts if part.magnitude is not None]
    if not scaled:
        return None
    weight = own.weight() if whole is None else whole
    gains = torch.ones(own.out_features)
    for part in scaled:
        for at in range(0, len(part.b), _ROWS_AT_ONCE):
            some = slice(at, at + _ROWS_AT_ONCE)
            b = part.b[some]
            rows = weight[part.start + at : part.start + at + len(b)].to("cpu", torch.float32)
            norms = (rows + b @ part.a).norm(dim=1)
            if part.magnitude is not None:
                gains[part.start + at : part.start + at + len(b)] = part.magnitude[some] / norms
    return gains


def _offsets(parts: Sequence[LowRank], replaced: Sequence[Replaced], own: Own) -> Tensor | None:
    added = [part for part in parts if part.bias is not None]
    new = [part for part in replaced if part.bias is not None]
    if not added and not new:
        return None
    offsets = torch.zeros(own.out_features)
    for low in added:
        if low.bias is not None:
            offsets[low.start : low.start + len(low.bias)] += low.bias
    own_bias = own.bias() if new else None
    for part in new:
        if part.bias is not None:
            rows = slice(part.start, part.start + len(part.bias))
            offsets[rows] += part.bias - (0.0 if own_bias is None else own_bias[rows].to("cpu", torch.float32))
    return offsets


def _merged(parts: Sequence[LowRank], base: Tensor, gains: Tensor | None, offsets: Tensor | None, name: str) -> Tensor:
    """The weight of a small matrix (a router) with the adapter's terms."""
    if offsets is not None:
        raise ModelLoadError(f"the bias of {name} is changed, and biases of routers are not adapted")
    whole = base.to("cpu", torch.float32).clone()
    for part in parts:
        whole[part.start : part.start + len(part.b)] += part.b @ part.a
    return whole if gains is None else whole * gains[:, None]
