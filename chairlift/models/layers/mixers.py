"""Recurrent layers that stand in place of attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chairlift.kernels.short_conv import ShortConv
from chairlift.models.context import AttentionContext, LayerState
from chairlift.models.hf_config import ModelConfig
from chairlift.models.layers.linear import Linear
from chairlift.models.mixers import ShortConvConfig

__all__ = ["Mixer", "ShortConvMixer", "make_mixer"]


class _Taps(nn.Module):
    """Weight [W, 1, K] of a convolution of each channel by itself, and maybe a bias [W]; see :class:`ShortConv`."""

    bias: nn.Parameter | None

    def __init__(self, channels: int, taps: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.register_parameter("bias", nn.Parameter(torch.zeros(channels)) if bias else None)
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=taps**-0.5)


class ShortConvMixer(nn.Module):
    """[T, D] -> [T, D]: out(c conv(b x)), with b, c and x from one product of the input (LFM2)."""

    def __init__(self, config: ModelConfig, mixer: ShortConvConfig, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.layer = layer
        self.in_proj = Linear(hidden, 3 * hidden, bias=mixer.bias)
        self.conv = _Taps(hidden, mixer.taps, bias=mixer.bias)
        self.out_proj = Linear(hidden, hidden, bias=mixer.bias)

    @property
    def state(self) -> LayerState:
        """What the layer keeps per request."""
        return LayerState(self._cell().parts)

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        out: Tensor = self.out_proj(ctx.recur(self.layer, self._cell(), self.in_proj(x)))
        return out

    def _cell(self) -> ShortConv:
        return ShortConv(self.conv.weight, self.conv.bias, gated=True)


Mixer = ShortConvMixer


def make_mixer(config: ModelConfig, layer: int) -> Mixer | None:
    """The recurrent layer that ``config`` asks for in place of attention; None where a layer attends."""
    mixer = config.mixer(layer)
    return None if mixer is None else _MIXERS[type(mixer)](config, mixer, layer)


_MIXERS = {ShortConvConfig: ShortConvMixer}
