"""Layers with a weight that may lie in any format: a linear layer, a stack of such, and the token embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from chairlift.kernels import ops
from chairlift.kernels.weights import PLAIN, MatrixShape, WeightFormat

__all__ = ["Embedding", "Linear", "Matrix", "Stack"]


class Matrix(nn.Module):
    """A layer that is a weight [out, in], and maybe a bias [out].

    ``weight`` is an ordinary parameter until :meth:`take` swaps it for a weight of another ``format``. From then on the
    layer cannot be trained or saved, and stays where it is.
    """

    weight: Any
    bias: nn.Parameter | None

    def __init__(self, shape: MatrixShape, *, bias: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.format: WeightFormat = PLAIN
        self.weight = nn.Parameter(torch.empty(shape[:2]))
        self.register_parameter("bias", nn.Parameter(torch.zeros(shape.out_features)) if bias else None)
        if not self.weight.is_meta:  # there is nothing to draw, and torch would import a second's worth of modules
            nn.init.normal_(self.weight, std=0.02)

    def take(self, weight_format: WeightFormat, weight: Any) -> None:
        """Serve from ``weight``, which ``weight_format`` made, and let go of the former one."""
        if not isinstance(weight, nn.Parameter):
            del self.weight  # a module keeps parameters apart from all else
        self.format, self.weight = weight_format, weight

    def finish(self) -> None:
        """Every row of weight and bias has been written."""
        self.format.finish(self.weight, self.bias)


class Linear(Matrix):
    """``x[T, in] -> x @ weight.T + bias``, [T, out]; for ``interleaved`` see :class:`MatrixShape`."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, interleaved: bool = False) -> None:
        super().__init__(MatrixShape(out_features, in_features, interleaved), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.format.linear(x, self.weight, self.bias)


class Embedding(Matrix):
    """``token_ids[T]`` int64 -> [T, hidden]; ``weight`` is [vocab, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(MatrixShape(vocab_size, hidden_size))

    def forward(self, token_ids: Tensor) -> Tensor:
        return ops.embedding(token_ids, self.weight)


class Stack(Matrix):
    """So many weights [out, in] of equal shape, one above the other: one for each expert."""

    def __init__(
        self, count: int, out_features: int, in_features: int, *, bias: bool = False, interleaved: bool = False
    ) -> None:
        super().__init__(MatrixShape(count * out_features, in_features, interleaved, stack=count), bias=bias)
