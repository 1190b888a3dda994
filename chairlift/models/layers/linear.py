"""A linear layer that can trade its weight for a packed one."""

from __future__ import annotations

import enum

import torch
from torch import Tensor, nn

from chairlift.errors import InvariantError
from chairlift.kernels import ops
from chairlift.kernels.cpu.packing import PackedWeight
from chairlift.kernels.fp8 import Fp8Weight

__all__ = ["Linear", "WeightLayout"]


class WeightLayout(enum.Enum):
    """How the weights of linear layers lie in memory."""

    PLAIN = "plain"
    """Ordinary parameters, to train or to save."""
    ONEDNN = "onednn"
    """oneDNN's own layout, for layers that PyTorch runs on the CPU."""
    NATIVE = "native"
    """The packed panels of our CPU kernels: float32 and bfloat16, for step programs only."""
    FP8 = "fp8"
    """8 bits and a scale per output, for the Triton kernels; embedding and output head stay PLAIN."""


class Linear(nn.Module):
    """``x[T, in] -> x @ weight.T + bias``, [T, out].

    ``weight`` is [out, in] and an ordinary parameter until :meth:`prepack` swaps it for oneDNN's layout,
    :meth:`take_native` for that of our kernels, or the loader for ``fp8``. From then on the layer cannot be trained or
    saved, and stays where it is. ``interleaved`` says that the first half of the outputs are gates for the
    second half, so that a layout may put each gate beside what it gates.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, interleaved: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.interleaved = interleaved
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)
        self.packed: Tensor | None = None
        self.native: PackedWeight | None = None
        self.fp8: Fp8Weight | None = None
        if not self.weight.is_meta:  # there is nothing to draw, and torch would import a second's worth of modules
            nn.init.normal_(self.weight, std=0.02)

    def prepack(self) -> None:
        """Lay the weight out for oneDNN and let go of the original; does nothing where oneDNN cannot help."""
        if self.weight is None:
            return
        self.packed = ops.pack_weight(self.weight)
        if self.packed is not None:
            self.weight = None

    def take_native(self, native: PackedWeight) -> None:
        """Serve from ``native`` and let go of the original weight. The bias is copied into it when it is there."""
        self.native = native
        self.weight = None
        if self.bias is not None and not self.bias.is_meta:
            native.set_bias(self.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return ops.packed_linear(x, self.packed, self.bias)
        if self.native is not None:
            return ops.native_linear(x, self.native)
        if self.fp8 is not None:
            return ops.fp8_linear(x, self.fp8, self.bias)
        if self.weight is None:
            raise InvariantError("a linear layer has neither its weight nor a packed one")
        return ops.linear(x, self.weight, self.bias)
