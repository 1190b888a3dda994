"""Layers whose weight may have any format: a linear layer, a stack of linear layers, and the token embedding."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from chairlift.kernels import ops
from chairlift.kernels.weights import PLAIN, MatrixShape, WeightFormat

__all__ = ["Adapted", "AdaptedEmbedding", "Linear", "Matrix", "Stack", "TokenEmbedding"]


class Matrix(nn.Module):
    """Base class of layers with a weight [out, in] and an optional bias [out].

    ``weight`` is an ordinary parameter until :meth:`take` replaces it by a weight of another ``format``. After that,
    the layer cannot be trained, saved or moved.
    """

    weight: Any
    bias: nn.Parameter | None

    def __init__(self, shape: MatrixShape, *, bias: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.format: WeightFormat = PLAIN
        self.weight = nn.Parameter(torch.empty(shape[:2]))
        self.register_parameter("bias", nn.Parameter(torch.zeros(shape.out_features)) if bias else None)
        if not self.weight.is_meta:  # nothing to initialise, and torch would import modules for a second
            nn.init.normal_(self.weight, std=0.02)

    def take(self, weight_format: WeightFormat, weight: Any) -> None:
        """Replace the layer's weight by ``weight``, which has the format ``weight_format``."""
        if not isinstance(weight, nn.Parameter):
            del self.weight  # a module stores parameters apart from other attributes
        self.format = weight_format
        self.weight = weight

    def finish(self) -> None:
        """Complete the weight's format. Call it after every row of weight and bias has been written."""
        self.format.finish(self.weight, self.bias)


class Adapted(Protocol):
    """Function that adds the effect of low-rank adapters to a layer's result."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Return ``out`` [T, out], the layer's result for ``x`` [T, in], after adding the adapters' terms to the rows
        that use an adapter."""
        ...


class Linear(Matrix):
    """``x[T, in] -> x @ weight.T + bias``, [T, out]; for ``interleaved`` see :class:`MatrixShape`."""

    adapted: Adapted | None = None
    """Function that adds the low-rank terms of adapters in plain torch. None if there are no adapters, or if step
    programs add the terms."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, interleaved: bool = False) -> None:
        super().__init__(MatrixShape(out_features, in_features, interleaved), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out = self.format.linear(x, self.weight, self.bias)
        return out if self.adapted is None else self.adapted(x, out)


class AdaptedEmbedding(Protocol):
    """Function that changes the embeddings of tokens as adapters say."""

    def __call__(self, token_ids: Tensor, out: Tensor) -> Tensor:
        """Return ``out`` [T, hidden], the embeddings of ``token_ids`` [T], after the rows that use an adapter were
        changed."""
        ...


class TokenEmbedding(Matrix):
    """``token_ids[T]`` int64 -> [T, hidden]; ``weight`` is [vocab, hidden]."""

    adapted: AdaptedEmbedding | None = None
    """Function that applies adapters in plain torch. None if there are no adapters, or if step programs apply them."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(MatrixShape(vocab_size, hidden_size))

    def forward(self, token_ids: Tensor) -> Tensor:
        out = ops.embedding(token_ids, self.weight)
        return out if self.adapted is None else self.adapted(token_ids, out)


class Stack(Matrix):
    """``count`` weights [out, in] of equal shape, stacked along the rows: one per expert."""

    def __init__(
        self, count: int, out_features: int, in_features: int, *, bias: bool = False, interleaved: bool = False
    ) -> None:
        super().__init__(MatrixShape(count * out_features, in_features, interleaved, stack=count), bias=bias)
