"""Gated delta nets (Yang et al., 2024), as in Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chairlift.kernels.delta_rule import DeltaRule
from chairlift.models.context import AttentionContext, LayerState
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.linear import Linear
from chairlift.models.layers.norm import RMSNorm
from chairlift.models.mixers import DeltaNetConfig

__all__ = ["DeltaNetMixer"]


class DeltaNetMixer(nn.Module):
    """A gated delta net: linear layers for q, k, v and a gate, the gated delta rule, and an output linear layer: [T, D]
    -> [T, D]."""

    float32_parameters = ("decay_log", "step_bias")
    own_heads: tuple[int, int] | None = None
    """``own_heads`` of the cell."""

    def __init__(self, config: NetworkConfig, mixer: DeltaNetConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.sizes = mixer
        self.eps = config.norm_eps
        (qkvz, hidden), (rates, _) = mixer.products(config.hidden_size)[0]
        self.in_proj = Linear(hidden, qkvz)
        self.rates_proj = Linear(hidden, rates)
        self.conv = nn.Parameter(torch.empty(mixer.channels, 1, mixer.taps))
        self.decay_log = nn.Parameter(torch.zeros(mixer.value_heads))
        self.step_bias = nn.Parameter(torch.ones(mixer.value_heads))
        self.norm = RMSNorm(mixer.value_dim, config.norm_eps)
        self.out_proj = Linear(mixer.value_heads * mixer.value_dim, hidden)
        if not self.conv.is_meta:
            nn.init.normal_(self.conv, std=mixer.taps**-0.5)
            with torch.no_grad():
                self.decay_log.uniform_(0.01, 16).log_()

    @property
    def state(self) -> LayerState:
        """Shape of the recurrent state that this layer keeps for each request."""
        return LayerState(self.cell().parts)

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        out: Tensor = self.out_proj(ctx.recur(self.layer, self.cell(), self.in_proj(x), self.rates_proj(x)))
        return out

    def cell(self) -> DeltaRule:
        """The recurrent cell of this layer."""
        sizes = self.sizes
        weights = (self.conv, self.decay_log, self.step_bias, self.norm.weight)
        heads = (sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim)
        return DeltaRule(*weights, self.eps, *heads, self.own_heads)
