"""The feed-forward block."""

from __future__ import annotations

from torch import Tensor, nn

from chairlift.kernels import ops
from chairlift.models.hf_config import ModelConfig
from chairlift.models.layers.linear import Linear

__all__ = ["MLP"]


class MLP(nn.Module):
    """[T, D] -> [T, D], as ``config.mlp`` says.

    ``swiglu`` (Shazeer, 2020) is down(silu(gate(x)) * up(x)), with gate and up as one product; ``gelu_tanh`` is
    down(gelu(up(x))), and ``relu2`` (So et al., 2021) is down(relu(up(x)) squared).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.kind = config.mlp
        if self.kind == "swiglu":
            self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, interleaved=True)
        else:
            self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            inner = ops.silu_and_mul(self.gate_up_proj(x))
        else:
            inner = ops.relu_squared(self.up_proj(x)) if self.kind == "relu2" else ops.gelu_tanh(self.up_proj(x))
        out: Tensor = self.down_proj(inner)
        return out
