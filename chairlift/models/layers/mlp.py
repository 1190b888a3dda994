"""The MLP (feed-forward block) of a decoder layer."""

from __future__ import annotations

from torch import Tensor, nn

from chairlift.kernels import ops
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.linear import Linear

__all__ = ["MLP"]


_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "geglu_tanh": "gelu_tanh_and_mul",
    "relu": "relu",
    "relu2": "relu_squared",
    "swiglu": "silu_and_mul",
}
"""Value of ``config.mlp`` -> name of the operation between the MLP's linear layers."""


class MLP(nn.Module):
    """[T, D] -> [T, D], according to ``config.mlp``.

    ``swiglu`` (Shazeer, 2020) is down(silu(gate(x)) * up(x)), with gate and up computed by one matmul. ``geglu_tanh``
    is the same with gelu. ``gelu``, ``gelu_tanh``, ``relu`` and ``relu2`` (So et al., 2021) are
    down(activation(up(x))). ``config.mlp_scales`` are factors of (silu's input, the result).
    """

    def __init__(self, config: NetworkConfig, inner: int | None = None) -> None:
        """Create the layers. ``inner`` is the inner width; None means ``config.intermediate_size``."""
        super().__init__()
        hidden = config.hidden_size
        inner = inner or config.intermediate_size
        bias = config.mlp_bias
        self.activation = _ACTIVATIONS[config.mlp]
        self.gated = config.gated
        self.gate_factor, self.factor = config.mlp_scales
        if self.gated:
            self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, interleaved=True)
        else:
            self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        activation = getattr(ops, self.activation)
        product = self.gate_up_proj(x) if self.gated else self.up_proj(x)
        inner = activation(product) if self.gate_factor == 1.0 else ops.silu_and_mul(product, self.gate_factor)
        out: Tensor = self.down_proj(inner)
        return out if self.factor == 1.0 else ops.scale(out, self.factor)
