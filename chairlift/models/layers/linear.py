"""A linear layer that can trade its weight for a prepacked one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chairlift.errors import InvariantError
from chairlift.kernels import ops

__all__ = ["Linear"]


class Linear(nn.Module):
    """``x[T, in] -> x @ weight.T + bias``, [T, out].

    ``weight`` is [out, in] and an ordinary parameter until :meth:`prepack` swaps it for oneDNN's layout, after which
    the layer serves faster, cannot be trained or saved, and stays on the CPU.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)
        self.packed: Tensor | None = None
        nn.init.normal_(self.weight, std=0.02)

    def prepack(self) -> None:
        """Lay the weight out for the CPU and let go of the original; does nothing where oneDNN cannot help."""
        if self.weight is None:
            return
        self.packed = ops.pack_weight(self.weight)
        if self.packed is not None:
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return ops.packed_linear(x, self.packed, self.bias)
        if self.weight is None:
            raise InvariantError("a linear layer has neither its weight nor a packed one")
        return ops.linear(x, self.weight, self.bias)
