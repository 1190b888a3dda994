"""The gated feed-forward block."""

from __future__ import annotations

from torch import Tensor, nn

from chairlift.kernels import ops
from chairlift.models.layers.linear import Linear

__all__ = ["GatedMLP"]


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, 2020): [T, D] -> down(silu(gate(x)) * up(x)), [T, D]; gate and up are one product."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias, interleaved=True)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(ops.silu_and_mul(self.gate_up_proj(x)))
        return out
