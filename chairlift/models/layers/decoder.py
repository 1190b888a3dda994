"""A decoder layer: attention or a recurrent mixer, then an MLP or experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from chairlift.kernels import ops
from chairlift.models.context import AttentionContext
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.attention import Attention
from chairlift.models.layers.experts import MixtureOfExperts
from chairlift.models.layers.mixers import make_mixer
from chairlift.models.layers.mlp import MLP
from chairlift.models.layers.norm import LayerNorm, RMSNorm, make_norm

__all__ = ["DecoderLayer"]


class DecoderLayer(nn.Module):
    """Attention, a recurrent mixer or both, and an MLP or experts, added to the residual stream: [T, D] -> [T, D].

    A layer may lack the first half (attention, mixer) or the second half (MLP, experts). ``config.block`` gives the
    positions of the norms.
    """

    def __init__(self, config: NetworkConfig, layer: int) -> None:
        super().__init__()
        before, after = config.block not in ("post", "chain"), config.block in ("post", "both")
        self.chained = config.block == "chain"
        self.sums_first = config.block == "post_sum"
        self.parallel = config.block in ("parallel", "parallel_two")
        self.residual_scale = config.residual_scale
        self.attention_scales = config.attention_scales
        self.mixer_scales = config.mixer_scales
        self.mixer = make_mixer(config, layer)
        self.self_attn = Attention(config, layer) if config.attends_in(layer) else None
        self.mixes = self.mixer is not None or self.self_attn is not None
        self.input_layernorm = make_norm(config) if before and self.mixes else None
        second = before and config.block != "parallel" and config.has_mlp(layer)
        self.post_attention_layernorm = make_norm(config) if second else None
        self.mlp: Any = _make_mlp(config, layer)
        self.attention_out_norm = make_norm(config) if after else None
        self.mlp_out_norm = make_norm(config) if after else None

    def forward(self, x: Tensor, rotary: ops.Rotary | None, positions: Tensor, ctx: AttentionContext) -> Tensor:
        if self.chained:
            return self._mixed(x, rotary, positions, ctx)
        if self.sums_first:
            x = _normed(self.input_layernorm, x + self._scaled(self._mixed(x, rotary, positions, ctx)))
            return _normed(self.post_attention_layernorm, x + self._scaled(self.mlp(x)))
        if not self.mixes:
            return self._fed(x)
        normed = _normed(self.input_layernorm, x)
        if self.mixer is not None and self.self_attn is not None:  # one after the other, so that kernels add each
            x = x + self._scaled(self._recurred(normed, ctx))
            return self._fed(x + self._scaled(self._attended(normed, rotary, positions, ctx)))
        attended = self._scaled(_normed(self.attention_out_norm, self._mixed(normed, rotary, positions, ctx)))
        if self.parallel:
            second = self.post_attention_layernorm
            return x + attended + self._scaled(self.mlp(normed if second is None else second(x)))
        return self._fed(x + attended)

    def _fed(self, x: Tensor) -> Tensor:
        """``x`` plus the result of the MLP for ``x``; ``x`` itself if the layer has no MLP."""
        if self.mlp is None:
            return x
        inner: Tensor = self.mlp(_normed(self.post_attention_layernorm, x))
        return x + self._scaled(_normed(self.mlp_out_norm, inner))

    def _mixed(self, x: Tensor, rotary: ops.Rotary | None, positions: Tensor, ctx: AttentionContext) -> Tensor:
        """Result of attention for ``x``, or of the recurrent mixer that replaces attention."""
        return self._attended(x, rotary, positions, ctx) if self.mixer is None else self._recurred(x, ctx)

    def _attended(self, x: Tensor, rotary: ops.Rotary | None, positions: Tensor, ctx: AttentionContext) -> Tensor:
        attention: Any = self.self_attn
        before, behind = self.attention_scales
        return _times(attention(_times(x, before), rotary, positions, ctx), behind)

    def _recurred(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        mixer: Any = self.mixer
        before, behind = self.mixer_scales
        return _times(mixer(_times(x, before), ctx), behind)

    def _scaled(self, branch: Tensor) -> Tensor:
        return _times(branch, self.residual_scale)


def _make_mlp(config: NetworkConfig, layer: int) -> MLP | MixtureOfExperts | None:
    if not config.has_mlp(layer):
        return None
    return MixtureOfExperts(config) if config.has_experts(layer) else MLP(config)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else ops.scale(x, factor)


def _normed(norm: RMSNorm | LayerNorm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    out: Tensor = norm(x)
    return out
