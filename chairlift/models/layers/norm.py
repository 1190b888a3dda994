"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chairlift.kernels import ops

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019), computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)
