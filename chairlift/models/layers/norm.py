"""RMSNorm and LayerNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chairlift.kernels import ops
from chairlift.models.hf_config import NetworkConfig

__all__ = ["LayerNorm", "RMSNorm", "make_norm"]


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019), computed in float32.

    The result is multiplied by ``offset + weight`` (Gemma: offset 1).
    """

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1 - offset))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        if self.offset:
            return ops.rms_norm_offset(x, self.weight, self.eps, self.offset)
        return ops.rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm (Ba et al., 2016), with an optional bias."""

    bias: nn.Parameter | None

    def __init__(self, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_parameter("bias", nn.Parameter(torch.zeros(size)) if bias else None)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


def make_norm(config: NetworkConfig) -> RMSNorm | LayerNorm:
    """Create the norm of activations [T, D] that ``config.norm`` names."""
    if config.norm in ("rms", "rms_offset"):
        return RMSNorm(config.hidden_size, config.norm_eps, offset=config.norm_offset)
    return LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm == "layer")
